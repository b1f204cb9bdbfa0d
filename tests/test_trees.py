"""Trees of drafts: published numbers, and every random tree against one found by trying all prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers.trees import Candidates, Node, chain, ddtree, presto

TWO_DEPTHS: Candidates = [
    [(0, math.log(0.6)), (1, math.log(0.4))],
    [(0, math.log(0.7)), (1, math.log(0.3))],
]
AFTER = {0: (0.1, 0.9), 1: (0.9, 0.1), 9: (0.5, 0.5)}  # 9 precedes the tree


def known(token: int, context: tuple[int, ...] | list[int]) -> float:
    return math.log(AFTER[context[-1]][token])


def prefixes(nodes: list[Node]) -> list[tuple[int, ...]]:
    """Of each node, checking that parents come first and depths count from 1."""
    found: list[tuple[int, ...]] = [()]
    for place, node in enumerate(nodes, 1):
        assert node.parent < place and node.depth == len(found[node.parent]) + 1
        found.append((*found[node.parent], node.token))
    assert len(set(found)) == len(found)
    return found[1:]


def in_numbers(nodes: list[Node]) -> list[tuple[tuple[int, ...], float]]:
    return [(prefix, round(math.exp(node.score), 3)) for prefix, node in zip(prefixes(nodes), nodes, strict=True)]


def test_the_likeliest_prefixes_of_two_depths() -> None:
    nodes = ddtree(TWO_DEPTHS, 4)
    assert in_numbers(nodes) == [((0,), 0.6), ((0, 0), 0.42), ((1,), 0.4), ((1, 0), 0.28)]
    assert sum(math.exp(node.score) for node in nodes) == pytest.approx(1.7), "expected depth inside the tree"
    assert [node.parent for node in nodes] == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.0, [((0,), 0.6), ((0, 0), 0.42), ((1,), 0.4), ((1, 0), 0.28)]),
        (0.2, [((0,), 0.522), ((1,), 0.348), ((1, 0), 0.239), ((0, 0), 0.231)]),
        (1.0, [((0,), 0.3), ((1,), 0.2), ((1, 0), 0.126), ((0, 1), 0.081)]),
    ],
)
def test_a_model_that_knows_the_prefix_corrects_the_order(
    weight: float, expected: list[tuple[tuple[int, ...], float]]
) -> None:
    assert in_numbers(presto(TWO_DEPTHS, 4, weight, known, [9])) == expected


def test_a_budget_larger_than_the_tree_takes_all_of_it() -> None:
    for nodes in (ddtree(TWO_DEPTHS, 100), presto(TWO_DEPTHS, 100, 0.2, known, [9])):
        assert set(prefixes(nodes)) == {(0,), (1,), *product((0, 1), (0, 1))}


def test_nothing_to_draft_or_no_budget_is_no_tree() -> None:
    assert ddtree([], 4) == ddtree(TWO_DEPTHS, 0) == presto([], 4, 0.2, known, [9]) == chain([]) == []


def test_one_candidate_a_depth_is_a_chain() -> None:
    narrow = [edges[:1] for edges in TWO_DEPTHS]
    assert ddtree(narrow, 9) == chain(TWO_DEPTHS) == presto(narrow, 9, 0.0, known, [9])
    assert in_numbers(chain(TWO_DEPTHS)) == [((0,), 0.6), ((0, 0), 0.42)]


def test_equal_scores_go_by_rank() -> None:
    even = [[(5, math.log(0.5)), (7, math.log(0.5))], [(1, 0.0)]]
    assert prefixes(ddtree(even, 4)) == [(5,), (5, 1), (7,), (7, 1)]


@st.composite
def lattices(draw: st.DrawFn) -> tuple[Candidates, int, int]:
    """Candidates by depth, a budget, and a seed for what knows the prefix."""
    seed = draw(st.integers(0, 10**6))
    choose = random.Random(seed)
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    candidates = []
    for _ in range(depth):
        edges = [(token, math.log(choose.uniform(0.01, 1.0))) for token in choose.sample(range(9), width)]
        candidates.append(sorted(edges, key=lambda edge: (-edge[1], edge[0])))
    return candidates, draw(st.integers(1, 40)), seed


def by_trial(candidates: Candidates, budget: int, score: Callable[[tuple[int, ...]], float]) -> list[float]:
    """Scores of the best prefixes, all of which are looked at."""
    tokens = [[token for token, _ in edges] for edges in candidates]
    every = [prefix for depth in range(1, len(tokens) + 1) for prefix in product(*tokens[:depth])]
    return sorted((score(prefix) for prefix in every), reverse=True)[:budget]


@given(lattices())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_prefix_outside_the_tree_is_likelier(lattice: tuple[Candidates, int, int]) -> None:
    candidates, budget, _ = lattice
    law = [dict(edges) for edges in candidates]

    def score(prefix: tuple[int, ...]) -> float:
        return sum(law[depth][token] for depth, token in enumerate(prefix))

    nodes = ddtree(candidates, budget)
    assert [node.score for node in nodes] == pytest.approx(by_trial(candidates, budget, score))
    assert [node.score for node in nodes] == pytest.approx([score(prefix) for prefix in prefixes(nodes)])
    assert presto(candidates, budget, 0.0, known, [9]) == nodes, "without its weight it is the same"


@given(lattices(), st.floats(0.01, 2.0))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_prefix_outside_the_tree_scores_more(lattice: tuple[Candidates, int, int], weight: float) -> None:
    candidates, budget, seed = lattice
    law, context = [dict(edges) for edges in candidates], [3, 4]

    def bigram(token: int, before: tuple[int, ...] | list[int]) -> float:
        return math.log(random.Random(seed + 81 * before[-2] + 9 * before[-1] + token).uniform(0.05, 1.0))

    def score(prefix: tuple[int, ...]) -> float:
        text = [*context, *prefix]
        return sum(law[depth][token] + weight * bigram(token, text[: depth + 2]) for depth, token in enumerate(prefix))

    nodes = presto(candidates, budget, weight, bigram, context)
    assert [node.score for node in nodes] == pytest.approx(by_trial(candidates, budget, score))
    assert [node.score for node in nodes] == pytest.approx([score(prefix) for prefix in prefixes(nodes)])
    assert all(one.score >= other.score for one, other in pairwise(nodes))
