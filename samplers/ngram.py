"""A small n-gram model of token ids: what a drafter that does not know the prefix lacks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

FLOOR = 1e-5  # so that what was never seen kills no branch of a tree
REMEMBERED = 4096  # contexts whose followers are not looked up anew
Context = tuple[int, ...]


class _Level(NamedTuple):
    """Followers of one context: P = count * share + rest * (P behind the context without its first token)."""

    counts: Counter[int]
    share: float
    rest: float


class NGram:
    """Counts of up to ``order`` tokens in a row, interpolated by Witten and Bell (1991).

    A context seen n times with t different followers has ``P(token) = (count + t P') / (n + t)``, P' being that of the
    context without its first token, and `floor` below the shortest. A context never seen has P'. PRESTO leaves its own
    smoothing open. The size of the vocabulary plays no part: over all ids the probabilities need not sum to 1.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], order: int = 3, floor: float = FLOOR) -> None:
        """Count the ids of some sequences.

        Raises:
            ValueError: for an order below 1 or a floor that is no probability.
        """
        if order < 1:
            raise ValueError(f"an n-gram model of order {order} is none: use a whole number from 1 up")
        if not 0 < floor < 1:
            raise ValueError(f"floor={floor} is no probability of what was never seen: use one between 0 and 1")
        self.order, self.floor = order, floor
        self.counts: dict[Context, Counter[int]] = {}
        for ids in sequences:
            self._count(ids)
        unigrams = self.counts.get((), Counter())
        self._frequent = sorted(unigrams, key=lambda token: (-unigrams[token], token))
        self._by_context = {context: _level(counts) for context, counts in self.counts.items()}
        self._levels = lru_cache(REMEMBERED)(self._levels_of)
        self._ranked = lru_cache(REMEMBERED)(self._rank)

    def log_probability(self, token: int, context: Sequence[int]) -> float:
        """Of a token behind a context, of which only the last ``order - 1`` ids count; never below the floor's."""
        return math.log(self._probability(token, self._ending(context)))

    def likeliest(self, context: Sequence[int], count: int = 1) -> list[tuple[int, float]]:
        """The likeliest followers of a context with their log-probability; equal ones by id, all that were ever seen.

        Returns:
            ``count`` of them, or as many as were seen.
        """
        return self._ranked(self._ending(context), count)

    def _count(self, ids: Sequence[int]) -> None:
        for place, token in enumerate(ids):
            for length in range(min(self.order, place + 1)):
                self.counts.setdefault(tuple(ids[place - length : place]), Counter())[token] += 1

    def _ending(self, context: Sequence[int]) -> Context:
        return tuple(context[max(0, len(context) - self.order + 1) :])

    def _probability(self, token: int, ending: Context) -> float:
        probability = self.floor
        for counts, share, rest in self._levels(ending):
            probability = counts[token] * share + rest * probability
        return min(1.0, max(self.floor, probability))

    def _levels_of(self, ending: Context) -> list[_Level]:
        """From no context to the longest that was seen."""
        endings = (ending[start:] for start in range(len(ending), -1, -1))
        return [self._by_context[context] for context in endings if context in self._by_context]

    def _rank(self, ending: Context, count: int) -> list[tuple[int, float]]:
        """What follows no part of the context keeps its order without it, so its best are the best without context."""
        levels = self._levels(ending)
        seen = {token for level in levels[1:] for token in level.counts}
        seen.update(self._frequent[:count])
        scored = ((token, math.log(self._probability(token, ending))) for token in seen)
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:count]


def _level(counts: Counter[int]) -> _Level:
    total = counts.total() + len(counts)
    return _Level(counts, 1 / total, len(counts) / total)
