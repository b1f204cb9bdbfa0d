"""Read-outs of a user's own: found by the name that a sampler gives them, run on the device, with what they last said.

A read-out is a function ``(logits, hidden)`` or ``(logits, hidden, previous)`` to one short vector a slot. Its shapes:
n slots of any rows, V vocabulary, D hidden size, k numbers: (n, V), (n, D) and (n, k) or None to (n, k).

* ``logits`` are in float32 or better, of the raw law: before temperature and filters, the mask id in, banned ids minus
  infinity. They must not be written to.
* ``hidden`` are the rows that the head saw, in the model's dtype.
* ``previous`` is what it said last of the very same slots, None where nothing yet: it is called apart for those.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import cache

import torch

BUILT_IN = frozenset({"margin", "entropy"})
Function = Callable[..., torch.Tensor]
Place = tuple[int, int]  # row and slot


def named(ask: Collection[str]) -> list[str]:
    """The names of read-outs among the statistics asked for, in the order in which their numbers come."""
    return sorted(set(ask) - BUILT_IN)


def refuse_unknown(ask: Collection[str]) -> None:
    """Refuse what is no statistic and no read-out.

    Raises:
        ValueError: one sentence, for the first of them.
    """
    for name in named(ask):
        function(name)


@cache
def function(name: str) -> Function:
    """The read-out ``module.function``.

    Raises:
        ValueError: one sentence, if there is none.
    """
    module, _, last = name.rpartition(".")
    if not module:
        raise ValueError(f"read-out {name!r} is not known: use margin, entropy, or a function's module.name")
    try:
        found = vars(importlib.import_module(module)).get(last)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"read-out {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"read-out {name!r} is no function: module {module} has none of that name")
    if _arity(found) not in (2, 3):
        raise ValueError(f"read-out {name!r} must take (logits, hidden) or (logits, hidden, previous)")
    return found


def _arity(found: Function) -> int:
    return len(inspect.signature(found).parameters)


class Memory:
    """What each read-out last said of each slot in flight; only of those that want to hear it again."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.shape, self.device = (rows, slots), device
        self.said: dict[str, torch.Tensor] = {}  # (R, S, k), on the device
        self.known: dict[str, set[Place]] = {}  # on the host

    def forget(self, row: int) -> None:
        for places in self.known.values():
            places -= {place for place in places if place[0] == row}

    def read(self, name: str, logits: torch.Tensor, hidden: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        """Run one read-out: (n, V) and (n, D) to (n, k).

        Raises:
            ValueError: if it gives anything but a vector a slot.
        """
        run = function(name)
        if _arity(run) == 2:
            return _checked(name, run(logits, hidden), len(places))
        known = self.known.setdefault(name, set())
        is_old = [place in known for place in places]
        if not any(is_old):
            said = _checked(name, run(logits, hidden, None), len(places))
        elif all(is_old):
            said = _checked(name, run(logits, hidden, self._recall(name, places)), len(places))
        else:
            said = self._apart(name, logits, hidden, places, is_old)
        self._keep(name, places, said)
        return said

    def _apart(
        self, name: str, logits: torch.Tensor, hidden: torch.Tensor, places: Sequence[Place], is_old: list[bool]
    ) -> torch.Tensor:
        """Slots of which something was said before and the others in two calls."""
        run, said = function(name), None
        for old in (False, True):
            chosen = [i for i, known in enumerate(is_old) if known is old]
            index = torch.tensor(chosen, device=logits.device)
            previous = self._recall(name, [places[i] for i in chosen]) if old else None
            part = _checked(name, run(logits[index], hidden[index], previous), len(chosen))
            said = part.new_empty(len(places), part.shape[1]) if said is None else said
            said[index] = part
        assert said is not None
        return said

    def _recall(self, name: str, places: Sequence[Place]) -> torch.Tensor:
        return self.said[name][self._index(places)]

    def _keep(self, name: str, places: Sequence[Place], said: torch.Tensor) -> None:
        if name not in self.said:
            self.said[name] = said.new_zeros(*self.shape, said.shape[1])
        self.said[name][self._index(places)] = said
        self.known[name].update(places)

    def _index(self, places: Sequence[Place]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(list(column), device=self.device) for column in zip(*places, strict=True))


def _checked(name: str, said: torch.Tensor, slots: int) -> torch.Tensor:
    if not isinstance(said, torch.Tensor) or said.ndim != 2 or said.shape[0] != slots:
        gave = f"shape {tuple(said.shape)}" if isinstance(said, torch.Tensor) else type(said).__name__
        raise ValueError(f"read-out {name!r} gave {gave} for {slots} slots: it must be ({slots}, k)")
    return said
