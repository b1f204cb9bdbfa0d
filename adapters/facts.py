"""What a model is, from its configuration alone: no weight is read, and neither torch nor transformers is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from adapters.families import SERVED, Family, family_of, language_part
from adapters.fit import Fit, fit, stored
from adapters.memory import BYTES, GEMMA, Sizes, sizes
from adapters.places import ModelOptions
from adapters.sources import Source, find, own_end, read_json, tokens_of
from adapters.tensors import Json
from samplers import ModelFacts

NAMING = ("name", "kind", "path", "hub", "revision", "package", "base", "base_revision", "published", "allow_cpu")


@dataclass(frozen=True)
class Inspection:
    """A model, looked at from outside."""

    options: ModelOptions
    source: Source
    family: Family
    facts: ModelFacts
    sizes: Sizes

    @property
    def published_dtype(self) -> str:
        """What the checkpoint's tensors are stored in, as its configuration says."""
        config = self.source.config
        return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")

    @property
    def overrides(self) -> dict[str, Any]:
        """Options in force that change what family and configuration say, or how the model is run."""
        defaults = ModelOptions()
        chosen = {entry.name: getattr(self.options, entry.name) for entry in fields(defaults)}
        return {n: v for n, v in chosen.items() if n not in NAMING and v != getattr(defaults, n) and v not in ({}, [])}

    @cached_property
    def fit(self) -> Fit | None:
        """How the tensors of the folder fit; None where neither weights nor index are there, or only loading tells.

        Raises:
            ValueError: one sentence, if a file is broken.
        """
        if self.source.folder is None or self.source.file is not None or self.sizes.architecture == GEMMA:
            return None
        tensors = stored(self.source.folder)
        return fit(tensors, self.sizes, self.family.rules, self.source.config) if tensors else None


def inspect(options: ModelOptions) -> Inspection:
    """Look at a model, never asking the network.

    Raises:
        ValueError: one sentence, if there is no configuration, it is of no known family, or an option is wrong.
    """
    if options.dtype not in (None, *BYTES):
        raise ValueError(f"model.dtype={options.dtype} is unknown: use {', '.join(BYTES)}")
    if options.kind != "checkpoint":
        raise ValueError(f"model={options.name} has no configuration: model.kind={options.kind} is no checkpoint")
    source = find(options)
    try:
        family = family_of(source.config)
        network = sizes(family.native(source.config) if family.native else source.config)
    except KeyError as error:
        raise ValueError(f"model={options.name}: {source.told} lacks {error}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"model={options.name}: {source.told} holds a value that is none ({error})") from error
    except ValueError as error:
        raise ValueError(f"model={options.name}: {source.told}: {error}") from error
    facts = model_facts(options, family, language_part(source.config), _end_ids(options, family, source))
    return Inspection(options, source, family, facts, network)


def model_facts(options: ModelOptions, family: Family, config: Json, end_ids: frozenset[int]) -> ModelFacts:
    """What concerns a sampler: what the options say, else configuration and family.

    Raises:
        ValueError: one sentence, if an option is wrong.
    """
    vocab_size = config.get("embedding_size") or config["vocab_size"]
    _refuse_overrides(options, vocab_size)
    attention = options.attention or family.attention
    return ModelFacts(
        vocab_size=vocab_size,
        mask_id=family.mask_id(config) if options.mask_id is None else options.mask_id,
        end_ids=end_ids,
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


def _end_ids(options: ModelOptions, family: Family, source: Source) -> frozenset[int]:
    if options.end_ids is not None:
        return frozenset(options.end_ids)
    folder, ids = source.folder, set[int]()
    generation = folder / "generation_config.json" if folder else None
    stated = [language_part(source.config), read_json(generation) if generation and generation.is_file() else {}]
    for config in stated:
        value = config.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    tokens = tokens_of(folder) if folder else dict(source.config.get("token_ids") or {})
    for token in [*own_end(folder), *options.end_tokens] if tokens else []:
        if token not in tokens:
            raise ValueError(f"model.end_tokens: {token} is not a token of model={options.name}")
        ids.add(tokens[token])
    return frozenset(ids) or family.end_ids
