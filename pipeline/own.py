"""The user's folder of options before those that ship: of two YAMLs of one name the user's own is taken, and told."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

import conf
from pipeline.errors import UserError


def conf_folder() -> Path:
    """Where the options that ship with the package are."""
    return Path(next(iter(conf.__path__))).resolve()


class OwnOptions(SearchPathPlugin):
    """Has Hydra look into a folder of the user's first; by itself it takes ``--config-dir`` last."""

    folder: ClassVar[Path | None] = None
    untold: ClassVar[bool] = False  # whether a command has still to say what it replaces

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is None or not self.folder.is_dir():  # of one that is not there Hydra says so
            return
        search_path.prepend("own", f"file://{self.folder}", anchor="main")
        if OwnOptions.untold:
            OwnOptions.untold = False
            _tell(self.folder)


@contextmanager
def own_first(config_dir: str | None, told: bool = False) -> Iterator[None]:
    """Whatever is composed inside takes the options of ``config_dir`` first, and with ``told`` says which it replaces.

    Raises:
        UserError: for a folder with a file in the place of all options, or one that takes over itself.
    """
    before = OwnOptions.folder, OwnOptions.untold
    OwnOptions.folder = Path(config_dir).resolve() if config_dir else None
    OwnOptions.untold = told or OwnOptions.untold
    Plugins.instance().register(OwnOptions)
    try:
        _refuse_whole(OwnOptions.folder)
        if OwnOptions.folder:
            _refuse_endless(OwnOptions.folder)
        yield
    finally:
        OwnOptions.folder, OwnOptions.untold = before[0], before[1] and OwnOptions.untold


def replaced(folder: Path) -> list[Path]:
    """Files of a user's folder, relative to it, that take the place of one that ships."""
    files = [file.relative_to(folder) for file in sorted(folder.glob("*/**/*.yaml"))]
    return [file for file in files if (conf_folder() / file).is_file()] if folder != conf_folder() else []


def _refuse_endless(folder: Path) -> None:
    """Refuse a YAML whose defaults name itself, meaning the one it takes the place of: Hydra would read on and on."""
    for file in replaced(folder):
        text = (folder / file).read_text(errors="replace")
        if re.search(rf"^\s*-\s*['\"]?{re.escape(file.stem)}['\"]?\s*(#.*)?$", text, re.MULTILINE):
            raise UserError(
                f"{folder / file} takes over {file.stem}, which is now itself: give the file another name, such as "
                f"my_{file.name}"
            )


def _refuse_whole(folder: Path | None) -> None:
    whole = [file.name for file in conf_folder().glob("*.yaml") if folder and (folder / file.name).is_file()]
    if whole and folder != conf_folder():
        raise UserError(
            f"{folder}/{whole[0]} would take the place of all options: rename it, a folder of options holds one folder "
            "a group, such as sampler/mine.yaml"
        )


def _tell(folder: Path) -> None:
    from pipeline.overrides import short

    if taken := replaced(folder):
        which = ", ".join(short(str(folder / name)) for name in taken)
        one = len(taken) == 1
        print(f"note: {which} {'is' if one else 'are'} used, not what ships by that name", file=sys.stderr)
