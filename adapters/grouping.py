"""Requests as tensors: which forwards may share a call, and the call's members.

Shapes: B members of a group, W slots of the longest window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from adapters.soft import SoftInputs, pack
from samplers import FULL, Attend, Forward


@dataclass(slots=True)
class Request:
    """A forward of one row, with the slots of that row that changed since its last one."""

    row: int
    forward: Forward
    changed: list[int]
    tokens: list[int]  # what the changed slots hold now


def group_key(forward: Forward) -> tuple:
    """Forwards of equal key may share one call."""
    attend = forward.attend.pattern if forward.attend else None
    scale = forward.guidance.scale if forward.guidance else None
    copied = len(forward.variants) > 0 and not forward.store  # several copies of a window are never stored
    asked = (forward.law, forward.ask, forward.best, forward.carry, forward.judged_drafts)
    return (forward.role, attend, len(forward.context) > 0, scale, bool(forward.inputs), copied, *asked)


@dataclass(slots=True)
class Group:
    """The members of a call, by ascending row: one a request, or one a variant of its window.

    Windows are padded on the right to W by repeating their last slot.
    """

    forwards: list[Forward]
    lines: list[int]  # rows, on the host
    rows: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B,)
    lengths: torch.Tensor  # (B,) window lengths
    contexts: torch.Tensor  # (B, 2) first and last + 1 of the cached slots visible
    stores: torch.Tensor  # (B, 2) first and last + 1 of the slots stored
    edges: torch.Tensor  # (B, 2) first edge and size of the blocks, for a pattern of blocks
    positions: torch.Tensor  # (B, W) slots
    rotary: torch.Tensor  # (B, W) positions that the network is told: the slots, if no forward says otherwise
    ids: torch.Tensor  # (B, W)
    padded: bool  # whether any window is shorter than W
    copied: bool  # whether any row has several members
    parents: torch.Tensor | None = None  # (B, W) places of the parents in the window, for a pattern of trees
    soft: SoftInputs | None = None

    @property
    def cached(self) -> bool:
        return len(self.forwards[0].context) > 0  # alike in this

    @property
    def attend(self) -> Attend | None:
        return self.forwards[0].attend  # alike in pattern, not in edges

    @property
    def reach(self) -> int:
        """Behind the last slot that any member sees."""
        return max(max(forward.context.stop, forward.window.stop) for forward in self.forwards)

    def inside(self) -> torch.Tensor:
        """(B, W) bool: False for padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def is_stored(self) -> torch.Tensor:
        """(B, W) bool: whether a window's slot is to be stored."""
        return (self.positions >= self.stores[:, :1]) & (self.positions < self.stores[:, 1:])

    def ancestors(self) -> torch.Tensor:
        """(B, W, W) bool: in a tree, which places of the window a place sees: itself and its ancestors.

        Each round doubles how far back is seen.
        """
        assert self.parents is not None
        members, width = self.parents.shape
        seen = torch.eye(width, dtype=torch.bool, device=self.parents.device).repeat(members, 1, 1)
        back = self.parents
        for _ in range(width.bit_length()):
            seen = seen | seen.gather(1, back[:, :, None].expand(-1, -1, width))
            back = back.gather(1, back)
        return seen


def grouped(requests: Sequence[Request], canvas: torch.Tensor) -> Group:
    """Requests, by ascending row, as one group whose ids are taken from ``canvas`` (R, S)."""
    pairs = [(request.row, forward) for request in requests for forward in members(request.forward)]
    lines, forwards = [row for row, _ in pairs], [forward for _, forward in pairs]
    packed = torch.tensor([_numbers(*pair) for pair in pairs], device=canvas.device)
    rows, starts, lengths = packed[:, :3].T
    widths = [len(f.window) for f in forwards]
    steps = torch.arange(max(widths), device=canvas.device)
    positions = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    return Group(
        forwards,
        lines,
        rows,
        starts,
        lengths,
        contexts=packed[:, 3:5],
        stores=packed[:, 5:7],
        edges=packed[:, 7:],
        positions=positions,
        rotary=_rotary(forwards, positions),
        ids=_overlaid(canvas[rows[:, None], positions], forwards),
        padded=min(widths) < max(widths),
        copied=len(requests) < len(forwards),
        parents=_parents(forwards, canvas.device),
        soft=pack(forwards, canvas.device),
    )


def members(forward: Forward) -> list[Forward]:
    """One a variant, each drawing with a number of its own; what is kept is kept once."""
    if len(forward.variants) < 2:
        return [forward]
    return [
        replace(forward, variants=(own,), draw=forward.draw + k, keep=None if k else forward.keep)
        for k, own in enumerate(forward.variants)
    ]


def _numbers(row: int, forward: Forward) -> tuple[int, ...]:
    window, context, store, attend = forward.window, forward.context, forward.store, forward.attend or FULL
    spans = (window.start, len(window), context.start, context.stop, store.start, store.stop)
    return row, *spans, attend.first, attend.size


def _overlaid(ids: torch.Tensor, forwards: Sequence[Forward]) -> torch.Tensor:
    """The ids (B, W) with each member's own contents in their places, which go up in one copy."""
    own = [
        (member, slot - forward.window.start, token)
        for member, forward in enumerate(forwards)
        for variant in forward.variants
        for slot, token in variant.items()
    ]
    if own:
        member, column, token = torch.tensor(own, device=ids.device).T
        ids[member, column] = token
    return ids


def _rotary(forwards: Sequence[Forward], slots: torch.Tensor) -> torch.Tensor:
    if all(forward.positions is None for forward in forwards):
        return slots
    told = [list(f.window if f.positions is None else f.positions) for f in forwards]
    width = slots.shape[1]
    return torch.tensor([line + line[-1:] * (width - len(line)) for line in told], device=slots.device)


def _parents(forwards: Sequence[Forward], device: torch.device) -> torch.Tensor | None:
    lines = [list(forward.attend.parents) if forward.attend else [] for forward in forwards]
    width = max(map(len, lines))
    if not width:
        return None
    return torch.tensor([line + [0] * (width - len(line)) for line in lines], device=device)  # nobody sees padding
