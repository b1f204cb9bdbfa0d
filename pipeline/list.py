"""``python -m pipeline.list``: models, samplers and datasets, one line each, and which of them go together.

Overrides narrow the table down or fill in what is missing: ``model=llada model.path=…``, ``--config-dir my``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.table import Table

from samplers import ModelFacts, Sampler

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS = ("model", "sampler", "dataset")


def print_options(config_dir: str | None = None) -> None:
    """Every option of the three axes with what its YAML says of itself."""
    from pipeline.compose import first_comment, options
    from pipeline.table import console

    for group in GROUPS:
        table = Table(title=f"{group}=", title_justify="left", show_header=False, box=None, pad_edge=False)
        for name in options(group, config_dir):
            table.add_row(name, first_comment(group, name, config_dir))
        console().print(table)
        console().print()


def print_combinations(overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
    """Which sampler decodes which model; a model that is neither here nor recorded can't be judged and says so.

    Args:
        overrides: ``model=`` or ``sampler=`` leave only that row or column, others change what is judged.
    """
    from pipeline.compose import compose
    from pipeline.settings import sampler_class
    from pipeline.table import console

    models, names = (_chosen(group, overrides, config_dir) for group in ("model", "sampler"))
    rest = [override for override in overrides if override.partition("=")[0] not in ("model", "sampler")]
    known: dict[str, ModelFacts | str] = {}
    samplers: dict[str, type[Sampler]] = {}
    for model, name in zip_longest(models, names):  # composing is what takes time here: one of each at once
        words = [f"{group}={word}" for group, word in (("model", model), ("sampler", name)) if word]
        cfg = compose([*words, *rest], config_dir)
        known |= {model: _facts(cfg)} if model else {}
        samplers |= {name: sampler_class(cfg.sampler._target_)} if name else {}
    table = Table(title="which sampler decodes which model", title_justify="left", box=None, pad_edge=False)
    for name in ("model", "samplers"):
        table.add_column(name)
    for model, facts in known.items():
        fitting = [name for name, sampler in samplers.items() if _decodes(sampler, facts)]
        table.add_row(model, facts if isinstance(facts, str) else ", ".join(fitting) or f"not {', '.join(names)}")
    console().print(table)


def _chosen(group: str, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    from pipeline.compose import options

    given = [override.partition("=")[2] for override in overrides if override.partition("=")[0] == group]
    return given or options(group, config_dir)


def _facts(cfg: DictConfig) -> ModelFacts | str:
    """By the model's files, or by what is recorded of it: transformers is not needed."""
    from adapters.facts import inspect
    from adapters.places import ModelOptions
    from pipeline.config import plain

    options = ModelOptions(**plain(cfg.model))
    if options.kind == "toy":
        from adapters.toy import ToyMaskedLMAdapter

        return ToyMaskedLMAdapter().facts
    try:
        return inspect(options).facts
    except ValueError:
        return "not here"


def _decodes(sampler: type[Sampler], facts: ModelFacts | str) -> bool:
    if isinstance(facts, str):
        return False
    try:
        sampler.check(facts)
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
