"""The entropy-bounded rule: hand-worked sets, its two limits, and what holds of every run."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from adapters.toy import TableAdapter
from pipeline.engine import Engine, Task
from samplers import EntropyBoundSampler
from samplers.entropy_bound import within_entropy
from tests.models import END, MASK, random_llama
from tests.test_samplers import TEN, log_probabilities, run, steps, tokens


@pytest.mark.parametrize(
    ("entropies", "budget", "count"),
    [
        ([0.01, 0.04, 0.05, 0.2, 0.9], 0.1, 4),  # 0, 0.01, 0.05 and 0.1 before each, then 0.3
        ([0.01, 0.04, 0.05 + 1e-9, 0.2, 0.9], 0.1, 3),
        ([0.5, 0.6], 0.1, 1),  # the first always goes
        ([0.0, 0.0, 0.0, 0.3], 0.0, 4),  # certain laws cost nothing
        ([0.2, 0.3], 0.0, 1),
        ([0.9, 0.01, 0.02, 0.2], 0.1, 3),  # another order: the largest is left out of the sum wherever it stands
        ([0.2, 0.3], math.inf, 2),
        ([], 0.1, 0),
    ],
)
def test_the_summed_entropy_less_the_largest_stays_in_the_budget(
    entropies: list[float], budget: float, count: int
) -> None:
    assert within_entropy(entropies, budget) == count


def entropy(p: float) -> float:
    """Of `log_probabilities` with one id of probability ``p``."""
    rest = (1 - p) / 9
    return -p * math.log(p) - 9 * rest * math.log(rest)


def test_slots_go_by_ascending_entropy_while_those_before_fit() -> None:
    sure = [0.7, 0.999, 0.99, 0.98]  # 1.27, 0.01, 0.08 and 0.14 nats
    table = {slot: log_probabilities(p5=p) for slot, p in enumerate(sure)}

    def first(budget: float) -> set[int]:
        sampler = EntropyBoundSampler(block_size=4, steps=4, entropy_budget=budget)
        return set(steps(run(TableAdapter(TEN, table), sampler, 4))[0])

    two = entropy(0.999) + entropy(0.99)
    assert first(0.0) == {1} and first(entropy(0.999) + 1e-5) == {1, 2}
    assert first(two - 1e-4) == {1, 2} and first(two + 1e-4) == {1, 2, 3}
    assert first(two + entropy(0.98) + 1e-4) == {0, 1, 2, 3}


def test_an_order_by_probability_counts_entropies_all_the_same() -> None:
    """Slot 0 is the more probable, slot 1 of the lower entropy."""
    laws = ((0.50, *[0.50 / 9] * 9), (0.45, 0.44, *[0.11 / 8] * 8))
    table = {slot: [math.log(p) for p in law] for slot, law in enumerate(laws)}
    orders = {}
    for order in ("entropy", "probability"):
        sampler = EntropyBoundSampler(block_size=2, steps=2, entropy_budget=0.0, order=order)
        orders[order] = [list(step) for step in steps(run(TableAdapter(TEN, table), sampler, 2))]
    assert orders == {"entropy": [[1], [0]], "probability": [[0], [1]]}


def test_steps_are_the_least_progress() -> None:
    table = {slot: log_probabilities(p5=0.3 + 0.01 * slot) for slot in range(8)}
    sampler = EntropyBoundSampler(block_size=8, steps=3, entropy_budget=0.0)
    assert [sorted(step) for step in steps(run(TableAdapter(TEN, table), sampler, 8))] == [[5, 6, 7], [2, 3, 4], [0, 1]]


@pytest.mark.parametrize("budget", [0.0, 0.05, 1.0, 1e6])
def test_every_run_fills_its_canvas_within_its_steps_and_alike_in_a_batch(budget: float) -> None:
    adapter, draw = random_llama(), random.Random(2)
    tasks = [Task(i, [draw.randrange(END) for _ in range(length)], 16) for i, length in enumerate((1, 9, 4, 20))]
    sampler = EntropyBoundSampler(block_size=8, steps=16, entropy_budget=budget)
    alone, batched = (
        sorted(Engine(adapter, sampler, rows).decode(tasks, 40), key=lambda outcome: outcome.task.index)
        for rows in (1, 4)
    )
    for one, other in zip(alone, batched):
        assert one.failure is None and one.state is not None and other.state is not None
        assert one.state.tokens[: len(one.task.prompt)] == one.task.prompt
        assert MASK not in one.state.tokens[len(one.task.prompt) :]
        assert one.counts()["nfe"] == {0.0: 16, 1e6: 2}.get(budget, one.counts()["nfe"]) <= 16
        assert [one.log, one.state.tokens] == [other.log, other.state.tokens]


def test_a_larger_budget_takes_no_more_forwards_where_laws_stay_as_they_are() -> None:
    draw = random.Random(4)
    table = {slot: log_probabilities(p5=draw.uniform(0.2, 0.999)) for slot in range(32)}

    def forwards(budget: float) -> int:
        sampler = EntropyBoundSampler(block_size=16, steps=32, entropy_budget=budget)
        outcome = run(TableAdapter(TEN, table), sampler, 32)
        assert tokens(outcome) == [5] * 32
        return outcome.counts()["nfe"]

    counted = [forwards(budget) for budget in (0.0, 0.1, 0.5, 2.0, 100.0)]
    assert counted == sorted(counted, reverse=True) and counted[0] == 32 and counted[-1] == 2


def test_a_budget_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sampler.entropy_budget=-0.1 is out of range: use a number of nats from 0"):
        EntropyBoundSampler(block_size=4, steps=4, entropy_budget=-0.1)


def test_the_entropy_is_asked_for_whatever_the_order() -> None:
    """A model that is asked for no entropy says none, and the rule could not be."""

    def table(seen: Mapping[int, int], slot: int) -> Sequence[float]:
        return log_probabilities(p5=0.9)

    for order in ("margin", "random", "left_to_right"):
        sampler: Any = EntropyBoundSampler(block_size=4, steps=4, order=order)
        assert 9 not in tokens(run(TableAdapter(TEN, table), sampler, 4))
