"""What can be told of a model on the hub before its weights are fetched: whether it can be served, and is all there."""

from __future__ import annotations

from adapters.checkpoints.files import BIN_INDEX, INDEX, LORA_CONFIG, WANTED_FILES, read_json, weight_map
from adapters.checkpoints.hub import Repository
from adapters.families import family_of
from adapters.native import native_config

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
        config = read_json(folder / "config.json")
        native_config(family_of(config), config)
    except FileNotFoundError as error:
        raise ValueError(f"{repository.hub} holds no config.json: it is no model that can be served") from error
    except KeyError as error:
        raise ValueError(f"{repository.hub}: config.json lacks {error}") from error
    except ValueError as error:
        raise ValueError(f"{repository.hub}: {error}") from error
    for index in (folder / INDEX, folder / BIN_INDEX):
        named = set(weight_map(index).values()) if index.is_file() else set()
        wanted = {name for name in named if name.endswith(".safetensors") or any(n.endswith(".bin") for n in names)}
        if missing := sorted(wanted - names):
            raise ValueError(f"{repository.hub} lacks {', '.join(missing[:3])}, which its {index.name} names")
