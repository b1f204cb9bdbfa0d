"""What can be told of a fetched model before its weights are read: whether it can be served, and is whole."""

from __future__ import annotations

import json

import torch

from adapters.checkpoint import SafetensorsShards, checkpoint
from adapters.description import Description
from adapters.families import family_of
from adapters.filling import plan
from adapters.hub import Repository
from adapters.native import build, native_config
from adapters.places import LORA_CONFIG, WANTED_FILES, lora_files
from adapters.tensors import pieces

ONLY_BIN = ["*.bin"]


def patterns_of(names: list[str]) -> list[str]:
    """Patterns of the files that a run wants of a repository; ``.bin`` files only where there are no others.

    Raises:
        ValueError: one sentence, if there are no weights.
    """
    top = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") for name in top):
        return WANTED_FILES
    if any(name.endswith(".bin") for name in top):
        return [*WANTED_FILES, *ONLY_BIN]
    raise ValueError("it holds no weights: neither .safetensors nor .bin")


def check_plan(repository: Repository) -> None:
    """Refuse a model that cannot be served, once its small files are here and before its weights are fetched.

    Raises:
        ValueError: one sentence, if it is of no known family, or lacks a file that its index names.
    """
    folder, names = repository.folder, {file.name for file in repository.files}
    if LORA_CONFIG in names:
        return  # its base says the rest
    try:
        config = json.loads((folder / "config.json").read_text())
        native_config(family_of(config), config)
    except FileNotFoundError as error:
        raise ValueError(f"{repository.hub} holds no config.json: it is no model that can be served") from error
    except ValueError as error:
        raise ValueError(f"{repository.hub}: {error}") from error
    for index in (folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json"):
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
        wanted = {name for name in named if name.endswith(".safetensors") or any(n.endswith(".bin") for n in names)}
        if missing := sorted(wanted - names):
            raise ValueError(f"{repository.hub} lacks {', '.join(missing[:3])}, which its {index.name} names")


def check_headers(description: Description) -> int:
    """Compare names and shapes in the files' headers with the native architecture; no weight is read.

    Returns:
        how many tensors there are, those of a LoRA included.

    Raises:
        ValueError: one sentence, if a file is cut short, or a tensor is missing, left over or of a wrong shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    place, family, config = description.place, description.family, description.config
    assert place
    adapter = len(SafetensorsShards(lora_files(place.adapter)).shapes()) if place.adapter else 0
    shapes = checkpoint(place, trusted=False).shapes()
    skeleton = build(native_config(family, config), torch.float32, torch.device("meta"))
    if family.native or not get_model_conversion_mapping(skeleton, add_legacy=False):  # else transformers checks them
        plan(skeleton, shapes, lambda name: pieces(family.rules, name, config), place.folder)
    return len(shapes) + adapter
