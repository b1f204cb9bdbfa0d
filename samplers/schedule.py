"""Dream's schedule: which share of the undecided slots a step decides (arXiv 2508.15487, reference code).

It runs in float32 and truncates, which matters: 8 slots in 8 steps go 0, 1, 1, 1, 1, 1, 1, 2, because the first step's
share of 0.1249 makes 0.999 slots. So each operation here is rounded once from float64, as a float32 unit rounds it; the
time points are those of PyTorch's `linspace` on a CPU, whose multiply-add rounds once.
"""

from __future__ import annotations

from ctypes import c_float


def share(step: int, steps: int, eps: float) -> float:
    """Share of the undecided slots to decide at ``step``, from 0: 1 - t[step + 1] / t[step], and all at the last.

    Args:
        eps: the time point at the end, of a line that falls from 1.
    """
    if step >= steps - 1:
        return 1.0
    return _single(1 - _single(_time(step + 1, steps, eps) / _time(step, steps, eps)))


def portion(undecided: int, share: float) -> int:
    """Whole slots in a share of them, the rest cut off."""
    return int(_single(undecided * share))


def _time(point: int, steps: int, eps: float) -> float:
    """The first half of the line is laid from its beginning, the second from its end."""
    end = _single(eps)
    slope = _single(_single(end - 1) / steps)
    return _single(1 + slope * point) if point < (steps + 1) // 2 else _single(end - slope * (steps - point))


def _single(x: float) -> float:
    """The nearest float32."""
    return c_float(x).value
