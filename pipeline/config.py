"""The shape of a configuration: what may be set, and of which type. YAML files choose, this module means."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, BooleanNode, DictConfig, FloatNode, IntegerNode, Node, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from adapters.places import ModelOptions
from pipeline.errors import UserError


@dataclass
class SamplerOptions:
    """One vocabulary for all samplers; null means not used. A YAML may add options of its own sampler's.

    Each is explained where it is used, in the docstrings of `samplers`, but for those that only derive others:

    Attributes:
        name, method: the option's name and the label shown in legends.
        trained_for: the training a preset presumes, in words; null is what its sampler says.
        num_blocks: blocks of the canvas; with a block size it sets the canvas to their product.
        tokens_per_step: instead of `steps`: the canvas divided by it.
        ngram_corpus: what the n-gram table of `samplers.ngram` is counted from: a ``samples.jsonl`` (its answers) or a
            text file; null is each row's own prompt.
    """

    _target_: str = MISSING
    name: str = MISSING
    method: str | None = None
    trained_for: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    sub_block_size: int | None = None
    steps: int | None = None
    tokens_per_step: int | None = None
    minimal_topk: int | None = None
    schedule_eps: float | None = None
    threshold: float | None = None
    low_threshold: float | None = None
    factor: float | None = None
    entropy_threshold: float | None = None
    entropy_budget: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int | None = None
    block_add_threshold: float | None = None
    block_activate_threshold: float | None = None
    buffer_blocks: int | None = None
    always_surest: bool | None = None
    order: str | None = None
    order_temperature: float | None = None
    judged: str | None = None
    remask_ratio: float | None = None
    cache: str | None = None
    cache_delay: int | None = None
    cache_refresh_interval: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos: str | None = None
    early_stop: bool | None = None
    cfg_scale: float | None = None
    drafter: str | None = None
    draft_width: int | None = None
    draft_chunk: int | None = None
    draft_confidence: float | None = None
    draft_candidates: int | None = None
    sampled_drafts: bool | None = None
    adaptive: bool | None = None
    acceptance: str | None = None
    tree: str | None = None
    node_budget: int | None = None
    prefix_weight: float | None = None
    ngram_order: int | None = None
    ngram_corpus: str | None = None
    compat: str | None = None


@dataclass
class PromptOptions:
    """How a question is put to the model.

    Attributes:
        template: ``chat``, the model's chat template; ``raw``, the text alone, for base models; ``auto``, chat where
            there is a template, else raw.
    """

    template: str = "auto"


@dataclass
class TriedPrompt(PromptOptions):
    """The prompt of `pipeline.decode`, which brings the question, too; ``prompt="…"`` there is short for its text."""

    text: str = MISSING


@dataclass
class EngineOptions:
    """How the engine works; nothing here changes a token.

    Attributes:
        max_rows: sequences in flight.
        logits_mib: memory for logits and their temporaries, MiB.
        timing_samples: samples of a separate timed pass with one row in flight; 0 is none.
        trace: write every forward of every sample to ``trace/``, for `pipeline.trace`.
        trace_samples: the same for this many samples from the first on only.
    """

    max_rows: int = 8
    logits_mib: int = 256
    timing_samples: int = 0
    trace: bool = False
    trace_samples: int = 0


@dataclass
class TrainerOptions:
    """Where it runs, in Lightning's words."""

    accelerator: str = "auto"
    devices: int = 1


@dataclass
class LoggerOptions:
    """Weights & Biases, or nothing.

    Attributes:
        kind: ``wandb`` or ``none``.
        mode: ``online``, ``offline`` or ``disabled``; null is online with a key and offline without one.
        table_rows: most rows of the per-sample table.
    """

    kind: str = "wandb"
    project: str = "blockdiff"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    table_rows: int = 2000


@dataclass
class Config:
    """A run.

    Attributes:
        run: name of the folder under ``outputs/``; null makes a new one. An existing one is continued.
        sweep: name of a sweep's folder under ``outputs/``; null is ``sweep``.
        seed: of all random draws.
        output_root: where ``outputs`` are.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    dataset: Any = None  # its own class knows its options, see `pipeline.data.base.Dataset`
    prompt: PromptOptions = field(default_factory=PromptOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    logger: LoggerOptions = field(default_factory=LoggerOptions)
    run: str | None = None
    sweep: str | None = None
    seed: int = 0
    output_root: str = "outputs"


def register() -> None:
    """Make the schema known to Hydra; ``conf/config.yaml`` starts from it.

    Sampler and dataset stay open to options of a user's own class; the known ones are typed all the same.
    """
    parts = {entry.name: entry.default_factory for entry in fields(Config) if is_dataclass(entry.default_factory)}
    schema: dict[str, Any] = {name: OmegaConf.structured(part) for name, part in parts.items()}
    for free in ("quantization", "published"):
        OmegaConf.set_struct(schema["model"][free], False)  # their keys are others' to name
    schema |= {**typed(Config), "sampler": typed(SamplerOptions), "dataset": {}}
    ConfigStore.instance().store(name="schema", node=schema)
    ConfigStore.instance().store(name="decode_schema", node={"prompt": OmegaConf.structured(TriedPrompt)})


def typed(cls: type) -> dict[str, Node]:
    """A dataclass's scalar fields as typed nodes of an open dictionary."""
    kinds: dict[str, Any] = {"int": IntegerNode, "float": FloatNode, "str": StringNode, "bool": BooleanNode}
    nodes: dict[str, Node] = {}
    for entry in fields(cls):
        words = str(getattr(entry.type, "__name__", entry.type)).split(" | ")
        kind = next((kinds[word] for word in words if word in kinds), None)
        if kind and set(words) <= {*kinds, "None"}:
            default = None if entry.default is dataclasses.MISSING else entry.default
            nodes[entry.name] = kind(value=default, is_optional="None" in words or default is None)
    return nodes


def named(cfg: DictConfig, overridden: Collection[str] = ()) -> DictConfig:
    """``cfg`` with the name that its model is shown by, where it has a value.

    A YAML's name goes with the YAML's place: a path or hub id on the command line brings its own last part, unless
    the name is given there too.

    Args:
        overridden: keys given on the command line.
    """
    model = cfg.model
    option = "path" if model.path else "hub"
    moved = f"model.{option}" in overridden and model[option] and "model.name" not in overridden
    if model.name and not moved:
        return cfg
    last = Path(str(model[option] or model.kind)).expanduser()
    return OmegaConf.merge(cfg, {"model": {"name": last.name or last.resolve().name}})  # type: ignore[return-value]


def refuse_unknown(cfg: DictConfig) -> None:
    """Refuse a key that nobody reads: the root is open, so that a tool such as `pipeline.decode` may add its own."""
    known = [entry.name for entry in fields(Config)]
    unknown = [str(key) for key in cfg if key not in known]
    if unknown:
        raise UserError(f"{unknown[0]} is no option: the options are {', '.join(known)}")


def refuse_missing(cfg: DictConfig) -> None:
    """Refuse a configuration with values still to be given, naming all of them at once."""
    missing = sorted(_missing(OmegaConf.to_container(cfg, resolve=False)))
    if missing:
        example = " ".join(f"{key}=…" for key in missing)
        raise UserError(f"missing: {', '.join(missing)}; give {'them' if len(missing) > 1 else 'it'} as {example}")


def _missing(node: Any, path: str = "") -> list[str]:
    """Keys below a node without a value; interpolations are left alone, so that one to such a key hides no other."""
    if isinstance(node, dict):
        return [key for name, value in node.items() for key in _missing(value, f"{path}.{name}" if path else str(name))]
    return [path] if node == "???" else []


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary.

    Raises:
        UserError: if an interpolation cannot be resolved, say of an unset environment variable.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{key}{str(error).splitlines()[0]}") from error
