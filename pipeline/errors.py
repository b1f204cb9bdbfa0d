"""The one kind of error that is the user's to mend, and errors in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from yaml import MarkedYAMLError


class UserError(ValueError):
    """Bad input, told in one sentence: the key, its value and what would be right. Shown without a traceback."""


class NothingDecodedError(Exception):
    """Every sample of a run failed: no evaluation took place. Its one sentence says how many, and the first error."""


def one_line(error: BaseException) -> str:
    """Type and message in one line; of our own errors the message only, of one that a process passed on its last line.

    Notes (`BaseException.add_note`) are left out.
    """
    if isinstance(error, (UserError, NothingDecodedError)):
        return str(error)
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    lines = [line for line in lines if line not in getattr(error, "__notes__", ())]
    return lines[-1] if type(error).__name__ == "ProcessRaisedException" else lines[0]


def in_words(told: str) -> str:
    """What OmegaConf says of a value of another type, as what would be right; anything else as it is."""
    kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "bool": "true or false"}
    if found := re.search(r"Value '(.*?)'.* could not be converted to (Integer|Float)", told):
        return f"{found[1]!r} is not {kinds[found[2]]}"
    if found := re.search(r"Value '(.*?)' is not a valid (bool)", told):
        return f"{found[1]!r} is not {kinds[found[2]]}"
    if found := re.search(r"(?:Incompatible value|field) '?None'?.*not Optional", told):
        return "null is no value that it takes"
    return told


def in_yaml(error: Exception, config_dir: str | None) -> str | None:
    """An error in a YAML file in one sentence that names file and line; None if it is in none.

    Args:
        error: of PyYAML, or of Hydra while it composes.
        config_dir: the user's folder of options.
    """
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name} line {mark.line + 1}" if mark else "a YAML file"
        return f"{where} is no valid YAML: {error.problem or error.context}"
    found = re.search(r"In '([\w/.-]+)': \w+ raised while composing config:\n(.+)", str(error))
    if not found:
        return None
    file, said = _option_file(found[1], config_dir), found[2].strip()
    key = re.search(r"full_key: (\S+)", str(error))
    if key is None:
        return f"{file}: {said}"
    last = re.sub(r"\[\d+\]$", "", key[1]).rpartition(".")[2]
    return f"{file}{_line_of(last, file)}: {said} ({key[1]})"


def _option_file(name: str, config_dir: str | None) -> Path:
    """Where an option lies: in the user's folder, which Hydra looks into too, or among those that ship."""
    own = Path(config_dir or "") / f"{name}.yaml"
    return own if config_dir and own.is_file() else Path("conf") / f"{name}.yaml"


def _line_of(key: str, file: Path) -> str:
    if not file.is_file():
        return ""
    lines = file.read_text(errors="replace").splitlines()
    number = next(
        (i for i, line in enumerate(lines, 1) if re.match(rf"\s*['\"]?{re.escape(key)}['\"]?\s*:", line)), None
    )
    return f" line {number}" if number else ""
