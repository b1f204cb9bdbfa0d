"""``python -m pipeline.list``: models, samplers and datasets, one line each, and which of them go together."""

from __future__ import annotations

from rich.table import Table

from pipeline.errors import UserError
from samplers import ModelFacts, Sampler

GROUPS = ("model", "sampler", "dataset")


def print_options() -> None:
    """Every option of the three axes with what its YAML says of itself."""
    from pipeline.compose import first_comment, options
    from pipeline.table import console

    for group in GROUPS:
        table = Table(title=f"{group}=", title_justify="left", show_header=False, box=None, pad_edge=False)
        for name in options(group):
            table.add_row(name, first_comment(group, name))
        console().print(table)
        console().print()


def print_combinations() -> None:
    """Which sampler decodes which model; a model that is not on this machine can't be judged and says so."""
    from pipeline.compose import options
    from pipeline.table import console

    table = Table(title="which sampler decodes which model", title_justify="left")
    samplers = options("sampler")
    for name in ("model", *samplers):
        table.add_column(name)
    for model in options("model"):
        facts = _facts(model)
        table.add_row(model, *(_verdict(_sampler(name), facts) for name in samplers))
    console().print(table)


def _facts(model: str) -> ModelFacts | str:
    from pipeline.compose import compose
    from pipeline.config import plain
    from pipeline.job import describe_model

    try:
        return describe_model(plain(compose([f"model={model}"]))["model"]).facts
    except UserError:
        return "not on this machine"


def _sampler(name: str) -> type[Sampler]:
    from pipeline.compose import compose
    from pipeline.settings import sampler_class

    return sampler_class(compose([f"sampler={name}"]).sampler._target_)


def _verdict(sampler: type[Sampler], facts: ModelFacts | str) -> str:
    if isinstance(facts, str):
        return facts
    try:
        sampler.check(facts)
    except ValueError:
        return "no"
    return "yes"


def main() -> None:
    import argparse
    import os

    from pipeline.cli import guarded

    argparse.ArgumentParser(prog="python -m pipeline.list", description=__doc__).parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a list must not download anything

    def both() -> None:
        print_options()
        print_combinations()

    guarded(both)


if __name__ == "__main__":
    main()
