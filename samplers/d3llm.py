"""Several blocks at once under full attention, committing whatever is predicted with little entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.blocks import BlockLine, MultiBlockSampler
from samplers.forward import FULL, Forward, Kind, Prediction
from samplers.rules import FILLED
from samplers.state import DecodeState, ModelFacts

COMPAT = (None, "d3llm")
UNCOUNTED = "d3llm_rounds_without_forward"  # a note: rounds that the authors' code counts and that ran no model


@dataclass(frozen=True, kw_only=True)
class D3LLMSampler(MultiBlockSampler):
    """Commit every slot of the blocks in work whose entropy is small enough, and always one of the first open block.

    d3LLM's multi-block decoding (arXiv 2601.07568), as TAD uses it. Every forward runs the whole canvas, also blocks
    not in work yet. With both block thresholds at 1 it is dParallel's decoding (arXiv 2509.26488): one block at a time.

    Attributes:
        entropy_threshold: largest entropy of a slot to commit it (``<=``), nats.
        block_activate_threshold: ``decoded_token_threshold`` in the authors' code.
        always_surest: the slot of least entropy among all blocks in work is committed too, sure or not, as in the code
            for LLaDA; the one for Dream only makes the first open block go on.
        cache: ``none``, or ``prefix``: keys of finished blocks from the left on are stored. They are approximate: under
            full attention they would change with what follows.
        cache_delay: forwards made on the whole row once a block is finished, before its keys are stored.
        cache_refresh_interval: stored keys are computed anew in every so many-th forward; null is never.
        early_stop: once an end token stands, whatever follows becomes that token and only what precedes it is decoded.
        compat: ``d3llm``: slots behind an end token that was just committed may still be overwritten once, and stay so
            if the last mask is filled with them; and where rows are read one before their slot, the first slot of a
            window behind stored keys is read at its own row, so takes what is meant for the next.
    """

    method_name: ClassVar[str] = "d3llm"
    attentions: ClassVar[frozenset[str]] = frozenset({"full"})
    trained_for: ClassVar[str | None] = "certainty forcing or trajectory distillation (dParallel, d3LLM, TAD)"

    entropy_threshold: float = 0.5
    always_surest: bool = True
    cache: str = "none"
    cache_delay: int = 1
    cache_refresh_interval: int | None = None
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        limit, delay, interval = self.entropy_threshold, self.cache_delay, self.cache_refresh_interval
        refuse_unless(0 <= limit < math.inf, "entropy_threshold", limit, "a number of nats from 0 up, but finite")
        refuse_unless(self.cache in ("none", "prefix"), "cache", self.cache, "none or prefix")
        refuse_unless(delay >= 0, "cache_delay", delay, "a number of forwards, 0 or more")
        refuse_unless(interval is None or interval >= 1, "cache_refresh_interval", interval, "null, or 1 or more")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or d3llm")

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        """The authors have one code for LLaDA and one for Dream, whose prediction of slot i is read at row i - 1."""
        return {**super().suited(model), "always_surest": model.shift == 0}

    def decode(self, state: DecodeState) -> Decoding:
        line, finished = BlockLine(state, self.block_size), dict[int, int]()
        law, ask = self.law(state), frozenset({"entropy"})
        if line.waiting:
            line.add()
        while open_slots := self._open(state, line):
            line.grow(self.block_add_threshold)
            line.activate(self.block_activate_threshold)
            candidates = [slot for slot in open_slots if slot < line.stop]
            forward = self._forward(state, line, finished)
            askew = bool(self.compat and state.model.shift) and candidates[0] == forward.window.start
            want = sorted({*candidates[1:], candidates[0] + 1}) if askew else candidates
            said = yield replace(forward, want=want, attend=FULL, law=law, ask=ask, draw=state.forwards)
            if askew:
                read_askew(candidates, said)
            for slot in self._chosen(line, said):
                state.commit(slot, said.token[slot], said.confidence[slot])

    def _open(self, state: DecodeState, line: BlockLine) -> list[int]:
        """Slots that a token may be committed to, none once the sequence is done."""
        before = state.masked_in(state.canvas)
        if self.early_stop and (before or not self.compat):
            close(state, line)
        now = state.masked_in(state.canvas)
        if before and not now:
            state.notes[UNCOUNTED] += 1
        return before if self.compat and now else now

    def _chosen(self, line: BlockLine, said: Prediction) -> set[int]:
        entropy = said.entropy
        assert entropy is not None
        chosen = {slot for slot in said.positions if entropy[slot] <= self.entropy_threshold}
        if self.always_surest:
            chosen.add(min(said.positions, key=entropy.__getitem__))
        front = next(block.slots for block in line.added if block.activated and line.progress(block.slots) < 1)
        if chosen.isdisjoint(front):
            chosen.add(min((slot for slot in said.positions if slot in front), key=entropy.__getitem__))
        return chosen

    def _forward(self, state: DecodeState, line: BlockLine, finished: dict[int, int]) -> Forward:
        """Which keys are read and which stored from now on."""
        if self.cache == "none":
            return Forward(state.row)
        stored, turn = line.stored, state.forwards + 1
        ready, delayed = self._ready(line, finished, turn)
        periodic = self.cache_refresh_interval is not None and turn % self.cache_refresh_interval == 0
        if ready == stored and (delayed or periodic):
            return Forward(state.row, store=range(stored), kind=Kind.REFRESH if stored else Kind.DENOISE)
        start = stored if self.compat else max(stored - state.model.shift, 0)
        line.stored = ready
        return Forward(range(start, len(state.tokens)), context=range(start), store=range(stored, ready))

    def _ready(self, line: BlockLine, finished: dict[int, int], turn: int) -> tuple[int, bool]:
        """End of what may be stored now, and whether a finished block behind it has to wait.

        ``finished`` is kept here: the turn in which a part was found finished with nothing waiting before it, by its
        end. A block behind one that waits is not looked at, so its own delay has not begun.
        """
        finished.setdefault(line.start, 0)  # the prompt
        ready = line.stored
        for slots in (range(line.start), *(block.slots for block in line.unstored)):
            if slots.stop <= ready:
                continue
            if line.progress(slots) < 1:
                return ready, False
            if turn - finished.setdefault(slots.stop, turn) < self.cache_delay:
                return ready, True
            ready = slots.stop
        return ready, False


def read_askew(slots: list[int], said: Prediction) -> None:
    """Give the first of ``slots`` what was said of the slot behind it."""
    first = slots[0]
    assert said.entropy is not None
    said.token[first], said.confidence[first] = said.token[first + 1], said.confidence[first + 1]
    said.entropy[first] = said.entropy[first + 1]
    said.positions = slots


def close(state: DecodeState, line: BlockLine) -> None:
    """Fill what follows the first end token with it: so all blocks behind it are in work and done."""
    ends = state.model.end_ids
    first = next((slot for slot in state.canvas if state.tokens[slot] in ends), None)
    if first is None:
        return
    end = state.tokens[first]
    for slot in range(first + 1, len(state.tokens)):
        if state.tokens[slot] != end:
            state.notes[FILLED] += state.mask[slot]
            state.commit(slot, end)
    while line.waiting:
        line.add()
