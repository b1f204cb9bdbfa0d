"""Intervals and tests, all at 95 %, all seeded; an interval or a figure that does not exist is None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LEVEL = 0.95
Interval = tuple[float, float]


def wilson(successes: int, trials: int) -> Interval | None:
    """Wilson's score interval of a proportion; None without a trial."""
    from scipy.stats import binomtest

    if trials == 0:
        return None
    interval = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), samples drawn in pairs.

    None for fewer than two samples or where a sum of denominators can be 0.
    """
    import numpy as np

    if len(numerators) < 2 or min(denominators) <= 0:
        return None
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    random = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for i in range(resamples):  # one resample at a time: memory stays that of one run
        drawn = random.integers(len(top), size=len(top))
        ratios[i] = top[drawn].sum() / bottom[drawn].sum()
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_interval(differences: Sequence[float], resamples: int = 10_000, seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean of per-id differences (paired: both runs answered the same ids)."""
    return ratio_interval(differences, [1.0] * len(differences), resamples, seed)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar test from the ids that exactly one of two runs got right; 1.0 when there are none."""
    from scipy.stats import binomtest

    discordant = only_first + only_second
    return float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0


def order(steps: Sequence[int]) -> tuple[float | None, float | None]:
    """How far decoding went left to right: Kendall's tau-b of position and commit step, and the share of tied pairs.

    ``steps[i]`` is the step that committed token i. Tau is 1 from left to right, -1 from right to left, None where all
    tokens came at once; both are None for fewer than two tokens.
    """
    from scipy.stats import kendalltau

    pairs = len(steps) * (len(steps) - 1) // 2
    if not pairs:
        return None, None
    tied = sum(count * (count - 1) // 2 for count in Counter(steps).values())
    if tied == pairs:
        return None, 1.0
    method = "asymptotic" if len(steps) > 2 else "exact"  # of the p-value, unused: the former divides by n - 2
    return float(kendalltau(range(len(steps)), steps, method=method).statistic), tied / pairs
