"""Confidence-aware parallel decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, refuse_unless
from samplers.forward import Prediction
from samplers.rules import ORDERS, surest
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class ThresholdSampler(BlockDiffusionSampler):
    """Commit every masked position at least as sure as the threshold, and always the surest one.

    The threshold rule of Fast-dLLM (arXiv 2505.22618, algorithm 1). With `steps` below the number of slots, a step
    commits at least as many as the rest of the budget needs.

    Attributes:
        threshold: smallest probability to commit (``>=``), 0..1; larger is more careful.
    """

    method_name: ClassVar[str] = "threshold"

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        masked = [i for i in prediction.positions if state.mask[i]]
        chosen = [i for i in masked if prediction.confidence[i] >= self.threshold]
        least = self.quota(state, len(masked), step)
        if len(chosen) < least:
            score = ORDERS[self.order]
            chosen = surest(masked, lambda i: score(state, prediction, i), least)
        for i in chosen:
            state.commit(i, prediction.token[i], prediction.confidence[i])
