"""Whether a checkpoint's tensors fit a native architecture, told from an index or from headers: no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from adapters.memory import Sizes
from adapters.tensors import Json, Piece, Rule, pieces

Stored = dict[str, tuple[int, ...] | None]  # tensors of a checkpoint; None where only the name is known


@dataclass(frozen=True)
class Fit:
    """What became of a checkpoint's tensors.

    Attributes:
        left_over: tensors that have no place.
        unfilled: parameters that get no tensor, or not all of it.
        misshapen: tensors of a wrong shape, with both shapes.
        shapes: whether shapes were known, or names only.
    """

    tensors: int
    left_over: tuple[str, ...]
    unfilled: tuple[str, ...]
    misshapen: tuple[str, ...]
    shapes: bool

    @property
    def faultless(self) -> bool:
        return not (self.left_over or self.unfilled or self.misshapen)

    def sentence(self) -> str:
        """What to tell of it."""
        if self.faultless:
            return f"all {self.tensors} tensors have a place" + ("" if self.shapes else ", by name")
        told = {
            "of {} tensors {} have no place": self.left_over,
            "of {} tensors {} have a wrong shape": self.misshapen,
        }
        faults = [f"{text.format(self.tensors, len(names))} ({_first(names)})" for text, names in told.items() if names]
        if self.unfilled:
            faults.append(f"{len(self.unfilled)} parameters get no tensor ({_first(self.unfilled)})")
        return "; ".join(faults)


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def stored(folder: Path) -> Stored | None:
    """Names and shapes from the headers of a folder's .safetensors files, or names from its index if a file is absent.

    None if the folder has neither.

    Raises:
        ValueError: one sentence, if a file is broken.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            homes = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(homes.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of a checkpoint ({error})") from error
        if not all(file.is_file() for file in files):
            return dict.fromkeys(homes)
    return {name: shape for file in files for name, shape in _headers(file)} or None


def _headers(file: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as shard:
            return [(name, tuple(shard.get_slice(name).get_shape())) for name in shard.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole .safetensors file ({error})") from error


def fit(tensors: Stored, sizes: Sizes, rules: Iterable[Rule], config: Json) -> Fit:
    """Find every tensor's place.

    Args:
        config: the published configuration, which rules that cut tensors apart look into.
    """
    missing = {name: prod(shape) for name, shape in sizes.shapes.items()}
    left_over, misshapen, rules = [], [], tuple(rules)
    for name, shape in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # older files hold what is computed
        found = pieces(rules, name, config)
        places = [_place(piece, sizes) for piece in found]
        if any(place is None for place in places):
            left_over.append(name)
            continue
        wanted = _whole(found, places)
        if shape is not None and shape != wanted:
            misshapen.append(f"{name} {list(shape)} instead of {list(wanted)}")
        for piece, place in zip(found, places, strict=True):
            missing[piece.target] -= prod(place or ())
    tied = "lm_head.weight" if sizes.tied else None
    unfilled = [name for name, elements in missing.items() if elements > 0 and name != tied]
    known = all(shape is not None for shape in tensors.values())
    return Fit(len(tensors), tuple(left_over), tuple(unfilled), tuple(misshapen), known)


def _place(piece: Piece, sizes: Sizes) -> tuple[int, ...] | None:
    """Shape of the part of the target that a piece fills; None if there is no such target or expert."""
    shape = sizes.shapes.get(piece.target)
    if shape is None or (piece.expert is not None and piece.expert >= shape[0]):
        return None
    shape = shape if piece.expert is None else shape[1:]
    return shape if piece.parts == 1 else (*shape[:-2], shape[-2] // piece.parts, shape[-1])


def _whole(found: list[Piece], places: list[tuple[int, ...] | None]) -> tuple[int, ...]:
    """Shape of the tensor that was cut into these pieces, one under the other."""
    first = places[0] or ()
    return first if len(found) == 1 else (sum(place[0] for place in places if place), *first[1:])
