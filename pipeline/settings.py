"""From options to a sampler: what each effective setting is, and where it came from."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import plain, typed
from pipeline.errors import UserError, in_words, one_line
from samplers import BlockDiffusionSampler, ModelFacts, Sampler

LABELS = ("_target_", "name", "method", "trained_for")
DERIVING = {"block_size", "num_blocks", "steps", "tokens_per_step"}  # options that settle the canvas's division
NGRAMS, CORPUS = "ngram_order", "ngram_corpus"  # who has the first uses the second, which only the pipeline reads


@dataclass
class Settings:
    """A sampler ready to run.

    Attributes:
        sampler: the configured sampler.
        gen_length: slots of the canvas.
        values: every effective setting by name, as plain values.
        sources: of each and of ``gen_length``: ``option``, ``preset``, ``model``, ``protocol``, ``derived`` or
            ``default``.
        dropped: options that were set and that this sampler does not use.
    """

    sampler: Sampler
    gen_length: int
    values: dict[str, Any]
    sources: dict[str, str]
    dropped: dict[str, Any] = field(default_factory=dict)

    def slots(self, prompts: Iterable[Sequence[int]], model: ModelFacts) -> int:
        """Length of the longest row, prompt and canvas, that fits the model."""
        lengths = {len(prompt) for prompt in prompts}
        longest = max(n + self.sampler.canvas_length(n, self.gen_length, model) for n in lengths)
        return min(longest, model.max_positions or longest)


def sampler_class(target: str) -> type[Sampler]:
    """The class a sampler's YAML names.

    Raises:
        UserError: if it cannot be imported or is no sampler.
    """
    found = imported("sampler._target_", target, Sampler)
    if not issubclass(found, Sampler) or inspect.isabstract(found):
        raise UserError(f"sampler._target_={target} is no complete subclass of samplers.Sampler")
    return found


def imported(option: str, target: str, base: type) -> type:
    """The class that an option names, whatever it is of.

    Args:
        base: what the class should be of; of those the error tells which its module has.

    Raises:
        UserError: if there is none.
    """
    module, _, name = target.rpartition(".")
    try:
        there = vars(importlib.import_module(module))
    except Exception as error:  # a user's own module may raise anything
        raise UserError(f"{option}={target} cannot be imported: {one_line(error)}") from error
    if inspect.isclass(there.get(name)):
        return there[name]
    classes = [cls for cls in there.values() if inspect.isclass(cls) and cls.__module__.startswith(module)]
    known = sorted({cls.__name__ for cls in classes if issubclass(cls, base)} or {cls.__name__ for cls in classes})
    has = f"it has {', '.join(known)}" if known else "nor any other"
    raise UserError(f"{option}={target} cannot be imported: {module} has no class {name}, {has}")


def resolve(
    node: DictConfig,
    gen_length: int,
    model: ModelFacts,
    protocol_block: int | None,
    overridden: Iterable[str] = (),
    drop_unused: bool = False,
) -> Settings:
    """Configure the sampler for a canvas of ``gen_length`` slots.

    Args:
        node: the ``sampler`` part of the configuration.
        protocol_block: block size published with the dataset's protocol.
        overridden: keys given on the command line, such as ``sampler.threshold``.
        drop_unused: leave out options this sampler does not use (sweeps) instead of refusing them.

    Raises:
        UserError: for an option that is not used, out of range, or does not fit another.
    """
    cls = sampler_class(node._target_)
    suited = cls.suited(model)
    nulls = _nulls(cls, node, set(overridden) - {f"sampler.{name}" for name in {*suited, *DERIVING}})
    values, dropped = _used(cls, node, drop_unused)
    values |= dict.fromkeys(nulls)
    sources = {name: "option" if f"sampler.{name}" in overridden else "preset" for name in values}
    sources["gen_length"] = "option" if "dataset.gen_length" in overridden else "protocol"
    values = _of_right_type(cls, values)
    corpus = values.pop(CORPUS, None)
    if drop_unused:
        _drop_idle(cls, values, sources, dropped)
    for name, value in suited.items():
        if name not in values:
            values[name], sources[name] = value, "model"
    if issubclass(cls, BlockDiffusionSampler):
        gen_length = _divide(values, sources, gen_length, model, protocol_block)
    try:
        cls.check(model)
        sampler = cls(**values)
        sampler.refuse_misfit(model)
        if isinstance(sampler, BlockDiffusionSampler):
            _refuse_unknown_read_outs(sampler)
    except (ValueError, TypeError) as error:
        raise UserError(_renamed(error, cls, node)) from error
    for name in nulls:
        if getattr(sampler, name) is not None:
            raise UserError(f"sampler.{name}=null: sampler={node.name} needs {_kind(cls, name)} with these settings")
    used = [entry.name for entry in fields(cls) if entry.name in cls.options()]
    effective = {name: getattr(sampler, name) for name in used}
    if sampler.reads_ngrams:
        effective[CORPUS] = corpus
    elif corpus is not None:
        _drop_corpus(corpus, node.name, sources, dropped, drop_unused)
    for name in effective:
        sources.setdefault(name, "default")
    return Settings(sampler, gen_length, effective, sources, dropped)


def _nulls(cls: type[Sampler], node: DictConfig, overridden: Container[str]) -> list[str]:
    """Options that the command line sets to null: taken at its word, where a YAML's null is the default.

    Args:
        overridden: keys given on the command line, but for those whose null is the model's own value.

    Raises:
        UserError: for one that is never null.
    """
    given = plain(node)
    names = [name for name in sorted(cls.options()) if f"sampler.{name}" in overridden]
    nulls = [name for name in names if name in given and given[name] is None]
    for name in nulls:
        if not re.search(r"\b(None|Optional|Any|object)\b", _type(cls, name)):
            raise UserError(f"sampler.{name}=null: sampler={node.name} needs {_kind(cls, name)}")
    return nulls


def _type(cls: type[Sampler], name: str) -> str:
    """An option's type as its class writes it."""
    kind = next(entry.type for entry in fields(cls) if entry.name == name)
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def _kind(cls: type[Sampler], name: str) -> str:
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    return kinds.get(_type(cls, name).partition(" ")[0], "a value")


def _renamed(error: Exception, cls: type[Sampler], node: DictConfig) -> str:
    """A sampler's words with the name that the user chose in place of the method's, of which that may be a preset."""
    return re.sub(rf"\bsampler={re.escape(cls.method_name)}(?![\w.-])", f"sampler={node.name}", str(error))


def _drop_corpus(corpus: str, name: str, sources: dict[str, str], dropped: dict[str, Any], drop_unused: bool) -> None:
    """Leave out what an n-gram table would be counted from, where the sampler's settings need none, or refuse it."""
    if not drop_unused:
        raise UserError(f"sampler.{CORPUS}={corpus} is not used by sampler={name} with these settings: leave it out")
    dropped[CORPUS] = corpus
    del sources[CORPUS]


def _drop_idle(cls: type[Sampler], values: dict[str, Any], sources: dict[str, str], dropped: dict[str, Any]) -> None:
    """Leave out the command line's options that the sampler's other settings leave without a meaning."""
    for name in cls.idle(values):
        if sources[name] == "option":
            dropped[name] = values.pop(name)
            del sources[name]


def _refuse_unknown_read_outs(sampler: BlockDiffusionSampler) -> None:
    """Refuse a read-out that cannot be found, where the sampler says before any forward what it will ask for.

    Raises:
        ValueError: naming it.
    """
    if asked := sampler.statistics():
        from adapters.readouts import refuse_unknown

        refuse_unknown(asked)


def _used(cls: type[Sampler], node: DictConfig, drop_unused: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options given, apart: those the sampler uses, and those it does not."""
    given = {k: v for k, v in plain(node).items() if v is not None and k not in LABELS}
    known = cls.options() | (DERIVING if issubclass(cls, BlockDiffusionSampler) else set())
    known |= {CORPUS} if NGRAMS in known else set()
    dropped = {name: value for name, value in given.items() if name not in known}
    if dropped and not drop_unused:
        name, value = next(iter(dropped.items()))
        raise UserError(
            f"sampler.{name}={value} is not used by sampler={node.name}: leave it out, its options are "
            f"{', '.join(sorted(known))}"
        )
    return {name: value for name, value in given.items() if name in known}, dropped


def refuse_mismatch(cfg: DictConfig, model: ModelFacts) -> None:
    """Refuse a sampler that cannot decode a model, naming both by their options.

    Raises:
        UserError: with what the sampler needs.
    """
    try:
        cls = sampler_class(cfg.sampler._target_)
        cls.check(model)
    except UserError:
        raise
    except ValueError as error:
        told = _renamed(error, cls, cfg.sampler)
        raise UserError(f"model={cfg.model.name} with sampler={cfg.sampler.name}: {told}") from error


def _of_right_type(cls: type[Sampler], values: dict[str, Any]) -> dict[str, Any]:
    """The options converted to the types of the class's fields; a user's own are in no schema."""
    nodes = typed(cls)
    known = DictConfig({name: nodes[name] for name in values if name in nodes})
    for name in [name for name in values if name in nodes]:
        try:
            known[name] = values[name]
        except OmegaConfBaseException as error:
            reason = in_words(str(error).splitlines()[0])
            raise UserError(f"sampler.{name}={values[name]} does not fit: {reason}") from error
    return {**values, **{str(name): value for name, value in known.items()}}


def _divide(
    values: dict[str, Any], sources: dict[str, str], gen_length: int, model: ModelFacts, protocol_block: int | None
) -> int:
    """Settle block size and steps in place; returns the canvas."""
    num_blocks, told = values.pop("num_blocks", None), sources.pop("num_blocks", None)
    given_way = told == "preset" and sources.get("block_size") == "option"  # the method's number, the user's size
    if num_blocks is not None and not given_way:
        gen_length = _canvas_of(values, sources, num_blocks, gen_length)
    if "block_size" not in values:
        choices = {"model": model.trained_block, "protocol": protocol_block, "default": gen_length}
        source = next(name for name, size in choices.items() if size)
        values["block_size"], sources["block_size"] = choices[source], source
    block_size = values["block_size"]
    if block_size < 1:
        raise UserError(f"sampler.block_size={block_size} is out of range: use a whole number from 1 up")
    if gen_length % block_size and model.block_origin == "prompt":
        raise UserError(
            f"dataset.gen_length={gen_length} is not a multiple of sampler.block_size={block_size} "
            f"({sources['block_size']}): use {_multiples(gen_length, block_size)}, or another block size"
        )
    _settle_steps(values, sources, gen_length, -(-gen_length // block_size))
    return gen_length


def _canvas_of(values: dict[str, Any], sources: dict[str, str], num_blocks: int, gen_length: int) -> int:
    """``num_blocks`` blocks of the given size set the canvas; without a size they divide it."""
    if num_blocks < 1:
        raise UserError(f"sampler.num_blocks={num_blocks} is out of range: use a whole number from 1 up")
    if "block_size" in values:
        canvas = num_blocks * values["block_size"]
        if sources["gen_length"] == "option" and canvas != gen_length:
            raise UserError(
                f"dataset.gen_length={gen_length} and sampler.num_blocks={num_blocks} blocks of sampler.block_size="
                f"{values['block_size']}, that is {canvas}, are two lengths of one canvas: leave one of the three out"
            )
        sources["gen_length"] = "derived"
        return canvas
    if gen_length % num_blocks:
        raise UserError(
            f"sampler.num_blocks={num_blocks} does not divide dataset.gen_length={gen_length}: "
            f"use {_multiples(gen_length, num_blocks)} as gen_length"
        )
    values["block_size"], sources["block_size"] = gen_length // num_blocks, "derived"
    return gen_length


def _settle_steps(values: dict[str, Any], sources: dict[str, str], gen_length: int, num_blocks: int) -> None:
    parallel = values.pop("tokens_per_step", None)
    sources.pop("tokens_per_step", None)
    if parallel is not None:
        if "steps" in values:
            raise UserError(
                f"sampler.steps={values['steps']} and sampler.tokens_per_step={parallel} say the same thing twice: "
                "use one of them"
            )
        if parallel < 1:
            raise UserError(f"sampler.tokens_per_step={parallel} is out of range: use a whole number from 1 up")
        if gen_length % parallel:
            raise UserError(
                f"sampler.tokens_per_step={parallel} does not divide dataset.gen_length={gen_length}: use a divisor"
            )
        values["steps"], sources["steps"] = gen_length // parallel, "derived"
    if "steps" not in values:
        values["steps"], sources["steps"] = num_blocks * values["block_size"], "default"
    steps = values["steps"]
    if steps < 1:
        raise UserError(f"sampler.steps={steps} is out of range: use a whole number from 1 up")
    if steps % num_blocks:
        raise UserError(
            f"sampler.steps={steps} does not divide evenly over {num_blocks} blocks of "
            f"sampler.block_size={values['block_size']}: use {_multiples(steps, num_blocks)}"
        )


def _multiples(value: int, of: int) -> str:
    """The nearest multiples below and above, as a phrase."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{below + of}"
