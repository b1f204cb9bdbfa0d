"""LLaDA's quota rule, and the revocable fill-then-remask rule for a remask ratio above 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, refuse_unless
from samplers.forward import Prediction
from samplers.rules import ORDERS, surest
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class ConfidenceSampler(BlockDiffusionSampler):
    """Each step commits the surest slots of the block, as many as spread its masks evenly over its steps.

    This is LLaDA's `generate` (arXiv 2502.09992): its ``low_confidence`` remasking is ``order: probability``, its
    ``random`` is ``order: random``. It never leaves a block early: `steps` forwards are made, always.

    Attributes:
        remask_ratio: 0 is LLaDA. Above 0 every step fills the block, re-decides slots of which it is now surer, and
            takes back the least sure share ``remask_ratio * (1 - (step + 1) / steps)`` of the filled ones.
    """

    method_name: ClassVar[str] = "confidence"

    remask_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.remask_ratio < 1, "remask_ratio", self.remask_ratio, "from 0 to below 1")

    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        return False

    def wanted(self, state: DecodeState, block: range, step: int) -> Sequence[int]:
        if self.remask_ratio == 0:
            return state.masked_in(block)
        return range(max(block.start, state.prompt_length), block.stop)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        if self.remask_ratio > 0:
            return self._fill_then_remask(state, prediction, step)
        masked = [i for i in prediction.positions if state.mask[i]]
        score = ORDERS[self.order]
        for i in surest(masked, lambda i: score(state, prediction, i), self.quota(state, len(masked), step)):
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def _fill_then_remask(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        block = prediction.positions
        for i in block:
            if state.mask[i] or prediction.confidence[i] >= state.confidences[i]:
                state.commit(i, prediction.token[i], prediction.confidence[i])
        steps = self.steps_per_block(state)
        taken_back = int(len(block) * self.remask_ratio * (1 - (step + 1) / steps))
        for i in sorted(block, key=state.confidences.__getitem__)[:taken_back]:
            state.remask(i)
