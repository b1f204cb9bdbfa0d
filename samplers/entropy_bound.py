"""The entropy-bounded rule: as many slots at once as their summed entropy allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, refuse_unless
from samplers.forward import Prediction
from samplers.rules import ORDERS, surest
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class EntropyBoundSampler(BlockDiffusionSampler):
    """Commit the surest slots whose summed entropy, less the largest, stays under a budget; always the surest one.

    EB-Sampler (arXiv 2505.24857): that sum bounds the divergence between the joint law of the chosen tokens and the
    product they are drawn from. In the order of entropy it is DiffusionGemma's rule: slots ascend by entropy, and one
    is taken while the entropies before it sum to at most the budget. With `steps` below the number of slots, a step
    commits at least as many as the rest of the budget of steps needs.

    Attributes:
        entropy_budget: of one step, in nats (``<=``); larger is bolder, 0 is one token a step (more where a law is
            certain).
        order: which slots are surest; ``entropy`` as published by DiffusionGemma.
    """

    method_name: ClassVar[str] = "entropy_bound"

    order: str = "entropy"
    entropy_budget: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.entropy_budget
        refuse_unless(0 <= budget < math.inf, "entropy_budget", budget, "a number of nats from 0 up, but finite")

    def statistics(self) -> frozenset[str]:
        return super().statistics() | {"entropy"}

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        assert prediction.entropy is not None
        masked = [slot for slot in prediction.positions if state.mask[slot]]
        score = ORDERS[self.order]
        ranked = surest(masked, lambda slot: score(state, prediction, slot), len(masked))
        count = within_entropy([prediction.entropy[slot] for slot in ranked], self.entropy_budget)
        for slot in ranked[: max(count, self.quota(state, len(masked), step))]:
            state.commit(slot, prediction.token[slot], prediction.confidence[slot])


def within_entropy(entropies: Sequence[float], budget: float) -> int:
    """How many of the first may go together: the most whose sum less the largest of them is at most ``budget``."""
    others, largest = 0.0, 0.0
    for count, entropy in enumerate(entropies):
        others, largest = others + min(largest, entropy), max(largest, entropy)
        if others > budget:
            return count
    return len(entropies)
