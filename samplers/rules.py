"""Small pure rules that several samplers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samplers.forward import Prediction
from samplers.state import DecodeState

Score = Callable[[DecodeState, Prediction, int], float]
FILLED = "filled_without_prediction"  # a note: slots that a sampler decided although no forward said anything of them


def _margin(state: DecodeState, prediction: Prediction, slot: int) -> float:
    assert prediction.margin is not None, "order=margin needs margin in the forward's ask, see statistics()"
    return prediction.margin[slot]


def _negative_entropy(state: DecodeState, prediction: Prediction, slot: int) -> float:
    assert prediction.entropy is not None, "order=entropy needs entropy in the forward's ask, see statistics()"
    return -prediction.entropy[slot]


# which undecided slot goes first: the one with the largest score
ORDERS: dict[str, Score] = {
    "probability": lambda state, prediction, slot: prediction.confidence[slot],
    "margin": _margin,
    "entropy": _negative_entropy,
    "random": lambda state, prediction, slot: state.uniform(slot, -1 - state.steps),  # apart from the token draws
    "left_to_right": lambda state, prediction, slot: -float(slot),
}


def surest(slots: Sequence[int], score: Callable[[int], float], count: int) -> list[int]:
    """The ``count`` slots of the largest score; ties go to the lowest slot. ``slots`` ascend."""
    if count == 1 and slots:
        return [max(slots, key=score)]
    return sorted(slots, key=score, reverse=True)[:count]  # Python's sort keeps equal ones in order, reversed too


def sure_or_surest(
    sure: Sequence[int], slots: Sequence[int], score: Callable[[int], float], least: int
) -> Sequence[int]:
    """Those that are sure enough, or the ``least`` surest where these are fewer."""
    return sure if len(sure) >= min(least, len(slots)) else surest(slots, score, least)


def due(undecided: int, steps_left: int) -> int:
    """Tokens to commit now so that ``undecided`` slots spread evenly over ``steps_left`` steps, larger shares first.

    Repeated, it gives LLaDA's quota list ``m // s + (j < m % s)`` (arXiv 2502.09992, reference code).
    """
    return -(-undecided // steps_left)


def within_factor(confidences: Sequence[float], factor: float) -> int:
    """How many of the surest tokens to commit at once, at least 1: the largest n with (n + 1) (1 - c_n) < factor.

    Fast-dLLM's factor rule (arXiv 2505.22618, theorem 1): so sure tokens are jointly the likeliest too.

    Args:
        confidences: of the candidates, descending.
    """
    passing = [n for n, confidence in enumerate(confidences, 1) if (n + 1) * (1 - confidence) < factor]
    return max(passing, default=1)


def within_factor_as_published(confidences: Sequence[float], factor: float) -> int:
    """`within_factor` as Fast-dLLM's code has it: it stops at the first failure, the last candidate never fails."""
    limits = [-1.0, *(1 - factor / (n + 1) for n in range(2, len(confidences) + 1))]
    last = len(confidences) - 1
    taken = next((i for i, (c, limit) in enumerate(zip(confidences, limits, strict=True)) if c < limit), last)
    return taken + 1 if taken in (0, last) else taken
