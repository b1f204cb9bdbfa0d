"""A checkpoint's tensors to a network's parameters: all is settled from the headers before a weight is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from adapters.checkpoint import Checkpoint, Shapes
from adapters.tensors import Piece

Plan = Mapping[str, list[Piece]]  # where each tensor of the checkpoint goes
Goes = Callable[[str], list[Piece]]


def fill(model: nn.Module, checkpoint: Checkpoint, goes: Goes, source: Path) -> None:
    """Copy every tensor to where it ``goes``.

    Raises:
        ValueError: see `plan`; then nothing was copied. Also if two names of a tied parameter hold different tensors.
    """
    copy(model, plan(model, checkpoint.shapes(), goes, source), checkpoint, source)


def plan(model: nn.Module, shapes: Shapes, goes: Goes, source: Path) -> Plan:
    """Check names and shapes against a network, which may be on the meta device.

    Raises:
        ValueError: one sentence that lists what is left over on either side, or the first wrong shape.
    """
    targets = model.state_dict(keep_vars=True)
    planned, left_over = {}, []
    free = {name: target.numel() for name, target in targets.items()}
    for name in shapes:
        planned[name] = goes(name)
        if any(piece.target not in targets for piece in planned[name]):
            left_over.append(f"{name} {shapes[name]}")
            continue
        for piece in planned[name]:
            free[piece.target] -= _taken(piece, name, shapes[name], targets[piece.target], source)
        whole = torch.Size(shapes[name]).numel()
        if (placed := sum(piece.cut(_meta(shapes[name])).numel() for piece in planned[name])) != whole:
            raise ValueError(f"{source}: {name} has {whole} elements, the configuration wants {placed}")
    _refuse_remainder(left_over, _unfilled(targets, free), f"{source} does not fit {type(model).__name__}")
    _refuse_rivals(planned, source)
    return planned


def copy(model: nn.Module, planned: Plan, checkpoint: Checkpoint, source: Path) -> None:
    """Carry out a plan. A tensor is cast where it goes, so that the host never holds a copy of it.

    Raises:
        ValueError: if a file is broken, or two names of a tied parameter hold different tensors.
    """
    targets = model.state_dict(keep_vars=True)
    written: dict[tuple[int, int | None, int], str] = {}
    with torch.no_grad():
        for name, tensor in checkpoint.tensors():
            for piece in planned.get(name, []):
                place = piece.view(targets[piece.target])
                part = piece.cut(tensor).to(place.device)
                key = (id(targets[piece.target]), piece.expert, piece.part)
                if key in written and not torch.equal(place, part.to(place.dtype)):
                    raise ValueError(f"{source}: {written[key]} and {name} are one parameter, but differ")
                if key not in written:
                    place.copy_(part)
                written[key] = name


def prefix(names: Collection[str], known: Callable[[str], bool]) -> str:
    """What a training put before its network's names: of the usual ones that under which most names are known."""
    wraps = ("model.", "module.", "", "model.model.", "model.module.", "state_dict.model.", "state_dict.", "app.model.")

    def fits(wrap: str) -> int:
        return sum(name.startswith(wrap) and known(name.removeprefix(wrap)) for name in names)

    return max(wraps, key=fits)


def _meta(shape: Iterable[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


def _taken(piece: Piece, name: str, shape: tuple[int, ...], target: torch.Tensor, source: Path) -> int:
    """Elements of the target that the piece fills."""
    try:
        place = piece.view(target)
    except IndexError as error:
        last = target.shape[0] - 1
        raise ValueError(f"{source}: {name} is of expert {piece.expert}, the configuration's last is {last}") from error
    part = piece.cut(_meta(shape))
    if place.shape != part.shape:
        sizes = f"{tuple(part.shape)}, the configuration wants {tuple(place.shape)}"
        raise ValueError(f"{source}: {name} has the shape {sizes}")
    return part.numel()


def _unfilled(targets: Mapping[str, torch.Tensor], free: Mapping[str, int]) -> list[str]:
    """Parameters that get no tensor, or not all of it, under none of their names."""
    filled = {id(targets[name]) for name, elements in free.items() if elements <= 0}
    return sorted(
        name if elements == targets[name].numel() else f"{name} (in part)"
        for name, elements in free.items()
        if id(targets[name]) not in filled
    )


def _refuse_remainder(left_over: list[str], unfilled: list[str], sentence: str) -> None:
    faults = []
    if left_over:
        faults.append(f"{_count(left_over, 'tensor has', 'tensors have')} no place ({_first(left_over)})")
    if unfilled:
        faults.append(f"{_count(unfilled, 'parameter', 'parameters')} got no tensor ({_first(unfilled)})")
    if faults:
        raise ValueError(f"{sentence}: {' and '.join(faults)}")


def _refuse_rivals(planned: Plan, source: Path) -> None:
    homes: dict[tuple[str, int | None, int], str] = {}
    for name, found in planned.items():
        for piece in found:
            key = (piece.target, piece.expert, piece.part)
            if key in homes:
                raise ValueError(f"{source}: {homes[key]} and {name} are both {piece.target}")
            homes[key] = name


def _count(names: list[str], one: str, many: str) -> str:
    return f"1 {one}" if len(names) == 1 else f"{len(names)} {many}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
