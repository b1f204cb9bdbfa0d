"""A checkpoint's tensors to a network's parameters: all is settled from the headers before a weight is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

from adapters.checkpoints.fit import Goes, Plan, Shapes, Targets, fit
from adapters.checkpoints.headers import whole_numbers
from adapters.checkpoints.reading import Checkpoint


def fill(model: nn.Module, checkpoint: Checkpoint, goes: Goes, source: Path) -> None:
    """Copy every tensor to where it ``goes``.

    Raises:
        ValueError: see `plan`; then nothing was copied. Also if two names of a tied parameter hold different tensors.
    """
    copy(model, plan(model, checkpoint.shapes(), goes, source), checkpoint, source)


def plan(model: nn.Module, shapes: Shapes, goes: Goes, source: Path) -> Plan:
    """Check names and shapes against a network, which may be on the meta device.

    Raises:
        ValueError: one sentence that tells what does not fit.
    """
    found = fit(shapes, targets_of(model), goes)
    if not found.faultless:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {found.sentence()}")
    return found.plan


def targets_of(model: nn.Module) -> Targets:
    """What of a network there is to fill; its own class says what it has no use for."""
    from transformers import PreTrainedModel

    tensors = model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    ignored = model._keys_to_ignore_on_load_unexpected if isinstance(model, PreTrainedModel) else None
    return Targets(
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tied={name: first for name, first in names.items() if name != first},
        ignored=tuple(ignored or ()),
    )


def copy(model: nn.Module, planned: Plan, checkpoint: Checkpoint, source: Path) -> None:
    """Carry out a plan. A tensor is cast where it goes, so that the host never holds a copy of it.

    Raises:
        ValueError: if a file is broken, a weight is not floating-point, or two names of a tied parameter differ.
    """
    targets = model.state_dict(keep_vars=True)
    written: dict[tuple[int, int | None, int], str] = {}
    with torch.no_grad():
        for name, tensor in checkpoint.tensors(planned.keys()):
            for piece in planned[name]:
                place = piece.view(targets[piece.target])
                if place.is_floating_point() and not tensor.is_floating_point():
                    raise ValueError(f"{source}: {name} {whole_numbers(str(tensor.dtype).removeprefix('torch.'))}")
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
