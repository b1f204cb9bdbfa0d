"""From what the forwards of a group may see to the cheapest way of computing it.

In this order: no mask and one call, the variable-length kernel, (on a CPU) a call for each run of equal lengths, a
dense mask. Shapes: B rows of a group, L lines of keys, W slots of the longest window, K keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.attention import Everywhere, Packing, Run, Visibility
from samplers import Attend, Forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapters.grouping import Group

NEEDED = {"seqused_k", "window_size", "enable_gqa"}  # of the kernel; its first versions lack some


@dataclass(frozen=True, slots=True)
class Lines:
    """Where keys lie: line ``of[b]`` of ``count`` lines, each of ``width`` slots, holds those of member b."""

    of: Sequence[int]
    count: int
    width: int


def visibility(group: Group, own: str, lines: Lines, packs: bool) -> Visibility:
    """How to compute what the group's queries may see.

    Args:
        own: the pattern where a forward names none.
        lines: of the store if the group is cached, else the windows themselves.
        packs: whether the variable-length kernel serves the model.
    """
    pattern = _pattern(group, own)
    if pattern == "causal" and not group.cached:
        return Visibility(causal=True)  # a causal query never sees the padding on its right
    seen = _seen(group)
    if seen and pattern == "full":
        runs = _runs(lines.of, seen)
        if len(runs) == 1:
            return Visibility(runs=runs)
    if seen and packs and (pattern == "full" or (pattern == "causal" and _ends_with_window(group, seen))):
        return Visibility(packing=_packing(group, lines, seen, pattern == "causal"))
    if seen and pattern == "full" and group.ids.device.type == "cpu":  # calls are cheap, and nothing is masked in vain
        return Visibility(runs=runs)
    return _masked(group, pattern, lines)


def kernel_serves(model: PreTrainedModel) -> bool:
    """Whether torch's variable-length kernel is there for this model: half precision on a GPU, heads it can hold."""
    kernel = attention.varlen_attn
    if kernel is None or NEEDED - set(inspect.signature(kernel).parameters):
        return False
    if model.device.type != "cuda" or model.dtype not in (torch.float16, torch.bfloat16):
        return False
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "head_dim")]
    sizes = {module.head_dim for module in modules}
    fit = all(size <= 256 and size % 8 == 0 for size in sizes)
    return bool(sizes) and fit and torch.cuda.get_device_capability(model.device) >= (8, 0)


def may_see(
    pattern: str, query: torch.Tensor, key: torch.Tensor, first: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """(B, W, K) bool: which slots ``key`` (B or 1, 1, K) the slots ``query`` (B, W, 1) may see, by pattern.

    ``first`` and ``size`` (B, 1, 1) place the edges of blocks, see `samplers.Attend`.
    """
    if pattern == "full":
        return (query == key).fill_(True)
    if pattern == "causal":
        return key <= query
    return _blocks(key, first, size) <= _blocks(query, first, size)


def _blocks(slots: torch.Tensor, first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Number of the block a slot lies in; all slots before ``first`` form block -1."""
    return torch.div(slots - first, size, rounding_mode="floor").clamp(min=-1)


def _pattern(group: Group, own: str) -> str:
    """The group's pattern; ``full`` where each window is a single slot or lies inside one block: it is the same."""
    pattern = group.attend.pattern if group.attend else own
    if pattern == "full" or all(_sees_itself(forward, pattern) for forward in group.forwards):
        return "full"
    return pattern


def _sees_itself(forward: Forward, pattern: str) -> bool:
    window, attend = forward.window, forward.attend
    if len(window) == 1 or attend is None or pattern in ("causal", "tree"):
        return len(window) == 1
    return _block(window.start, attend) == _block(window.stop - 1, attend)


def _block(slot: int, attend: Attend) -> int:
    return max((slot - attend.first) // attend.size, -1)


def _seen(group: Group) -> list[int] | None:
    """By member, how many keys of its line context and window span, if they are the line's first ones without a gap."""
    if not group.cached:
        return [len(forward.window) for forward in group.forwards]
    seen = []
    for forward in group.forwards:
        context, window = forward.context, forward.window
        gap = context.start > window.stop or window.start > context.stop
        if gap or min(context.start, window.start):
            return None
        seen.append(max(context.stop, window.stop))
    return seen


def _ends_with_window(group: Group, seen: list[int]) -> bool:
    """The kernel's causal sequences end with their last query."""
    return all(keys == forward.window.stop for keys, forward in zip(seen, group.forwards, strict=True))


def _runs(lines: Sequence[int], keys: Sequence[int]) -> tuple[Run, ...]:
    """Maximal runs of members on adjacent lines that read equally many keys."""
    starts = [b for b in range(len(lines)) if b == 0 or lines[b] != lines[b - 1] + 1 or keys[b] != keys[b - 1]]
    stops = [*starts[1:], len(lines)]
    return tuple(
        Run(slice(a, b), slice(lines[a], lines[a] + b - a), keys[a]) for a, b in zip(starts, stops, strict=True)
    )


def _packing(group: Group, lines: Lines, seen: list[int], causal: bool) -> Packing:
    """Sequence l holds the keys of line l and, if a member has that line, its window's queries."""
    width = group.ids.shape[1]
    real = causal and group.padded
    queries, used = [0] * lines.count, [0] * (lines.count + 1)
    for line, keys, forward in zip(lines.of, seen, group.forwards, strict=True):
        queries[line], used[line] = len(forward.window) if real else width, keys
    device = group.ids.device
    begins = [line * lines.width for line in range(lines.count + 1)]
    up = torch.tensor([[0, *queries], begins, used], dtype=torch.int32, device=device)
    return Packing(
        queries=Everywhere(up[0].cumsum(0, dtype=torch.int32)),
        keys=Everywhere(up[1]),
        used=Everywhere(up[2, :-1]),
        longest=max(queries),
        most=max(seen),
        causal=causal,
        real=Everywhere(_real(group, sum(queries))) if real else None,
    )


def _real(group: Group, count: int) -> torch.Tensor:
    """(count,) places of the queries that are not padding among the group's B * W; the host need not wait for it."""
    width, lengths = group.ids.shape[1], group.lengths
    padding = torch.arange(len(lengths), device=lengths.device) * width - (lengths.cumsum(0) - lengths)
    return torch.arange(count, device=lengths.device) + padding.repeat_interleave(lengths, output_size=count)


def _masked(group: Group, pattern: str, lines: Lines) -> Visibility:
    attention.count_mask()
    if group.cached:
        reach = group.reach
        mask = _cached_mask(group, pattern, reach)
    else:
        reach = group.ids.shape[1]
        mask = _window_mask(group, pattern)
    return Visibility(runs=_runs(lines.of, [reach] * len(lines.of)), mask=mask[:, None])


def _window_mask(group: Group, pattern: str) -> torch.Tensor:
    """(B, W, W) bool, queries and keys being the window's."""
    if pattern == "tree":
        return group.ancestors() & group.inside()[:, None]
    first, size = group.edges.T[:, :, None, None]
    seen = may_see(pattern, group.positions[:, :, None], group.positions[:, None], first, size)
    return seen & group.inside()[:, None]  # padding is nobody's to see


def _cached_mask(group: Group, pattern: str, reach: int) -> torch.Tensor:
    """(B, W, reach) bool, keys being the slots of the store; the window's own lie among them."""
    slots = torch.arange(reach, device=group.ids.device)[None, None]
    first, size = group.edges.T[:, :, None, None]
    begin, end = group.contexts.T[:, :, None, None]
    start, stop = group.starts[:, None, None], (group.starts + group.lengths)[:, None, None]
    own = (slots >= start) & (slots < stop)
    cached = (slots >= begin) & (slots < end) & ~own
    if pattern == "tree":
        places = (slots - start).clamp(0, group.ids.shape[1] - 1).expand(-1, group.ids.shape[1], -1)
        return cached | (own & group.ancestors().gather(2, places))
    return cached | (own & may_see(pattern, group.positions[:, :, None], slots, first, size))
