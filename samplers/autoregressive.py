"""One token after the other, left to right: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samplers.base import Decoding, Sampler, refuse_unless
from samplers.forward import CAUSAL, Forward
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSampler(Sampler):
    """Draw the next token until an end token is drawn or the canvas is full.

    Attributes:
        cache: ``prefix`` reuses keys and values (exact for causal models), ``none`` runs the whole prefix each time.
    """

    method_name: ClassVar[str] = "autoregressive"
    attentions: ClassVar[frozenset[str]] = frozenset({"causal"})

    cache: str = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.cache in ("prefix", "none"), "cache", self.cache, "prefix or none")
        refuse_unless(self.eos != "last", "eos", self.eos, "allow or never: in order, no end token can wait")

    def decode(self, state: DecodeState) -> Decoding:
        shift = state.model.shift
        # a model that reads slot i at row i has seen its mask, not its token: such a row cannot be kept
        cached = self.cache == "prefix" and shift == 1
        law, start = self.law(state), 0
        for slot in state.canvas:
            window = range(start, slot + 1 - shift)
            store = window if cached else range(0)
            prediction = yield Forward(
                window, [slot], context=range(start), store=store, attend=CAUSAL, law=law, draw=state.forwards
            )
            token = prediction.token[slot]
            state.commit(slot, token, prediction.confidence[slot])
            if token in state.model.end_ids:
                return
            start = window.stop if cached else 0
