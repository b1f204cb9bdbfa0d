"""What tests hold the store of keys to while drafts are verified; `DeviceAdapter.checks` switches it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from adapters.cache import KeyValueStore, Move
from adapters.grouping import Group, Request
from samplers import Kind


class Source(NamedTuple):
    """What the keys of a stored slot were computed from."""

    token: int
    position: int
    parent: int | None  # slot of the node before it, if it was stored as one of a tree


class CheckedStore(KeyValueStore):
    """A store that keeps books of its own: of each stored slot, the token and the place it was computed at.

    Attributes:
        sources: by row, of each slot; None where nothing is stored.
        verified: rounds that were found right.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(rows, slots)
        self.sources: list[list[Source | None]] = [[None] * slots for _ in range(rows)]
        self.verified = 0

    def drop(self, row: int, first: int) -> None:
        super().drop(row, first)
        self.sources[row][first:] = [None] * (self.slots - first)

    def keep(self, moves: Sequence[Move]) -> None:
        paths = [[self.sources[row][slot] for slot in slots] for row, slots, _ in moves]
        for (row, slots, _), path in zip(moves, paths, strict=True):
            for before, source in zip(slots, path[1:]):
                parent = source.parent if source else None
                assert parent in (None, before), f"row {row} keeps {slots}, which is no path of its tree"
        super().keep(moves)
        for (row, slots, end), path in zip(moves, paths, strict=True):
            for slot, source in zip(range(end - len(slots), end), path, strict=True):
                self.sources[row][slot] = source._replace(parent=None) if source else None

    def settle(self) -> None:
        group = self._group
        assert group is not None
        super().settle()
        ids, rotary = group.ids.tolist(), group.rotary.tolist()
        for member, (row, forward) in enumerate(zip(group.lines, group.forwards, strict=True)):
            window, attend = forward.window, forward.attend
            for slot in forward.store:
                place = slot - window.start
                parent = window[attend.parents[place]] if attend and attend.parents and place else None
                self.sources[row][slot] = Source(ids[member][place], rotary[member][place], parent)

    def check(self, row: int, stop: int) -> list[int]:
        """Assert that a row stores the slots before ``stop``, each at its position, and no other; their tokens."""
        held = [slot for slot in range(self.slots) if self.stored[row][slot]]
        assert held == list(range(stop)), f"row {row} stores slots {held}, not the first {stop}"
        tokens = []
        for slot, source in enumerate(self.sources[row][:stop]):
            assert source is not None
            assert source.position == slot, f"row {row}, slot {slot}: its keys are of position {source.position}"
            tokens.append(source.token)
        return tokens


def check_verified(store: KeyValueStore, group: Group, canvas: torch.Tensor) -> None:
    """Assert, before drafts are verified, that rows store what stands before their windows in ``canvas`` (R, S).

    That is what was prefilled, and of each window since its kept path.
    """
    assert isinstance(store, CheckedStore)
    for row, forward in zip(group.lines, group.forwards, strict=True):
        if forward.kind is Kind.VERIFY and forward.store:
            start = forward.window.start
            found, tokens = store.check(row, start), canvas[row, :start].tolist()
            assert found == tokens, f"row {row} stores keys of tokens {found}, but holds {tokens}"
            store.verified += 1


def check_drafter(drafter: KeyValueStore, requests: Sequence[Request]) -> None:
    """Assert, once drafts are verified, that a drafter on features stores all slots before them and no other."""
    assert isinstance(drafter, CheckedStore)
    for request in requests:
        drafted = any(drafter.stored[request.row])  # others than this drafter may have proposed
        if drafted and request.forward.kind is Kind.VERIFY and request.forward.store:
            drafter.check(request.row, request.forward.window.start)
