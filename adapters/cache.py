"""Keys and values of all rows in flight, filed by row and slot.

For a causal or block-causal model, whose slots never see a later block, reading stored keys is exact: they equal what
a recomputation would give. Under full attention every slot depends on all others, so stored keys are outdated as soon
as a token changes: there the cache is an approximation by design, and a sampler decides when it is refreshed.

Shapes: R rows, S slots, B rows of a group, W slots of the longest window, H key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from adapters.attention import Everywhere
from adapters.visibility import Lines

if TYPE_CHECKING:
    from adapters.grouping import Group

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


class Move(NamedTuple):
    """Of a row's stored slots keep ``slots``, in this order, moved to end before slot ``end``."""

    row: int
    slots: Sequence[int]
    end: int


class Copies(NamedTuple):
    """Where the copies of a window find their context: each in a line of its own, for the time of a forward."""

    width: int  # slots of a line, and one more that takes what padding writes
    rows: Everywhere  # (B,) whose context it is
    places: Everywhere  # (B * W,) of the windows' keys among the lines' slots


class KeyValueStore:
    """One preallocated pair of tensors (R, S + 1, H, D) a layer, written in place; slot S takes what padding writes.

    A window's keys are always written at their slots, so that its queries find context and window in one place and
    no cached key is ever moved to be read. Whether they count as stored is bookkeeping, done on the host afterwards.
    Where a forward that only reads writes over stored slots, these are set aside, layer by layer, and put back: a
    copy of the window's size. transformers' attention layers see the store through `update`.
    Where rows run several copies of a window, which are only read, each copy gets its row's context in a line of its
    own, layer by layer: what is copied grows with the context, and the store is not touched.

    Attributes:
        layers: keys and values of a layer, by its index.
        stored: by row, a byte a slot: 1 if the slot's keys may be read as context.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.layers: dict[int, Pair] = {}
        self._flat: dict[int, Pair] = {}
        self._shown: dict[int, Pair] = {}
        self.stored = [bytearray(slots) for _ in range(rows)]
        self._group: Group | None = None
        self._aside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._copies: Copies | None = None

    @torch.inference_mode()
    def forget(self, row: int) -> None:
        """Clear a row for a new sequence: hidden slots enter masked sums, times 0, and must be finite for that."""
        self.drop(row, 0)
        for pair in self.layers.values():
            for held in pair:
                held[row].zero_()

    def drop(self, row: int, first: int) -> None:
        """Forget what a row stored from slot ``first`` on."""
        self.stored[row][first:] = bytes(self.slots - first)

    @torch.inference_mode()
    def keep(self, moves: Sequence[Move]) -> None:
        """Keep an accepted path of each row: its slots close up to end at ``end``; the row's stored rest is dropped.

        What lies before the path's new first slot stays. Keys keep the rotary position they were computed at.
        """
        sources, targets = [], []
        for row, slots, end in moves:
            first = end - len(slots)
            stored = self.stored[row]
            assert all(slot >= first and stored[slot] for slot in slots), f"row {row} did not store all of {slots}"
            self.drop(row, first)
            stored[first:end] = b"\1" * len(slots)
            for source, target in zip(slots, range(first, end), strict=True):
                if source != target:
                    sources.append(row * (self.slots + 1) + source)
                    targets.append(row * (self.slots + 1) + target)
        if sources:
            self._move(torch.tensor([sources, targets]))

    def aim(self, group: Group) -> None:
        """Say what the next forward writes, and check that it reads nothing that was not stored."""
        self._put_back()
        for row, forward in zip(group.lines, group.forwards, strict=True):
            context, window, stored = forward.context, forward.window, self.stored[row]
            before, behind = min(context.stop, window.start), max(context.start, window.stop)
            missing = stored.find(0, context.start, before) >= 0 or stored.find(0, behind, context.stop) >= 0
            assert not missing, f"row {row} reads {context}, parts of which it never stored"
        self._group = group
        self._copies = _copies(group) if group.cached and group.copied else None
        if not self._copies:
            self._aim_writes(group)

    def lines(self, group: Group) -> Lines:
        """Where the keys that a group reads lie."""
        members, width = group.ids.shape
        if not group.cached:
            return Lines(range(members), members, width)
        if group.copied:
            return Lines(range(members), members, group.reach + 1)
        return Lines(group.lines, self.rows, self.slots + 1)

    def settle(self) -> None:
        """The forward is done: its windows' slots count as stored where it said so."""
        self._put_back()
        assert self._group is not None
        for row, forward in zip(self._group.lines, self._group.forwards, strict=True):
            kept = forward.store
            self.stored[row][kept.start : kept.stop] = b"\1" * len(kept)
        self._group = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **unused: object) -> Pair:
        """Keys and values (B, H, W, D) of the window in.

        Out come those of the whole store, (R, H, S + 1, D), a view; those of the copies' lines, (B, H, L + 1, D) up to
        the last slot L that any of them sees; or the window's own where no context is read.
        """
        self._put_back()
        assert self._group is not None
        if self._copies:
            held = self.layers[layer]
            return _copied(held[0], keys, self._copies), _copied(held[1], values, self._copies)
        if layer not in self.layers:
            self._reserve(layer, keys, values)
        places = self._places.on(keys.device)
        for flat, new in zip(self._flat[layer], (keys, values), strict=True):
            if self._back is not None:
                self._aside.append((flat, self._back.on(keys.device), flat.index_select(0, places)))
            flat.index_copy_(0, places, new.transpose(1, 2).flatten(0, 1))
        return self._shown[layer] if self._group.cached else (keys, values)

    def _aim_writes(self, group: Group) -> None:
        """Flat places (B * W,) of the window's keys and of those to put back; slot S stands for nowhere."""
        slots, lines = group.positions, (group.rows * (self.slots + 1))[:, None]
        if group.padded:  # padding repeats the last slot, but sees more than it, so its keys differ
            slots = slots.where(group.inside(), self.slots)
        whole = all(forward.store == forward.window for forward in group.forwards)
        spared = slots if whole else slots.where(~group.is_stored(), self.slots)
        if not group.cached and not whole:  # nobody reads what is not stored
            slots = slots.where(group.is_stored(), self.slots)
        self._places = Everywhere((lines + slots).flatten())
        self._back = Everywhere((lines + spared).flatten()) if group.cached and self._overwrites(group) else None

    def _overwrites(self, group: Group) -> bool:
        """Whether a window covers stored slots that it is not to replace."""
        for row, forward in zip(group.lines, group.forwards, strict=True):
            window, kept, stored = forward.window, forward.store, self.stored[row]
            first, last = (kept.start, kept.stop) if kept else (window.stop, window.stop)
            if stored.find(1, window.start, first) >= 0 or stored.find(1, last, window.stop) >= 0:
                return True
        return False

    def _put_back(self) -> None:
        for flat, places, aside in self._aside:
            flat.index_copy_(0, places, aside)
        self._aside = []

    def _move(self, indices: torch.Tensor) -> None:
        """Copy flat slots ``indices[0]`` to ``indices[1]``, read before written."""
        paths = Everywhere(indices)
        for pair in self._flat.values():
            for flat in pair:
                source, target = paths.on(flat.device)
                flat.index_copy_(0, target, flat.index_select(0, source))

    def _reserve(self, layer: int, *likes: torch.Tensor) -> None:
        """Room for a layer's keys and values, and the two views of it that every forward needs."""
        pair = [like.new_zeros(self.rows, self.slots + 1, like.shape[1], like.shape[3]) for like in likes]
        self.layers[layer] = pair[0], pair[1]
        self._flat[layer] = pair[0].flatten(0, 1), pair[1].flatten(0, 1)
        self._shown[layer] = pair[0].transpose(1, 2), pair[1].transpose(1, 2)


def _copies(group: Group) -> Copies:
    width, (members, _) = group.reach + 1, group.ids.shape
    slots = group.positions.where(group.inside(), width - 1) if group.padded else group.positions
    first = width * torch.arange(members, device=slots.device)[:, None]
    return Copies(width, Everywhere(group.rows), Everywhere((first + slots).flatten()))


def _copied(held: torch.Tensor, new: torch.Tensor, copies: Copies) -> torch.Tensor:
    """A line a copy, (B, H, L + 1, D): what the store (R, S + 1, H, D) holds, under the window's own (B, H, W, D)."""
    lines = held[:, : copies.width].index_select(0, copies.rows.on(held.device))
    lines.flatten(0, 1).index_copy_(0, copies.places.on(held.device), new.transpose(1, 2).flatten(0, 1))
    return lines.transpose(1, 2)
