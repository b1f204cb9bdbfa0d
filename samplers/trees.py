"""Trees of drafts: which prefixes to verify together, given what a drafter says of each slot by itself.

A drafter's laws of the next slots do not depend on one another, so a prefix is scored by a sum over its tokens. As no
summand is above 0, a prefix never scores more than what it begins with, and the best of all come out of a heap in the
order of their scores, parents first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Edge = tuple[int, float]  # a token and its log-probability, or its score
Candidates = Sequence[Sequence[Edge]]  # by depth, likeliest first
LogProbability = Callable[[int, Sequence[int]], float]  # of a token behind a context, at most 0


class Node(NamedTuple):
    """A draft with all that leads to it.

    Attributes:
        parent: its place: 0 is the root, the last token known; n the n-th node, counted from 1.
        depth: 1 for the root's children.
        score: of the prefix, in nats, 0 at most.
    """

    parent: int
    token: int
    depth: int
    score: float


class _Offer(NamedTuple):
    """A prefix that may be taken next; of equal ones the first in `ranks`, which no other has, is."""

    cost: float
    ranks: tuple[int, ...]  # of its tokens among their siblings
    token: int
    parent: int
    before: float  # score of its parent
    siblings: Iterator[Edge]  # those that come after it


def chain(candidates: Candidates) -> list[Node]:
    """The likeliest token of each depth."""
    nodes: list[Node] = []
    for depth, (token, score) in enumerate((edges[0] for edges in candidates), 1):
        nodes.append(Node(depth - 1, token, depth, score + (nodes[-1].score if nodes else 0.0)))
    return nodes


def ddtree(candidates: Candidates, budget: int) -> list[Node]:
    """The ``budget`` likeliest prefixes, by the product of the drafter's probabilities (DDTree, arXiv 2604.12989).

    No other tree of that size holds more of what the drafter would say: the sum of its prefixes' probabilities is the
    expected depth to which a sequence of its laws stays inside.
    """
    return best_first(lambda prefix: iter(candidates[len(prefix)]), len(candidates), budget)


def presto(
    candidates: Candidates, budget: int, weight: float, known: LogProbability, context: Sequence[int]
) -> list[Node]:
    """As `ddtree`, with a model that knows the prefix beside the drafter, which does not (PRESTO, arXiv 2607.22634).

    A token t of depth d behind a prefix c scores ``log q_d(t) + weight log p(t | c)``. The search (best first, every
    depth's candidates the same, equal scores by token, then by rank) and that scores are not normalised over the
    candidates are our reading: neither its code nor its full text is public. With weight 0 it is `ddtree`.

    Args:
        known: ``log p``, a small n-gram model's.
        context: what precedes the root's children, the root included.
    """
    if not weight:
        return ddtree(candidates, budget)

    def ranked(prefix: tuple[int, ...]) -> Iterator[Edge]:
        before = (*context, *prefix)
        return corrected(candidates[len(prefix)], lambda token: weight * known(token, before))

    return best_first(ranked, len(candidates), budget)


def corrected(edges: Sequence[Edge], correction: Callable[[int], float]) -> Iterator[Edge]:
    """Edges with a correction of 0 at most, best first, equal ones by token.

    One is only looked at when it might be next: it can't score more than without its correction.
    """
    ready: list[tuple[float, int]] = []
    for token, own in edges:
        while ready and -ready[0][0] > own:
            cost, best = heapq.heappop(ready)
            yield best, -cost
        heapq.heappush(ready, (-(own + correction(token)), token))
    while ready:
        cost, best = heapq.heappop(ready)
        yield best, -cost


def best_first(ranked: Callable[[tuple[int, ...]], Iterator[Edge]], depth: int, budget: int) -> list[Node]:
    """The ``budget`` prefixes of the largest score, or all there are, in the order of their scores.

    Args:
        ranked: the edges below a prefix of tokens, best first; none scores above 0.
        depth: of the deepest nodes.
    """
    nodes: list[Node] = []
    prefixes: list[tuple[int, ...]] = [()]
    heap: list[_Offer] = []

    def offer(ranks: tuple[int, ...], parent: int, before: float, siblings: Iterator[Edge]) -> None:
        if (edge := next(siblings, None)) is not None:
            heapq.heappush(heap, _Offer(-(before + edge[1]), ranks, edge[0], parent, before, siblings))

    if depth:
        offer((0,), 0, 0.0, ranked(()))
    while heap and len(nodes) < budget:
        cost, ranks, token, parent, before, siblings = heapq.heappop(heap)
        nodes.append(Node(parent, token, len(ranks), -cost))
        prefixes.append((*prefixes[parent], token))
        offer((*ranks[:-1], ranks[-1] + 1), parent, before, siblings)
        if len(ranks) < depth:
            offer((*ranks, 0), len(nodes), -cost, ranked(prefixes[-1]))
    return nodes
