"""Fast-dLLM's port to Dream: it differs from Fast-dLLM on LLaDA in what a block's first forward decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, Decoding, refuse_unless
from samplers.forward import Forward, Kind, Law, Prediction
from samplers.rules import ORDERS, surest
from samplers.schedule import portion, share
from samplers.state import DecodeState

STALE = ("prefix", "dual")  # caches whose steps run no slot before the block
COMPAT = (None, "fastdllm")


@dataclass(frozen=True, kw_only=True)
class FastDLLMDreamSampler(BlockDiffusionSampler):
    """Decide what is at least as sure as the threshold, and always the surest (Fast-dLLM on Dream, arXiv 2505.22618).

    With ``cache: prefix`` or ``dual`` a block's first forward runs the whole row and decides the block's first slot
    only, however sure it is: Dream predicts a slot at the row before it, and later forwards begin at the block. They
    decide the rest, by the threshold or, without one, by Dream's schedule.

    Without them (``num_blocks: 1`` as published) the threshold holds tokens back: `steps` spreads the slots evenly, a
    step tries as many of the surest as are due, and what is not sure enough is due again, with the next step's. Thus
    `steps` is the *least* number of forwards; unsure slots add to it.

    Attributes:
        threshold: smallest probability to commit (``>=``), 0..1; null is Dream's schedule, for ``prefix`` and ``dual``.
        steps: of the schedule, or the least of the uncached threshold; the cached threshold has no use for it.
        order: which slots are the surest. The authors' code: ``probability`` with a threshold, else ``entropy``.
        schedule_eps: the schedule's last time point.
        compat: ``fastdllm``: as its loop looks for masks after a forward only, a block of one slot takes two.
    """

    method_name: ClassVar[str] = "fast_dllm_dream"
    trained_for: ClassVar[str | None] = "masked diffusion that predicts the next slot, e.g. Dream"

    threshold: float | None = None
    schedule_eps: float = 1e-3
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sure, eps = self.threshold, self.schedule_eps
        refuse_unless(sure is None or 0 <= sure <= 1, "threshold", sure, "a probability, 0 to 1")
        refuse_unless(0 <= eps < 1, "schedule_eps", eps, "from 0 to below 1")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or fastdllm")
        if sure is None and self.cache not in STALE:
            raise ValueError(
                f"sampler.threshold=null with sampler.cache={self.cache} is Dream's own rule: use sampler=dream, "
                "a threshold, or the cache prefix or dual"
            )

    def law(self, state: DecodeState) -> Law:
        return replace(super().law(state), judged="filtered", nucleus_first=True)

    def decode(self, state: DecodeState) -> Decoding:
        if self.cache not in STALE:
            yield from super().decode(state)
            return
        law, ask = self.law(state), self.statistics()
        for block in state.blocks(self.block_size):
            step = 0
            while not self.finished(state, block, step):
                forward = self._forward(state, block, step)
                prediction = yield replace(forward, law=law, ask=ask, draw=state.steps)
                self.update_state(state, prediction, step)
                step += 1
            if self.early_stop and state.ended(block.stop):
                return

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        score = ORDERS[self.order]
        ranked = surest(prediction.positions, lambda i: score(state, prediction, i), len(prediction.positions))
        for i in self._chosen(state, ranked, prediction, step):
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def wanted(self, state: DecodeState, block: range, step: int) -> Sequence[int]:
        masked = state.masked_in(block)
        first_only = self.cache in STALE and step == 0 and not self._in_one_step(state)
        return masked[:1] if first_only else masked

    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        useless = self.compat == "fastdllm" and self.cache in STALE and step == 1
        return not useless and super().finished(state, block, step)

    def steps_per_block(self, state: DecodeState) -> int:
        """Most steps of an uncached block; each decides one slot at least."""
        return self.block_size

    def _forward(self, state: DecodeState, block: range, step: int) -> Forward:
        """The whole row first. Then nothing before the block, not even the row that its first slot was read at."""
        row, before, want = state.row, range(block.start), self.wanted(state, block, step)
        if step == 0:
            kind = Kind.REFRESH if block.start > state.prompt_length else Kind.DENOISE
            return Forward(row, want, store=row if self.cache == "dual" else before, kind=kind)
        if self.cache == "dual":
            return Forward(block, want, context=row, store=block)
        return Forward(range(block.start, row.stop), want, context=before)

    def _chosen(self, state: DecodeState, ranked: Sequence[int], prediction: Prediction, step: int) -> Sequence[int]:
        if self.threshold is None:
            return ranked if step == 0 else ranked[: self._scheduled(state, len(ranked), step)]
        if self.cache not in STALE:
            ranked = ranked[: self._due(state, len(ranked), step)]
        return [*ranked[:1], *(i for i in ranked[1:] if prediction.confidence[i] >= self.threshold)]

    def _scheduled(self, state: DecodeState, undecided: int, step: int) -> int:
        return portion(undecided, share(step, super().steps_per_block(state), self.schedule_eps))

    def _due(self, state: DecodeState, undecided: int, step: int) -> int:
        """Slots to try: those undecided that an even spread does not leave for later steps, one at least."""
        steps, slots = super().steps_per_block(state), min(self.block_size, state.asked)
        later = slots * max(steps - 1 - step, 0) // steps
        return max(undecided - later, 1)

    def _in_one_step(self, state: DecodeState) -> bool:
        """Whether a block's first forward is the schedule's last."""
        return self.threshold is None and super().steps_per_block(state) == 1
