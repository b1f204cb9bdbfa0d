"""The shape of a configuration: what may be set, and of which type. YAML files choose, this module means."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, BooleanNode, DictConfig, FloatNode, IntegerNode, Node, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import UserError


@dataclass
class SamplerOptions:
    """One vocabulary for all samplers; null means not used. A YAML may add options of its own sampler's.

    Each is explained where it is used, in the docstrings of `samplers`, but for those that only derive others:

    Attributes:
        name, method: the option's name and the label shown in legends.
        num_blocks: blocks of the canvas; with a block size it sets the canvas to their product.
        tokens_per_step: instead of `steps`: the canvas divided by it.
    """

    _target_: str = MISSING
    name: str = MISSING
    method: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    steps: int | None = None
    tokens_per_step: int | None = None
    threshold: float | None = None
    order: str | None = None
    remask_ratio: float | None = None
    cache: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos: str | None = None
    early_stop: bool | None = None


@dataclass
class EngineOptions:
    """How the engine works; nothing here changes a token.

    Attributes:
        max_rows: sequences in flight.
        logits_mib: memory for logits and their temporaries, MiB.
        timing_samples: samples of a separate timed pass with one row in flight; 0 is none.
        trace_samples: first samples whose every forward is written to ``trace/``.
    """

    max_rows: int = 8
    logits_mib: int = 256
    timing_samples: int = 0
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
class ModelNode:
    """See `adapters.loading.ModelOptions`, which is filled from this node; repeated here to stay quick to import."""

    name: str = MISSING
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
class Config:
    """A run.

    Attributes:
        run: name of the folder under ``outputs/``; null makes a new one. An existing one is continued.
        sweep: name of a sweep's folder under ``outputs/``; null is ``sweep``.
        seed: of all random draws.
        output_root: where ``outputs`` are.
    """

    model: ModelNode = field(default_factory=ModelNode)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    dataset: Any = None  # its own class knows its options, see `pipeline.data.base.Dataset`
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
    schema |= {**_typed(Config), "sampler": _typed(SamplerOptions), "dataset": {}}
    ConfigStore.instance().store(name="schema", node=schema)


def _typed(cls: type) -> dict[str, Node]:
    """A dataclass's scalar fields as typed nodes of an open dictionary."""
    kinds = {"int": IntegerNode, "float": FloatNode, "str": StringNode, "bool": BooleanNode}
    nodes = {}
    for entry in fields(cls):
        kind = kinds.get(str(entry.type).partition(" ")[0])
        if kind:
            nodes[entry.name] = kind(value=entry.default, is_optional="None" in str(entry.type))
    return nodes


def refuse_missing(cfg: DictConfig) -> None:
    """Refuse a configuration with values still to be given, naming all of them at once."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        example = " ".join(f"{key}=…" for key in missing)
        raise UserError(f"missing: {', '.join(missing)}; give {'them' if len(missing) > 1 else 'it'} as {example}")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary.

    Raises:
        UserError: if an interpolation cannot be resolved, say of an unset environment variable.
    """
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0]) from error
