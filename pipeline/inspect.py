"""``python -m pipeline.inspect model=llada2_mini``: what a model is and what it needs, without its weights.

``model.path=…`` looks at a folder, and at whether its tensors fit; ``experiment=…`` at the model of an experiment.
Without ``model=``: all models, one line each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pipeline.errors import UserError
from pipeline.inspection import OVERVIEW, describe, overview

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from adapters.facts import Inspection

WIDTH = 100


def inspect_model(cfg: DictConfig, overridden: Sequence[str] = ()) -> Inspection:
    """Look at the model of a configuration.

    Args:
        overridden: keys given on the command line.

    Raises:
        UserError: one sentence, if there is none or it is no model.
    """
    from adapters.facts import inspect
    from adapters.places import ModelOptions
    from pipeline.config import named, plain

    try:
        found = inspect(ModelOptions(**plain(named(cfg, overridden).model)))
        _refuse_what_a_run_would(found)
    except ValueError as error:
        raise UserError(str(error)) from error
    return found


def _refuse_what_a_run_would(found: Inspection) -> None:
    """Refuse weights that can't be read and what does not go with them; torch is loaded only for what needs it.

    Raises:
        ValueError: one sentence.
    """
    from adapters.checkpoints.files import lora_files
    from adapters.places import refuse_unreadable

    options, source = found.options, found.source
    if options.device_map not in (None, "auto"):
        from adapters.checkpoints import spread

        spread.check(options.device_map)
    folders = [part.source.folder for part in (found, found.drafter) if part and part.source.folder]
    shards = [shard for folder in folders for shard in folder.glob("*.safetensors")]
    for part in (*shards, *(lora_files(source.adapter) if source.adapter else [])):
        refuse_unreadable(part)
    if source.adapter:
        from adapters.checkpoints import lora

        lora.check(source.adapter)
    _ = found.fit  # a file that is not whole is told before all the rest
    if found.drafter:
        try:
            _ = found.drafter.fit
        except ValueError as error:
            raise ValueError(f"model.draft={options.draft}: {error}") from error


def print_model(cfg: DictConfig, choice: str, overridden: Sequence[str] = (), config_dir: str | None = None) -> None:
    """One model, on one screen.

    Raises:
        UserError: one sentence; also if its tensors do not fit, after all the rest was told.
    """
    found = inspect_model(_called(cfg, choice), overridden)
    about, *notes = _comments(choice, config_dir)
    elsewhere = bool({"model.path", "model.hub"} & set(overridden))  # then the YAML tells of another checkpoint
    table = Table(
        title=found.options.name if elsewhere else about,
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
        width=_width(),
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in describe(found, cfg, config_dir):
        table.add_row(label, text)
    if notes or elsewhere:
        table.add_row(f"of {choice}" if elsewhere else "notes", " ".join([*([about] if elsewhere else []), *notes]))
    _console().print(table)
    for part in (found, found.drafter):
        if part and part.fit and not part.fit.faultless:
            raise UserError(f"{part.source.folder} does not fit {part.sizes.architecture}: {part.fit.sentence()}")


def print_models(overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
    """All models that have a configuration, one line each; what differs by options is told of a single one."""
    table = Table(box=None, pad_edge=False)
    for name in OVERVIEW:
        table.add_column(name, no_wrap=True, justify="right" if name in ("parameters", "active", "block") else "left")
    for name, found in all_models(overrides, config_dir):
        table.add_row(*(overview(found) if not isinstance(found, UserError) else (name, "not here")))
    Console(width=None if Console().is_terminal else 140).print(table)


def all_models(
    overrides: Sequence[str] = (), config_dir: str | None = None
) -> Iterator[tuple[str, Inspection | UserError]]:
    """Every option of the axis ``model`` that is a checkpoint, or why it can't be looked at."""
    from pipeline.compose import compose, options

    for name in options("model", config_dir):
        cfg = compose([f"model={name}", *overrides], config_dir)
        if cfg.model.kind == "checkpoint":
            try:
                yield name, inspect_model(_called(cfg, name))
            except UserError as error:
                yield name, error


def _called(cfg: DictConfig, choice: str) -> DictConfig:
    """With the option's name for a model that has neither a name nor a place to take one from."""
    from omegaconf import OmegaConf

    model = cfg.model
    if model.name or model.path or model.hub or model.kind != "checkpoint":
        return cfg
    return OmegaConf.merge(cfg, {"model": {"name": choice}})  # type: ignore[return-value]


def _comments(choice: str, config_dir: str | None) -> list[str]:
    """What an option's YAML says of itself, in the comment it begins with."""
    from pipeline.compose import conf_folder

    folders = [*([Path(config_dir)] if config_dir else []), conf_folder()]
    files = [folder / "model" / f"{choice}.yaml" for folder in folders]
    said = []
    for line in next(file for file in files if file.is_file()).read_text().splitlines():
        if not line.startswith("#"):
            break
        said.append(line.removeprefix("#").strip())
    return said or [choice]


def _console() -> Console:
    return Console(width=_width(), markup=False, highlight=False)


def _width() -> int:
    """`WIDTH`, or what a narrower terminal or ``COLUMNS`` has."""
    own = Console()
    return min(WIDTH, own.width) if own.is_terminal or os.environ.get("COLUMNS", "").isdigit() else WIDTH


def _look(cfg: DictConfig, overrides: list[str]) -> None:
    from hydra.core.hydra_config import HydraConfig

    from pipeline.overrides import config_dir, keys

    given, folder = keys(overrides), config_dir()
    if any(key in ("model", "experiment") or key.startswith("model.") for key in given):
        print_model(cfg, HydraConfig.get().runtime.choices["model"], given, folder)
    elif given:
        raise UserError(
            f"{overrides[0]} tells nothing of a model: add model=… or experiment=…, or leave it out to list all models"
        )
    else:
        print_models(config_dir=folder)


def main() -> None:
    from pipeline.cli import looking

    looking(_look)


if __name__ == "__main__":
    main()
