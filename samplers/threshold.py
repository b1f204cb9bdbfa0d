"""Confidence-aware parallel decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, refuse_unless
from samplers.forward import Prediction
from samplers.rules import ORDERS, sure_or_surest, surest, within_factor, within_factor_as_published
from samplers.state import DecodeState

DEFAULT = 0.9  # as published for GSM8K and the other tasks of the paper
COMPAT = (None, "fastdllm_a", "fastdllm_b", "fastdllm_d")


@dataclass(frozen=True, kw_only=True)
class ThresholdSampler(BlockDiffusionSampler):
    """Commit every masked position at least as sure as the threshold, and always the surest one.

    The threshold rule of Fast-dLLM (arXiv 2505.22618, algorithm 1), or with `factor` its factor rule (theorem 1). With
    `steps` below the number of slots, a step commits at least as many as the rest of the budget needs.

    Attributes:
        threshold: smallest probability to commit (``>=``), 0..1; larger is more careful; 0.9 without a factor.
        factor: instead of the threshold: how many of the surest are sure enough together; larger is bolder.
        compat: what Fast-dLLM's code did, by version: ``fastdllm_a`` (June 2025) runs once more where a cached block's
            first forward filled it; ``fastdllm_d`` (May 2026) leaves masks where a block's `steps` are spent; all of
            them take the last candidate of the factor rule although it failed. Its `steps` are no least progress.
    """

    method_name: ClassVar[str] = "threshold"

    threshold: float | None = None
    factor: float | None = None
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and self.factor is not None:
            raise ValueError(
                f"sampler.threshold={self.threshold} and sampler.factor={self.factor} are two rules: use one of them, "
                "and null for the other"
            )
        if self.factor is None and self.threshold is None:
            object.__setattr__(self, "threshold", DEFAULT)
        refuse_unless(
            self.threshold is None or 0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1"
        )
        finite = self.factor is None or 0 < self.factor < math.inf
        refuse_unless(finite, "factor", self.factor, "a finite number above 0")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, f"null or {', '.join(map(str, COMPAT[1:]))}")

    def wanted(self, state: DecodeState, block: range, step: int) -> Sequence[int]:
        if self._abandons and step == 0:  # what earlier blocks left open is open still
            return state.masked_in(range(state.prompt_length, block.stop))
        return super().wanted(state, block, step)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        masked = [i for i in prediction.positions if state.mask[i]]
        least = 1 if self.compat else self.quota(state, len(masked), step)
        score = ORDERS[self.order]
        sure = self._sure(masked, prediction)
        for i in sure_or_surest(sure, masked, lambda i: score(state, prediction, i), least):
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def _sure(self, masked: Sequence[int], prediction: Prediction) -> Sequence[int]:
        if self.threshold is not None:
            return [i for i in masked if prediction.confidence[i] >= self.threshold]
        assert self.factor is not None
        ranked = surest(masked, prediction.confidence.__getitem__, len(masked))
        rule = within_factor_as_published if self.compat else within_factor
        return ranked[: rule([prediction.confidence[i] for i in ranked], self.factor)]

    def steps_per_block(self, state: DecodeState) -> int:
        """Fast-dLLM's loops have no bound, but for the newest one on the dual cache."""
        bounded = self.compat is None or self._abandons
        return super().steps_per_block(state) if bounded else self.block_size + 1

    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        useless = self.compat == "fastdllm_a" and self.cache != "none" and step == 1
        return not useless and super().finished(state, block, step)

    @property
    def _abandons(self) -> bool:
        """Whether a block is left with masks once its steps are spent."""
        return self.compat == "fastdllm_d" and self.cache == "dual"
