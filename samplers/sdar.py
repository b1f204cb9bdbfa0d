"""SDAR's block diffusion: static, dynamic, sequential and entropy-bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.entropy_bound import within_entropy
from samplers.forward import Forward, Kind, Law, Prediction
from samplers.quota import QuotaSampler
from samplers.rules import ORDERS, surest
from samplers.state import DecodeState, ModelFacts

COMPAT = (None, "sdar")


@dataclass(frozen=True, kw_only=True)
class SdarSampler(QuotaSampler):
    """Blocks, each denoised on the cached keys of those before it, then run once more so that its own are kept.

    SDAR's `generate` (arXiv 2510.06303); its ``remasking_strategy`` reads here as

    * ``low_confidence_static``: neither `threshold` nor `entropy_budget`: the step's quota of the surest;
    * ``low_confidence_dynamic``: `threshold`: all that exceed it, and at least the quota;
    * ``sequential``: ``order: left_to_right`` without a threshold;
    * ``entropy_bounded``: `entropy_budget` with ``order: entropy``.

    Attributes:
        entropy_budget: nats that the slots of a step may have together, the largest of them not counted (EB-Sampler,
            arXiv 2505.24857); at least the quota is committed. SDAR's own code of this rule does not run.
        compat: ``sdar``: its generate.py, which finishes a block that holds an end token, runs the last block once more
            although nobody reads its keys, and judges by the law after top-k and top-p: with its greedy setting
            ``top_k: 1`` every probability is 1.
    """

    method_name: ClassVar[str] = "sdar"
    trained_for: ClassVar[str | None] = "block-causal diffusion, e.g. SDAR"

    entropy_budget: float | None = None
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and self.entropy_budget is not None:
            raise ValueError(
                f"sampler.threshold={self.threshold} and sampler.entropy_budget={self.entropy_budget} are two rules: "
                "use one of them, and null for the other"
            )
        budget = self.entropy_budget
        finite = budget is None or 0 <= budget < math.inf
        refuse_unless(finite, "entropy_budget", budget, "a number of nats from 0 up, but finite")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or sdar")

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        return {"cache": "block" if model.attention == "blocks" else "none"}

    def denoise(self, state: DecodeState, block: range) -> Decoding:
        for step in range(self.steps_per_block(state)):
            if self.finished(state, block, step) or (self.compat is None and self.stops(state, block)):
                return
            prediction = yield self.forward(state, block, step)
            self.update_state(state, prediction, step)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        for i in self.chosen(state, prediction, step):
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def chosen(self, state: DecodeState, prediction: Prediction, step: int) -> Sequence[int]:
        if self.entropy_budget is None:
            return super().chosen(state, prediction, step)
        assert prediction.entropy is not None
        score = ORDERS[self.order]
        ranked = surest(prediction.positions, lambda i: score(state, prediction, i), len(prediction.positions))
        count = within_entropy([prediction.entropy[i] for i in ranked], self.entropy_budget)
        return ranked[: max(count, self.quota(state, len(ranked), step))]

    def statistics(self) -> frozenset[str]:
        return super().statistics() | ({"entropy"} if self.entropy_budget is not None else set())

    def law(self, state: DecodeState) -> Law:
        return replace(super().law(state), judged="filtered" if self.compat else "raw")

    def commit(self, state: DecodeState, block: range, last: bool) -> Iterator[Forward]:
        if last and self.compat and self.cache == "block":
            yield Forward(block, context=range(block.start), store=block, kind=Kind.COMMIT)
        yield from super().commit(state, block, last)
