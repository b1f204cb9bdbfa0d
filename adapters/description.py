"""What a model is, before any of its weights are read: family, facts, tokenizer, dtype."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.checkpoints.files import content_hash, read_json
from adapters.checkpoints.sources import Tokens
from adapters.decoder_sizes import FORMULAS
from adapters.drafter import Drafter, describe_drafter
from adapters.facts import model_facts, read_stated, stored_dtype
from adapters.families import Family, family_of, language_part
from adapters.memory import sizes
from adapters.native import build, first_line, native_config, parameter_count
from adapters.options import (
    refuse_absent,
    refuse_combined,
    refuse_quantising_twice,
    refuse_unknown,
    refuse_unused_by_toy,
    unused,
)
from adapters.places import ModelOptions, Place, locate, refuse_unreadable
from adapters.reading_config import native_arguments
from adapters.text import IdCodec, TextCodec, TokenizerCodec
from adapters.toy import ToyMaskedLMAdapter
from samplers import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Description:
    """A model before its weights are read."""

    options: ModelOptions
    facts: ModelFacts
    codec: TextCodec
    dtype: str = "float32"  # of the weights, by its name in torch
    place: Place | None = None  # None for the toy
    config: dict[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @cached_property
    def parameters(self) -> int | None:
        """Of the whole network, known without its weights; None for the toy and for quantised files."""
        if self.place is None or self.place.gguf:
            return None
        native = native_arguments(self.family, self.config)
        if self.family.native or native["model_type"] in FORMULAS:
            return sizes(native).parameters
        return parameter_count(self.skeleton())

    @property
    def weight_bytes(self) -> int | None:
        """Memory of the weights on the device, the drafter's included; None where it is not known."""
        drafted = self.drafter.parameters if self.drafter else 0
        if self.parameters is None or drafted is None or self.options.quantization:
            return None
        return (self.parameters + drafted) * getattr(torch, self.dtype).itemsize

    def skeleton(self) -> PreTrainedModel:
        """The network on the meta device, in the weights' dtype."""
        native = native_config(self.family, self.config)
        return build(native, getattr(torch, self.dtype), torch.device("meta"))

    @property
    def notice(self) -> str | None:
        """One line the user should see; that a path comes before the YAML's hub is no news."""
        idle = {name: reason for name, reason in unused(self).items() if name not in ("hub", "revision", "package")}
        said = [f"model.{name} is not used: {reason}" for name, reason in idle.items()]
        if self.place and self.place.notice:
            said.insert(0, self.place.notice)
        return "; ".join(said) or None

    def identity(self) -> str:
        """What the weights are: a hash of the files' contents, or the toy's name."""
        if self.place is None:
            return f"toy-{self.facts.vocab_size}"
        own = content_hash(self.place.files())
        return f"{own} {self.drafter.identity()}" if self.drafter else own


def describe(options: ModelOptions, device: str = "cpu") -> Description:
    """Find a model and read its configuration and tokenizer, but none of its weights.

    Args:
        device: ``cpu`` or ``cuda``, where it will run: that decides the dtype if `options` leave it open.

    Raises:
        ValueError: one sentence, if it is not there, is of no known family, or an option is wrong.
    """
    refuse_unknown(options)
    if options.kind == "toy":
        refuse_unused_by_toy(options)
        toy = ToyMaskedLMAdapter()
        return Description(options, toy.facts, toy.codec)
    try:
        return _described(options, device)
    except OSError as error:
        raise ValueError(f"model={options.name}: {error.filename} cannot be read ({error.strerror})") from error


def _described(options: ModelOptions, device: str) -> Description:
    if not options.path:
        refuse_absent(options, device)  # before anything is downloaded
    place = locate(options)
    refuse_quantising_twice(options, place)
    for part in (place.folder, *place.files()):  # without weights, refused now rather than at loading
        refuse_unreadable(part)
    config = _config(options, place)
    found = _with_facts(options, place, config)
    found.dtype = options.dtype or ("float32" if device == "cpu" else stored_dtype(config))
    refuse_combined(found)
    if options.draft:
        found.drafter = describe_drafter(options, found, device)
        found.facts = replace(found.facts, draft=found.drafter.facts)
    if options.path:
        refuse_absent(options, device)
    return found


def _config(options: ModelOptions, place: Place) -> dict[str, Any]:
    """The configuration, of a known family and such that the native architecture can be built from it."""
    if place.gguf:
        return _gguf_config(place.folder, place.gguf)
    file = place.folder / "config.json"
    config = read_json(file)
    try:
        native_config(family_of(config), config)
    except KeyError as error:
        raise ValueError(f"model={options.name}: {file} lacks {error}") from error
    except ValueError as error:
        raise ValueError(f"model={options.name}: {file}: {error}") from error
    return config


def _with_facts(options: ModelOptions, place: Place, config: dict[str, Any]) -> Description:
    file, family, language = place.folder / "config.json", family_of(config), language_part(config)
    stated = read_stated(options, config, place.folder, str(file))
    try:
        codec = _codec(options, family, place, language)
        facts = model_facts(options, family, stated, _tokens(codec))
    except KeyError as error:
        raise ValueError(f"model={options.name}: {file} lacks {error}") from error
    return Description(options, facts, codec, place=place, config=config)


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
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf).to_dict()
    except Exception as error:  # its reader raises whatever a broken header makes it stumble over
        raise ValueError(f"{folder / gguf} cannot be read: {first_line(error)}") from error
    return {**config, "architectures": config.get("architectures") or ["LlamaForCausalLM"]}


def _codec(options: ModelOptions, family: Family, place: Place, config: Mapping[str, Any]) -> TextCodec:
    """The folder's tokenizer; a folder without one is driven by ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not place.gguf and not any((place.folder / name).is_file() for name in names):
        return IdCodec(config["vocab_size"])
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of old names in published configurations
            tokenizer = AutoTokenizer.from_pretrained(place.folder, **({"gguf_file": place.gguf} if place.gguf else {}))
        return TokenizerCodec(tokenizer, options.chat_template, family.chat_template)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer in {place.folder} cannot be read: {first_line(error)}") from error


def _tokens(codec: TextCodec) -> Tokens:
    if not isinstance(codec, TokenizerCodec):
        return Tokens({})
    return Tokens(codec.tokenizer.get_vocab(), codec.tokenizer.eos_token)
