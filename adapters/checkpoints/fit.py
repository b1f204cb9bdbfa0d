"""Whether a checkpoint's tensors fit a network, told from names and shapes alone: no weight is read, torch not needed.

The one check that inspecting, fetching and loading share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from adapters.tensors import Piece

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Stored = Mapping[str, Shape | None]  # tensors of a checkpoint; None where only the name is known
Goes = Callable[[str], list[Piece]]  # where a tensor of the checkpoint goes, by its name
Plan = Mapping[str, list[Piece]]
COMPUTED = r"rotary_emb\.inv_freq$"  # in older files, but it follows from the configuration


@dataclass(frozen=True)
class Targets:
    """What there is to fill.

    Attributes:
        shapes: of every parameter and buffer, by its key in the native ``state_dict``.
        tied: of keys that are another's parameter under a second name, the first one.
        ignored: patterns of the names that may be left over, because the architecture has no use for them.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in (*self.ignored, COMPUTED))


@dataclass(frozen=True)
class Fit:
    """What becomes of a checkpoint's tensors.

    Attributes:
        plan: where each tensor goes; whole only if there is no fault.
        tensors: how many there are.
        left_over: tensors that have no place.
        unfilled: parameters that get no tensor, or not all of it.
        wrong: one phrase for each tensor of a wrong shape, of an expert that is none, or with a rival for its place.
        shapes: whether all shapes were known, or names only.
    """

    plan: Plan
    tensors: int
    left_over: tuple[str, ...]
    unfilled: tuple[str, ...]
    wrong: tuple[str, ...]
    shapes: bool

    @property
    def faultless(self) -> bool:
        return not (self.left_over or self.unfilled or self.wrong)

    def sentence(self) -> str:
        """What to tell of it."""
        if self.faultless:
            return f"all {self.tensors} tensors have a place" + ("" if self.shapes else ", by name")
        faults = []
        if self.left_over:
            faults.append(f"{_count(self.left_over, 'tensor has', 'tensors have')} no place ({_first(self.left_over)})")
        if self.unfilled:
            faults.append(f"{_count(self.unfilled, 'parameter', 'parameters')} got no tensor ({_first(self.unfilled)})")
        if self.wrong:
            faults.append(self.wrong[0] + (f", as {len(self.wrong) - 1} more do not fit" if self.wrong[1:] else ""))
        return " and ".join(faults)


def fit(stored: Stored, targets: Targets, goes: Goes) -> Fit:
    """Find every tensor's place."""
    plan: dict[str, list[Piece]] = {}
    left_over, wrong = [], []
    free = {name: prod(shape) for name, shape in targets.shapes.items()}
    for name, shape in stored.items():
        found = goes(name)
        if any(piece.target not in targets.shapes for piece in found):
            left_over += [] if targets.ignores(name) else [name if shape is None else f"{name} {shape}"]
        elif fault := _expert_fault(name, found, targets):
            wrong.append(fault)
        else:
            plan[name] = found
            places = [piece.place(targets.shapes[piece.target]) for piece in found]
            wrong += _shape_faults(name, shape, found, places)
            for piece, place in zip(found, places, strict=True):
                free[piece.target] -= prod(place)
    wrong += _rivals(plan, free)
    known = all(shape is not None for shape in stored.values())
    return Fit(plan, len(stored), tuple(left_over), _unfilled(targets, free), tuple(wrong), known)


def _expert_fault(name: str, found: list[Piece], targets: Targets) -> str | None:
    for piece in found:
        last = targets.shapes[piece.target][0] - 1 if piece.expert is not None else 0
        if piece.expert is not None and piece.expert > last:
            return f"{name} is of expert {piece.expert}, the configuration's last is {last}"
    return None


def _shape_faults(name: str, shape: Shape | None, found: list[Piece], places: list[Shape]) -> list[str]:
    """At most one: the tensor that is cut into these pieces holds them one under the other."""
    whole = places[0] if len(places) == 1 else (sum(place[0] for place in places), *places[0][1:])
    if shape is None or (shape == whole and [piece.cut_shape(shape) for piece in found] == places):
        return []
    return [f"{name} has the shape {shape}, the configuration wants {whole}"]


def _rivals(plan: Plan, free: Mapping[str, int]) -> list[str]:
    """Places that two tensors would fill, and parameters that would get more than they hold."""
    homes: dict[tuple[str, int | None, int], str] = {}
    faults = {}
    for name, found in plan.items():
        for piece in found:
            first = homes.setdefault((piece.target, piece.expert, piece.part), name)
            if first != name:
                faults[piece.target] = f"{first} and {name} are both {piece.target}"
    overfull = {target: f"{target} is filled more than once" for target, elements in free.items() if elements < 0}
    return list({**overfull, **faults}.values())


def _unfilled(targets: Targets, free: Mapping[str, int]) -> tuple[str, ...]:
    """Parameters that get no tensor, or not all of it, under none of their names."""

    def first_name(name: str) -> str:
        return targets.tied.get(name, name)

    filled = {first_name(name) for name, elements in free.items() if elements <= 0}
    missing = sorted(name for name in free if first_name(name) not in filled)
    whole = {name: prod(targets.shapes[name]) for name in missing}
    return tuple(name if free[name] == whole[name] else f"{name} (in part)" for name in missing)


def _count(names: Sequence[str], one: str, many: str) -> str:
    return f"1 {one}" if len(names) == 1 else f"{len(names)} {many}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
