"""Dream's decoding: all undecided slots compete, a schedule says how many of them a step decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import COOLEST, HOTTEST, BlockDiffusionSampler, refuse_unless
from samplers.forward import Law, Prediction
from samplers.rules import ORDERS, surest
from samplers.schedule import portion, share
from samplers.state import DecodeState

JUDGED = ("filtered", "tempered", "raw")


@dataclass(frozen=True, kw_only=True)
class DreamSampler(BlockDiffusionSampler):
    """Each step decides the surest of the undecided slots, as many as the time it covers.

    This is Dream's `diffusion_generate` (arXiv 2508.15487). Between the time points t > s it decides the share
    1 - s / t of the slots left, see `samplers.schedule`. It never leaves early: `steps` forwards are made, always. The
    whole canvas is one block there (``num_blocks: 1``); smaller blocks decode semi-autoregressively by the same rule.

    Attributes:
        order: Dream's ``maskgit_plus`` is ``probability``, its ``topk_margin`` is ``margin``, its ``entropy`` the same.
            Its ``origin`` is ``random``: each slot is decided with the step's share as probability, apart from others.
        order_temperature: 0 takes the surest. Above it slots are drawn one after the other, without replacement, from
            the softmax of their scores divided by it (Dream's ``alg_temp``).
        schedule_eps: the last time point (Dream's ``eps``).
        judged: the law whose probability, margin or entropy sets the order: ``filtered``, as published, is tempered
            and cut by `top_p`, then `top_k`; ``tempered`` is not cut; ``raw`` is that of LLaDA.
    """

    method_name: ClassVar[str] = "dream"
    trained_for: ClassVar[str | None] = "masked diffusion with full attention, e.g. Dream"

    order_temperature: float = 0.0
    schedule_eps: float = 1e-3
    judged: str = "filtered"

    def __post_init__(self) -> None:
        super().__post_init__()
        heat, eps = self.order_temperature, self.schedule_eps
        refuse_unless(heat == 0 or COOLEST <= heat <= HOTTEST, "order_temperature", heat, "0, or from 1e-6 to 1e6")
        refuse_unless(0 <= eps < 1, "schedule_eps", eps, "from 0 to below 1")
        refuse_unless(self.judged in JUDGED, "judged", self.judged, f"one of {', '.join(JUDGED)}")
        if heat and self.order == "random":
            raise ValueError(f"sampler.order_temperature={heat} does not go with sampler.order=random: use 0")

    def law(self, state: DecodeState) -> Law:
        return replace(super().law(state), judged=self.judged, nucleus_first=True)

    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        return False

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        masked = [i for i in prediction.positions if state.mask[i]]
        now = share(step, self.steps_per_block(state), self.schedule_eps)
        if self.order == "random":
            chosen = [i for i in masked if _order_draw(state, i) < now]
        else:
            chosen = surest(masked, self._score(state, prediction), portion(len(masked), now))
        for i in chosen:
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def _score(self, state: DecodeState, prediction: Prediction) -> Callable[[int], float]:
        """The order's score; in the heat with a Gumbel draw added: the largest then are draws without replacement."""
        score, heat = ORDERS[self.order], self.order_temperature
        if heat == 0:
            return lambda i: score(state, prediction, i)
        return lambda i: score(state, prediction, i) / heat - math.log(-math.log(_order_draw(state, i)))


def _order_draw(state: DecodeState, slot: int) -> float:
    return state.uniform(slot, -1 - state.steps)  # apart from the token draws
