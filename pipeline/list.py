"""``python -m pipeline.list``: models, samplers and datasets, one line each, and which of them go together.

Overrides narrow the table down or fill in what is missing: ``model=llada model.path=…``, ``--config-dir my``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from pipeline.errors import UserError
from samplers import ModelFacts, Sampler

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
    """Which sampler decodes which model; a model that is not on this machine can't be judged and says so.

    Args:
        overrides: ``model=`` or ``sampler=`` leave only that row or column, others change what is judged.
    """
    from pipeline.table import console

    models, samplers = (_chosen(group, overrides, config_dir) for group in ("model", "sampler"))
    rest = [override for override in overrides if override.partition("=")[0] not in ("model", "sampler")]
    table = Table(title="which sampler decodes which model", title_justify="left")
    for name in ("model", *samplers):
        table.add_column(name)
    for model in models:
        facts = _facts([f"model={model}", *rest], config_dir)
        table.add_row(model, *(_verdict(_sampler(name, config_dir), facts) for name in samplers))
    console().print(table)


def _chosen(group: str, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    from pipeline.compose import options

    given = [override.partition("=")[2] for override in overrides if override.partition("=")[0] == group]
    return given or options(group, config_dir)


def _facts(overrides: list[str], config_dir: str | None) -> ModelFacts | str:
    from pipeline.compose import compose
    from pipeline.config import plain
    from pipeline.job import describe_model

    try:
        return describe_model(plain(compose(overrides, config_dir).model)).facts
    except UserError:
        return "not on this machine"


def _sampler(name: str, config_dir: str | None) -> type[Sampler]:
    from pipeline.compose import compose
    from pipeline.settings import sampler_class

    return sampler_class(compose([f"sampler={name}"], config_dir).sampler._target_)


def _verdict(sampler: type[Sampler], facts: ModelFacts | str) -> str:
    if isinstance(facts, str):
        return facts
    try:
        sampler.check(facts)
    except ValueError:
        return "no"
    return "yes"


def main() -> None:
    import os

    import hydra
    from hydra.core.hydra_config import HydraConfig

    from pipeline import config
    from pipeline.cli import Carried, guarded
    from pipeline.overrides import config_dir, raw
    from pipeline.sweep import register_launchers

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a list must not download anything
    config.register()
    register_launchers()

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def both(cfg: object) -> None:
        folder, overrides = config_dir(), raw(HydraConfig.get().overrides.task)
        try:
            print_options(folder)
            print_combinations(overrides, folder)
        except Exception as error:
            raise Carried from error

    guarded(both)


if __name__ == "__main__":
    main()
