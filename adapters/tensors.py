"""How the tensors of a published checkpoint become those of a native architecture: renamed, cut apart, stacked.

A rule says where the tensors whose whole name matches its pattern go; the first that matches is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a checkpoint, or some of its rows, and the place it fills.

    Attributes:
        target: key of the native model's ``state_dict``.
        rows: first row and the one after the last; None is the whole tensor.
        expert: index on the target's first axis; None is all of that axis.
        part, parts: which of ``parts`` equal parts of the target's last axis but one, as where the matrices of gate
            and up projection lie in one.
    """

    target: str
    rows: tuple[int, int] | None = None
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def view(self, target: torch.Tensor) -> torch.Tensor:
        """The place in ``target``, which may be on the meta device.

        Raises:
            IndexError: if the target has no such expert.
        """
        place = target if self.expert is None else target[self.expert]
        return place if self.parts == 1 else place.chunk(self.parts, -2)[self.part]

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of the checkpoint's ``tensor`` goes there."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]

    def place(self, target: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the `view` of a target of shape ``target``."""
        shape = target if self.expert is None else target[1:]
        return shape if self.parts == 1 else (*shape[:-2], shape[-2] // self.parts, shape[-1])

    def cut_shape(self, tensor: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what `cut` takes of a tensor of shape ``tensor``."""
        return tensor if self.rows is None else (len(range(tensor[0])[slice(*self.rows)]), *tensor[1:])


@dataclass(frozen=True)
class Rename:
    """One tensor, one parameter; ``target`` may refer to the pattern's groups."""

    pattern: str
    target: str

    def pieces(self, match: re.Match[str], config: Json) -> list[Piece]:
        return [Piece(match.expand(self.target))]


@dataclass(frozen=True)
class Split:
    """One tensor, several parameters: the first ``sizes(config)[0]`` rows are the first target, and so on."""

    pattern: str
    targets: tuple[str, ...]
    sizes: Callable[[Json], tuple[int, ...]]

    def pieces(self, match: re.Match[str], config: Json) -> list[Piece]:
        found, first = [], 0
        for target, size in zip(self.targets, self.sizes(config), strict=True):
            found.append(Piece(match.expand(target), (first, first + size)))
            first += size
        return found


@dataclass(frozen=True)
class Stack:
    """One tensor an expert, one parameter for all of them; the pattern's group ``expert`` is the number.

    Without such a group the tensor already holds all experts.
    """

    pattern: str
    target: str
    part: int = 0
    parts: int = 1

    def pieces(self, match: re.Match[str], config: Json) -> list[Piece]:
        expert = match.groupdict().get("expert")
        number = None if expert is None else int(expert)
        return [Piece(match.expand(self.target), None, number, self.part, self.parts)]


Rule = Rename | Split | Stack


def pieces(rules: Iterable[Rule], name: str, config: Json) -> list[Piece]:
    """Where the checkpoint's tensor ``name`` goes; a name that no rule matches stays as it is.

    Raises:
        KeyError: if ``config`` lacks what a rule needs.
    """
    for rule in rules:
        if match := re.fullmatch(rule.pattern, name):
            return rule.pieces(match, config)
    return [Piece(name)]
