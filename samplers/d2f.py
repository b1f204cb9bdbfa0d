"""Pipelined blocks over exact caching: a block begins while the one before it is still open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.blocks import NOTHING, BlockLine, MultiBlockSampler, accept, edges
from samplers.forward import Law
from samplers.rules import ORDERS
from samplers.state import DecodeState

ORDERS_SERVED = ("probability", "margin", "entropy")


@dataclass(frozen=True, kw_only=True)
class D2FSampler(MultiBlockSampler):
    """Every forward runs all blocks that are not stored yet and commits, in each, the slots that are sure enough.

    Discrete diffusion forcing (D2F, arXiv 2508.09192). At most one block is added before a forward; attention is
    block-causal from the prompt's end. So a block's keys are final once it and all before it are decided, and the next
    forward, which decodes the others, stores them: none is made for storing alone. An end token only stops adding.

    Attributes:
        threshold: slots surer than this (``>``) are committed, 0..1. ``skip_threshold`` in the authors' code.
        block_activate_threshold: ``decoded_token_threshold`` in the authors' code.
        order: which slot an activated block commits where none is sure: ``probability``, ``margin`` or ``entropy``.
        cache: ``block``, or ``none`` to run all from the prompt on: the same tokens, under this attention.
    """

    method_name: ClassVar[str] = "d2f"
    attentions: ClassVar[frozenset[str]] = frozenset({"blocks"})
    trained_for: ClassVar[str | None] = "discrete diffusion forcing, block-causal (D2F)"

    threshold: float = 0.9
    order: str = "probability"
    cache: str = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.order in ORDERS_SERVED, "order", self.order, f"one of {', '.join(ORDERS_SERVED)}")
        refuse_unless(self.cache in ("block", "none"), "cache", self.cache, "block or none")

    def decode(self, state: DecodeState) -> Decoding:
        line, said = BlockLine(state, self.block_size), NOTHING
        law, attend, ask = self.law(state), edges(state, self.block_size), frozenset({self.order}) - {"probability"}
        while True:
            if not line.ended():
                line.grow(self.block_add_threshold)
            line.activate(self.block_activate_threshold)
            if not line.masked() or (self.early_stop and state.ended(line.stop)):
                return
            forward = line.forward(until=self._storable(state, line))
            now = yield replace(forward, attend=attend, law=law, ask=ask, draw=state.forwards)
            said = line.recall(forward.window, said, now)
            for block in line.unstored:
                accept(state, block, said, self.threshold, ORDERS[self.order])

    def _storable(self, state: DecodeState, line: BlockLine) -> int:
        """End of what is stored now. Where a slot is read one row before it and tokens are drawn, a block's first slot
        is drawn anew in every forward like the others: the row before it is run again, instead of recalled."""
        if self.cache == "none":
            return 0
        return max(line.final() - (state.model.shift if self.temperature else 0), line.stored)

    def law(self, state: DecodeState) -> Law:
        """Confidence is of the law that tokens are drawn from, the nucleus cut before top-k: the authors' code."""
        drawn = self.temperature or self.top_p or self.top_k
        return replace(super().law(state), judged="filtered" if drawn else "raw", nucleus_first=True)
