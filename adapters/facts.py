"""What a model is, from its configuration alone: no weight is read, and neither torch nor transformers is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adapters.checkpoints.files import weight_files
from adapters.checkpoints.fit import Fit, Plan, Targets, fit
from adapters.checkpoints.headers import integers, stored, whole_numbers
from adapters.checkpoints.sources import Source, Tokens, find, find_drafter, tokens_of
from adapters.draft_config import facts_of_drafter, is_dflash, refuse_foreign_sizes
from adapters.families import SERVED, Family, family_of, language_part
from adapters.ids import end_ids_of, refuse_ids
from adapters.memory import Sizes, draft_sizes, sizes
from adapters.options import refuse_unknown
from adapters.places import ModelOptions
from adapters.reading_config import native_arguments, read_generation
from adapters.tensors import Json, pieces
from samplers import ModelFacts

NAMING = (
    *("name", "kind", "path", "hub", "revision", "package", "base", "base_revision"),
    *("training", "published", "draft", "draft_revision", "draft_published", "allow_cpu"),
)


@dataclass(frozen=True)
class Stated:
    """What a model's files say: ``config.json``, of a multimodal one the language part, and ``generation_config``.

    Attributes:
        told: where the first of them is from, in words.
    """

    config: Json
    generation: Json
    told: str = "config.json"


@dataclass(frozen=True)
class Inspection:
    """A model, looked at from outside."""

    options: ModelOptions
    source: Source
    family: Family
    facts: ModelFacts
    sizes: Sizes
    drafter: Inspection | None = None

    @property
    def published_dtype(self) -> str:
        """What the checkpoint's tensors are stored in, as its configuration says."""
        return stored_dtype(self.source.config)

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
        source, rules = self.source, self.family.rules
        converted = bool(source.config.get("quantization_config")) or not (self.sizes.complete or self.family.native)
        if source.folder is None or source.file is not None or converted:
            return None
        tensors = stored(source.folder)
        if tensors is None:
            return None
        tied = {"lm_head.weight": self.sizes.tied} if self.sizes.tied else {}
        targets = Targets(self.sizes.shapes, tied, self.sizes.ignored)
        found = fit(tensors, targets, lambda name: pieces(rules, name, source.config))
        wrong = [] if not found.shapes else _integers(source.folder, found.plan)
        return replace(found, wrong=(*found.wrong, *wrong))


def _integers(folder: Path, plan: Plan) -> list[str]:
    """A phrase for each tensor that has a place, but holds no weights."""
    whole = integers(weight_files(folder))
    return [f"{name} {whole_numbers(whole[name])}" for name in plan if name in whole]


def inspect(options: ModelOptions) -> Inspection:
    """Look at a model, never asking the network.

    Raises:
        ValueError: one sentence, if there is no configuration, it is of no known family, or an option is wrong.
    """
    refuse_unknown(options)
    if options.kind != "checkpoint":
        raise ValueError(f"model={options.name} has no configuration: model.kind={options.kind} is no checkpoint")
    source = find(options)
    try:
        family = family_of(source.config)
        network = sizes(native_arguments(family, source.config))
    except KeyError as error:
        raise ValueError(f"model={options.name}: {source.told} lacks {error}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"model={options.name}: {source.told} holds a value that is none ({error})") from error
    except ValueError as error:
        raise ValueError(f"model={options.name}: {source.told}: {error}") from error
    facts = model_facts(
        options, family, read_stated(options, source.config, source.folder, source.told), _tokens(source)
    )
    found = Inspection(options, source, family, facts, network)
    if options.draft is None:
        return found
    drafter = _drafter(found)
    return replace(found, facts=replace(facts, draft=drafter.facts), drafter=drafter)


def _drafter(target: Inspection) -> Inspection:
    """The drafter of a model, as far as its configuration is here or was recorded.

    Raises:
        ValueError: one sentence, if there is none, or it cannot be used.
    """
    options = target.options
    try:
        source = find_drafter(options)
        if is_dflash(source.config):
            return _dflash(target, source)
    except KeyError as error:
        raise ValueError(f"model.draft={options.draft}: its configuration lacks {error}") from error
    except (TypeError, ZeroDivisionError, ValueError) as error:  # of a value that is none
        raise ValueError(f"model.draft={options.draft}: {error}") from error
    folder = str(source.folder) if source.folder else None
    return inspect(ModelOptions(options.name, path=folder, published=dict(source.config)))


def _dflash(target: Inspection, source: Source) -> Inspection:
    network, facts = target.sizes, facts_of_drafter(source.config, target.facts)
    refuse_foreign_sizes(source.config, network.layers, network.hidden, facts.vocab_size)
    family = Family("DFlash", is_dflash, facts.attention, facts.shift)
    return Inspection(ModelOptions(target.options.draft), source, family, facts, draft_sizes(source.config))


def read_stated(options: ModelOptions, config: Json, folder: Path | None, told: str) -> Stated:
    """What is stated beside a configuration that is already read.

    Args:
        folder: of all files; None where the configuration was recorded.
        told: where the configuration is from, in words.

    Raises:
        ValueError: one sentence, if ``generation_config.json`` is broken.
    """
    try:
        return Stated(language_part(config), read_generation(folder) if folder else {}, told)
    except ValueError as error:
        raise ValueError(f"model={options.name}: {error}") from error


def _tokens(source: Source) -> Tokens:
    """Of the tokenizer's files, or those that were recorded."""
    return tokens_of(source.folder) if source.folder else Tokens(source.config.get("token_ids") or {})


def stored_dtype(config: Json) -> str:
    """What a checkpoint's tensors are stored in, as its ``config.json`` says."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def model_facts(options: ModelOptions, family: Family, stated: Stated, tokens: Tokens) -> ModelFacts:
    """What concerns a sampler: what the options say, else the model's own files, else its family.

    Raises:
        ValueError: one sentence, if an option is wrong.
        KeyError: if the configuration lacks a key.
    """
    config = stated.config
    vocab_size = config.get("embedding_size") or config["vocab_size"]
    _refuse_overrides(options, vocab_size)
    _refuse_unserved(family, config)
    attention = options.attention or family.attention
    mask_id = family.mask_id(config) if options.mask_id is None else options.mask_id
    end_ids = end_ids_of(options, family, stated, tokens)
    try:
        refuse_ids(stated, vocab_size, mask_id, end_ids)
    except ValueError as error:
        raise ValueError(f"model={options.name}: {stated.told}: {error}") from error
    return ModelFacts(
        vocab_size=vocab_size,
        mask_id=mask_id,
        end_ids=end_ids,
        shift=family.shift if options.shift is None else options.shift,
        attention=attention,
        attentions=SERVED[attention],
        block_origin=options.block_origin or family.block_origin,
        trained_block=options.trained_block or family.trained_block(config),
        max_positions=_longest_row(family, config),
    )


def _refuse_unserved(family: Family, config: Json) -> None:
    """Refuse attention that is more than a softmax over what is seen, which our kernels do not compute."""
    if family.adapter != "transformer":
        return
    kind = config.get("model_type")
    if config.get("attn_logit_softcapping"):
        raise ValueError(f"model_type={kind} caps its attention scores (attn_logit_softcapping): it is not served")
    if kind == "gpt_oss":
        raise ValueError(f"model_type={kind} has attention sinks: it is not served")


def _longest_row(family: Family, config: Json) -> int | None:
    """Positions the model knows; no more than its layers see at once, if those of a plain architecture slide."""
    positions: int | None = config.get("max_position_embeddings") or config.get("max_sequence_length")
    slides = not family.native and family.adapter == "transformer" and config.get("use_sliding_window", True)
    window: int | None = config.get("sliding_window") if slides else None
    return min(positions, window) if positions and window else positions


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
