"""Where a model's configuration is found without a network: a folder, the hub's cache, or the facts recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.checkpoints.files import LORA_CONFIG, read_json
from adapters.places import (
    ModelOptions,
    is_id,
    is_local,
    locate,
    locate_drafter,
    lora_base,
    refuse_bad_id,
    refuse_unreadable,
)
from adapters.tensors import Json

RECORDED = "the facts recorded in its YAML"


@dataclass(frozen=True)
class Source:
    """A configuration and where it is from.

    Attributes:
        config: the content of ``config.json``, or as much as was recorded of it.
        told: its origin, in words.
        folder: where the file and all that lies beside it are; None for recorded facts.
        adapter: folder of a LoRA that goes on top.
        file: weights that are one file beside the folder.
    """

    config: Json
    told: str
    folder: Path | None = None
    adapter: Path | None = None
    file: Path | None = None


@dataclass(frozen=True)
class Tokens:
    """Ids of a tokenizer's tokens by their text, none where there is no tokenizer, and the text of its end token."""

    ids: Mapping[str, int]
    end: str | None = None


def find(options: ModelOptions) -> Source:
    """The configuration of a model: of `path` if it is given, else of the hub's cache, else what is recorded.

    Raises:
        ValueError: one sentence, if there is none.
    """
    recorded = Source(options.published, RECORDED)
    if not options.path:
        if options.hub:
            refuse_bad_id("model.hub", options.hub)
        folder = _cached(options.hub, options.revision)
        if folder is not None:
            return _with_base(options, folder) if _is_lora(folder) else _in_folder(folder)
        if options.published:
            return recorded
        where = f"model.hub={options.hub} is not in the hub's cache" if options.hub else "model.hub is null"
        raise ValueError(f"model={options.name}: {where} and nothing is recorded of it: set model.path to its folder")
    refuse_unreadable(Path(options.path).expanduser(), "model.path")
    if _is_lora(Path(options.path).expanduser()):
        return _with_base(options, Path(options.path).expanduser())
    place = locate(options)
    if place.gguf:
        raise ValueError(f"model.path={options.path}: a .gguf file has no config.json to inspect, run it instead")
    return replace(_in_folder(place.folder), file=place.file)


def find_drafter(options: ModelOptions) -> Source:
    """The configuration of the drafter that comes with a model, as `find` does.

    Raises:
        ValueError: one sentence, if there is none.
    """
    draft = options.draft or ""
    if is_local(draft):
        return _in_folder(locate_drafter(options).folder)
    folder = _cached(draft, options.draft_revision) if is_id(draft) else None
    if folder is not None:
        return _in_folder(folder)
    if options.draft_published:
        return Source(options.draft_published, RECORDED)
    raise ValueError("it is neither a folder nor in the hub's cache, and nothing is recorded of it")


def _in_folder(folder: Path) -> Source:
    file = folder / "config.json"
    return Source(read_json(file), str(file), folder)


def _with_base(options: ModelOptions, adapter: Path) -> Source:
    """A LoRA's base: a folder, the hub's cache, else what is recorded."""
    base = lora_base(options, adapter)
    folder = Path(base).expanduser() if base else None
    if folder is None or not (folder / "config.json").is_file():
        folder = _cached(base, options.base_revision) if base and is_id(base) else None
    if folder is not None:
        return replace(_in_folder(folder), adapter=adapter)
    if not options.published:
        raise ValueError(f"model={options.name}: the base model {base} of {adapter} is not here: set model.base to it")
    return Source(options.published, RECORDED, adapter=adapter)


def _is_lora(folder: Path) -> bool:
    return (folder / LORA_CONFIG).is_file()


def _cached(hub: str | None, revision: str | None) -> Path | None:
    """Folder of a model in the hub's cache."""
    if not hub:
        return None
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", LORA_CONFIG):
        found = try_to_load_from_cache(hub, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def tokens_of(folder: Path) -> Tokens:
    """A folder's tokens, as far as its files say them in JSON."""
    found: dict[str, int] = {}
    if (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
        plain = content["model"].get("vocab")
        found |= plain if isinstance(plain, dict) else {}
        found |= {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    if not (folder / "tokenizer_config.json").is_file():
        return Tokens(found)
    own = read_json(folder / "tokenizer_config.json")
    found |= {token["content"]: int(id_) for id_, token in own.get("added_tokens_decoder", {}).items()}
    end = own.get("eos_token")
    return Tokens(found, end["content"] if isinstance(end, dict) else end)
