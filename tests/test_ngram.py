"""The n-gram model, against numbers worked by hand and all ids tried."""

from __future__ import annotations

import math
import random

import pytest

from samplers import NGram
from samplers.ngram import FLOOR


def test_interpolation_worked_by_hand() -> None:
    """`1 2 1 3`: of 4 tokens 2 are 1s, 3 kinds; behind 1 come 2 and 3, once each.

    P(1) = (2 + 3 f) / 7, P(2) = (1 + 3 f) / 7; P(2 | 1) = (1 + 2 P(2)) / 4; P(1 | 1) = 2 P(1) / 4.
    """
    model = NGram([[1, 2, 1, 3]], order=2, floor=1e-3)
    alone = {1: (2 + 3e-3) / 7, 2: (1 + 3e-3) / 7}
    assert math.exp(model.log_probability(1, [])) == pytest.approx(alone[1])
    assert math.exp(model.log_probability(2, [5, 1])) == pytest.approx((1 + 2 * alone[2]) / 4)
    assert math.exp(model.log_probability(1, [1])) == pytest.approx(2 * alone[1] / 4)
    assert math.exp(model.log_probability(2, [8])) == pytest.approx(alone[2]), "8 was never seen"
    assert math.exp(model.log_probability(2, [3])) == pytest.approx(alone[2]), "nothing followed 3"


def test_what_was_never_seen_has_the_floor() -> None:
    assert NGram([[1, 2, 3]]).log_probability(77, [1, 2]) == math.log(FLOOR) == NGram([]).log_probability(1, [2, 3])
    assert NGram([], order=1, floor=0.25).log_probability(1, []) == math.log(0.25)


def test_only_the_last_tokens_of_the_context_count() -> None:
    model = NGram([[1, 2, 3, 4], [9, 2, 3, 5, 5]], order=3)
    assert model.log_probability(4, [1, 1, 2, 3]) == model.log_probability(4, [2, 3])
    assert model.log_probability(4, [2, 3]) != model.log_probability(4, [3])
    assert NGram([[1, 2], [3, 4]], order=3).log_probability(3, [2]) == NGram([[1, 2], [3, 4]]).log_probability(3, [])


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_likeliest_are_those_of_all_ids(order: int) -> None:
    choose = random.Random(order)
    model = NGram([[choose.choice((0, 1, 1, 2, 3, 4, 5)) for _ in range(60)] for _ in range(3)], order)
    for _ in range(40):
        context = [choose.randrange(7) for _ in range(choose.randrange(5))]
        every = sorted(((t, model.log_probability(t, context)) for t in range(6)), key=lambda p: (-p[1], p[0]))
        for count in (1, 2, 4, 6):
            assert model.likeliest(context, count) == every[:count]
        assert len(model.likeliest(context, 50)) == 6, "all that were ever seen"


def test_log_probabilities_are_never_above_nought() -> None:
    model = NGram([[4] * 50], order=3)
    assert -0.1 < model.log_probability(4, [4, 4]) <= 0
    assert NGram([]).likeliest([1, 2], 3) == []


@pytest.mark.parametrize(("order", "floor"), [(0, 0.1), (3, 0.0), (3, 1.0)])
def test_an_order_or_floor_without_a_meaning_is_refused(order: int, floor: float) -> None:
    with pytest.raises(ValueError, match=r"order 0|floor="):
        NGram([], order, floor)
