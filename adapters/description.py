"""What a model is, before any of its weights are read: family, facts, tokenizer, dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from adapters.families import SERVED, Family, family_of, language_part
from adapters.native import build, first_line, native_config, parameter_count
from adapters.places import ModelOptions, Place, content_hash, locate, weight_files
from adapters.text import IdCodec, TextCodec, TokenizerCodec
from adapters.toy import ToyMaskedLMAdapter
from samplers import ModelFacts


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

    @cached_property
    def parameters(self) -> int | None:
        """Of the whole network, known without its weights; None for the toy and for quantised files."""
        if self.place is None or self.place.gguf:
            return None
        native = native_config(self.family, self.config)
        return parameter_count(build(native, getattr(torch, self.dtype), torch.device("meta")))

    @property
    def weight_bytes(self) -> int | None:
        """Memory of the weights on the device; None where it is not known."""
        if self.parameters is None or self.options.quantization:
            return None
        return self.parameters * getattr(torch, self.dtype).itemsize

    @property
    def notice(self) -> str | None:
        """One line the user should see."""
        return self.place.notice if self.place else None

    def identity(self) -> str:
        """What the weights are: a hash of the files' contents, or the toy's name."""
        if self.place is None:
            return f"toy-{self.facts.vocab_size}"
        return content_hash(self.place.files())


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
    place = locate(options)
    config_file, generation_file = place.folder / "config.json", place.folder / "generation_config.json"
    config = _gguf_config(place.folder, place.gguf) if place.gguf else _read_json(config_file, options)
    if not place.file:
        weight_files(place.folder)  # without any, refused now rather than at loading
    stated = _read_json(generation_file, options) if generation_file.is_file() else {}
    family = family_of(config)
    try:
        if not place.gguf:
            native_config(family, config)
    except ValueError as error:
        raise ValueError(f"model={options.name}: {config_file}: {error}") from error
    try:
        language = language_part(config)
        codec = _codec(options, family, place, language)
        facts = _facts(options, family, language, stated, codec)
    except KeyError as error:
        raise ValueError(f"model={options.name}: {config_file} lacks {error}") from error
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = options.dtype or ("float32" if device == "cpu" else own)
    return Description(options, facts, codec, dtype, place, config)


def _read_json(file: Path, options: ModelOptions) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"model={options.name}: {file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"model={options.name}: {file} holds no JSON object")
    return content


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


def _codec(options: ModelOptions, family: Family, place: Place, config: Mapping[str, Any]) -> TextCodec:
    """The folder's tokenizer; a folder without one is driven by ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not place.gguf and not any((place.folder / name).is_file() for name in names):
        return IdCodec(config["vocab_size"])
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.folder, **({"gguf_file": place.gguf} if place.gguf else {}))
        return TokenizerCodec(tokenizer, options.chat_template, family.chat_template)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer in {place.folder} cannot be read: {first_line(error)}") from error


def _facts(
    options: ModelOptions, family: Family, config: dict[str, Any], generation: dict[str, Any], codec: TextCodec
) -> ModelFacts:
    vocab_size = config.get("embedding_size") or config["vocab_size"]
    _refuse_overrides(options, vocab_size)
    attention = options.attention or family.attention
    return ModelFacts(
        vocab_size=vocab_size,
        mask_id=family.mask_id(config) if options.mask_id is None else options.mask_id,
        end_ids=_end_ids(options, family, config, generation, codec),
        shift=family.shift if options.shift is None else options.shift,
        attention=attention,
        attentions=SERVED[attention],
        block_origin=options.block_origin or family.block_origin,
        trained_block=options.trained_block or family.trained_block(config),
        max_positions=config.get("max_position_embeddings") or config.get("max_sequence_length"),
    )


def _refuse_overrides(options: ModelOptions, vocab_size: int) -> None:
    for name, ids in (("mask_id", [options.mask_id]), ("end_ids", options.end_ids or [])):
        if wrong := [id_ for id_ in ids if id_ is not None and not 0 <= id_ < vocab_size]:
            raise ValueError(f"model.{name}={wrong[0]} is no id of model={options.name}: use 0 to {vocab_size - 1}")
    choices = {
        "attention": (options.attention, tuple(SERVED)),
        "shift": (options.shift, (0, 1)),
        "block_origin": (options.block_origin, ("prompt", "zero")),
    }
    for name, (value, known) in choices.items():
        if value is not None and value not in known:
            raise ValueError(f"model.{name}={value} is unknown: use {' or '.join(map(str, known))}")
    if options.trained_block is not None and options.trained_block < 1:
        raise ValueError(f"model.trained_block={options.trained_block} is out of range: use a whole number from 1 up")


def _end_ids(
    options: ModelOptions, family: Family, config: dict[str, Any], generation: dict[str, Any], codec: TextCodec
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
    return frozenset(ids) or family.end_ids
