"""Configurations without a command line: for the tools and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

import conf
from pipeline import config


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """The configuration that ``python -m pipeline <overrides>`` would run.

    Args:
        config_dir: a folder of further options, as ``--config-dir`` on the command line.
    """
    config.register()
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra_compose("config", [*overrides, *extra])


def conf_folder() -> Path:
    """Where the options that ship with the package are."""
    return Path(next(iter(conf.__path__))).resolve()


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Names of a group's options, a user's included."""
    folders = [conf_folder(), *([Path(config_dir)] if config_dir else [])]
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def first_comment(group: str, name: str, config_dir: str | None = None) -> str:
    """What an option's YAML says of itself in its first line."""
    for folder in [*([Path(config_dir)] if config_dir else []), conf_folder()]:
        file = folder / group / f"{name}.yaml"
        if file.is_file():
            line = file.read_text().partition("\n")[0]
            return line.removeprefix("#").strip() if line.startswith("#") else ""
    return ""
