"""Configurations without a command line: for the tools and for notebooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pipeline import config
from pipeline.errors import UserError
from pipeline.own import conf_folder, own_first


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """The configuration that ``python -m pipeline <overrides>`` would run.

    Args:
        config_dir: a folder of further options, as ``--config-dir`` on the command line.

    Raises:
        UserError: if that is no folder.
    """
    config.register()
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir} is no folder")
    GlobalHydra.instance().clear()
    with own_first(config_dir), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra_compose("config", list(overrides))


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Names of a group's options, a user's included."""
    folders = [conf_folder(), *([Path(config_dir)] if config_dir else [])]
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def first_comment(group: str, name: str, config_dir: str | None = None) -> str:
    """What an option's YAML says of itself in the first sentence of the comment it begins with."""
    for folder in [*([Path(config_dir)] if config_dir else []), conf_folder()]:
        file = folder / group / f"{name}.yaml"
        if file.is_file():
            lines = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
            said = " ".join(line.removeprefix("#").strip() for line in lines)
            return re.split(r"(?<=[^.]\.)(?<!\be\.g\.)(?<!\bi\.e\.) ", said, maxsplit=1)[0]
    return ""
