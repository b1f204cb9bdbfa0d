"""Files that survive a crash: written whole or not at all, rows a line, and one sentence for what the disk refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pipeline.errors import UserError

REASONS = {
    errno.EEXIST: "a file of that name exists",
    errno.ENOTDIR: "a part of it is a file, not a folder",
    errno.ENOENT: "no folder can be made there",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "its name is too long",
}
ADVICE = {
    "written": "choose another run, sweep or output_root",
    "read": "make it a readable file, or choose another run",
}


@contextmanager
def refusing(path: Path, verb: str = "written") -> Iterator[None]:
    """What the file system refuses, as a ``UserError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = REASONS.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"{path} cannot be {verb}: {reason}: {ADVICE[verb]}") from error


def plain_json(value: Any, number: Callable[[float], float] = float) -> Any:
    """Plain JSON data: floats through ``number``, null for those that are not finite, text for paths."""
    if isinstance(value, float):
        return number(value) + 0.0 if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain_json(item, number) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, number) for item in value]
    return str(value) if isinstance(value, Path) else value


def encoded(row: dict[str, Any]) -> bytes:
    """A row as one line."""
    text = json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # half a surrogate pair becomes its \u escape: still JSON


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a torn last line is left out.

    Raises:
        UserError: for a line that is no row, by its number, or a file that cannot be read.
    """
    with refusing(path, "read"):
        lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [parsed(line)] if line.strip() else []
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} {error}: delete the line and repeat the run") from error
    return rows


def parsed(line: bytes) -> dict[str, Any]:
    """A line's row; ``ValueError`` for what this module would not have written."""
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError("is not JSON") from None
    places = (row.get("index", 0), row.get("sample", 0)) if isinstance(row, dict) else (None,)
    if not all(isinstance(place, int) for place in places) or not isinstance(row.get("id"), str):
        raise ValueError("is no row (an object with id, index and sample)")
    return row


def mend(path: Path) -> None:
    """Make the file end with a whole line: cut a torn one, or close one that only lacks its line break."""
    data = path.read_bytes() if path.exists() else b""
    tail = data.rpartition(b"\n")[2]
    if not tail:
        return
    try:
        parsed(tail)
    except ValueError:
        os.truncate(path, len(data) - len(tail))
        return
    with path.open("ab") as file:
        file.write(b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file at one stroke: whoever reads it sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def try_lock(path: Path) -> IO[bytes] | None:
    """The locked file, or None when another process (or another claim of this one) holds it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass  # a file system without locks: the process id in status.json is all there is
    return file
