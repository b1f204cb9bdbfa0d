"""``python -m pipeline.list``: models, samplers and datasets, one line each, and which of them go together.

Overrides narrow the table down or fill in what is missing: ``model=llada model.path=…``, ``--config-dir my``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from samplers import ModelFacts

if TYPE_CHECKING:
    from omegaconf import DictConfig

CANVAS = 8  # blocks: enough to be shared evenly
GROUPS = ("model", "sampler", "dataset")
TOY = ModelFacts(
    128, 0, frozenset({2}), attentions=frozenset({"full", "blocks", "causal", "tree"})
)  # without loading torch


def print_options(config_dir: str | None = None) -> None:
    """Every option of the three axes with what its YAML says of itself."""
    from pipeline.compose import first_comment, options
    from pipeline.table import console

    for group in GROUPS:
        table = Table(title=f"{group}=", title_justify="left", show_header=False, box=None, pad_edge=False)
        names = options(group, config_dir)
        table.add_column(no_wrap=True, min_width=max(map(len, names)))
        table.add_column(overflow="fold")
        for name in names:
            table.add_row(name, first_comment(group, name, config_dir))
        console().print(table)
        console().print()


def print_combinations(overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
    """Which samplers decode which models, those together that take the same; a model that is neither here nor recorded
    can't be judged and says so.

    Args:
        overrides: ``model=`` or ``sampler=`` leave only that row or column, others change what is judged.
    """
    from pipeline.settings import sampler_class
    from pipeline.table import console

    models, names = (_chosen(group, overrides, config_dir) for group in ("model", "sampler"))
    told: dict[str, list[str]] = {}
    rest = [override for override in overrides if override.partition("=")[0] not in ("model", "sampler")]
    samplers = dict(_composed("sampler", names, rest, config_dir))
    for cfg in samplers.values():
        sampler_class(cfg.sampler._target_)  # one that cannot be imported is told, not left out
    for model, cfg in _composed("model", models, rest, config_dir):
        told.setdefault(_samplers_of(_facts(cfg), samplers), []).append(model)
    table = Table(box=None, pad_edge=False)
    for column in ("models", "samplers"):
        table.add_column(column)
    for text, alike in told.items():
        table.add_row(", ".join(alike), text)
    console().print("which samplers decode which models")  # a table's title is broken at its width
    console().print(table)


def _chosen(group: str, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    from pipeline.compose import options

    given = [override.partition("=")[2] for override in overrides if override.partition("=")[0] == group]
    return given or options(group, config_dir)


def _composed(
    group: str, names: Sequence[str], rest: Sequence[str], config_dir: str | None
) -> Iterator[tuple[str, DictConfig]]:
    """The configuration with each option of a group."""
    from omegaconf import OmegaConf

    from pipeline.compose import compose

    if rest or len(names) == 1:
        yield from ((name, compose([f"{group}={name}", *rest], config_dir)) for name in names)
        return
    # composing is what takes time here: all options at once, each in a place of its own
    whole = compose([f"+{group}@every.{name}={name}" for name in names], config_dir)
    around = OmegaConf.masked_copy(whole, [str(key) for key in whole if key not in (group, "every")])
    OmegaConf.set_struct(around, False)
    for name in names:
        yield name, OmegaConf.merge(around, {group: whole.every[name]})  # type: ignore[misc]


def _samplers_of(facts: ModelFacts | str, samplers: dict[str, DictConfig]) -> str:
    if isinstance(facts, str):
        return facts
    fitting = [name for name, cfg in samplers.items() if _decodes(cfg, facts)]
    return ", ".join(fitting) or ("none of them" if len(samplers) > 3 else f"not {', '.join(samplers)}")


def fitting(facts: ModelFacts, config_dir: str | None = None) -> list[str]:
    """Samplers that decode a model with the settings of their YAML."""
    samplers = _composed("sampler", _chosen("sampler", (), config_dir), (), config_dir)
    return [name for name, cfg in samplers if _decodes(cfg, facts)]


def _facts(cfg: DictConfig) -> ModelFacts | str:
    """By the model's files, or by what is recorded of it: neither torch nor transformers is needed."""
    from adapters.facts import inspect
    from adapters.places import ModelOptions
    from pipeline.config import plain

    options = ModelOptions(**plain(cfg.model))
    if options.kind == "toy":
        return TOY
    try:
        return inspect(options).facts
    except ValueError:
        return "not here"


def _decodes(cfg: DictConfig, facts: ModelFacts) -> bool:
    """Whether a sampler, with the settings of its YAML, decodes a model; a canvas in blocks of any size will do."""
    from pipeline.settings import refuse_mismatch, resolve

    try:
        refuse_mismatch(cfg, facts)
        block = cfg.sampler.get("block_size") or facts.trained_block or 1
        resolve(cfg.sampler, CANVAS * block, facts, None, drop_unused=True)
    except ValueError:
        return False
    return True


def _look(cfg: object, overrides: list[str]) -> None:
    from pipeline.overrides import config_dir

    print_options(config_dir())
    print_combinations(overrides, config_dir())


def main() -> None:
    from pipeline.cli import looking

    looking(_look)


if __name__ == "__main__":
    main()
