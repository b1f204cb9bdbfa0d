"""Layers that see only slots nearby.

Shapes: B rows of a group, W slots of the longest window, K keys.
"""

from __future__ import annotations

import torch

from adapters import attention
from adapters.attention import Run, Visibility
from adapters.base import Group


def within(window: int, causal: bool, group: Group) -> Visibility:
    """What lies less than ``window`` slots before a query and, unless `causal`, behind it; a dense mask."""
    attention.count_mask()
    if not group.cached:
        seen = group.inside()[:, None] & _near(group.positions[:, None], group, window, causal)
        return Visibility(mask=seen[:, None])
    reach = max(forward.window.stop for forward in group.forwards)
    slots = torch.arange(reach, device=group.ids.device)[None, None]
    begin, end = group.contexts.T[:, :, None, None]
    start, stop = group.starts[:, None, None], (group.starts + group.lengths)[:, None, None]
    known = ((slots >= begin) & (slots < end)) | ((slots >= start) & (slots < stop))
    seen = known & _near(slots, group, window, causal)
    runs = tuple(Run(slice(b, b + 1), slice(line, line + 1), reach) for b, line in enumerate(group.lines))
    return Visibility(runs=runs, mask=seen[:, None])


def _near(keys: torch.Tensor, group: Group, window: int, causal: bool) -> torch.Tensor:
    """(B, W, K) bool."""
    ahead = keys - group.positions[:, :, None]
    return (ahead.abs() < window) & (ahead <= 0) if causal else ahead.abs() < window
