"""``python -m pipeline.status <folder or glob …>``: how far each run is, and why those that failed did."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import UserError
from pipeline.runs import RunFolder, find_runs

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"running": "cyan", "done": "green", "preempted": "yellow", "interrupted": "yellow"}  # others: red


def describe(folder: Path) -> tuple[str, str, str, str]:
    """State, rows ``n/N``, age of the last heartbeat, and the last line of the error, of one run folder."""
    try:
        run = RunFolder(folder)
        status = run.status() or {"state": "unknown", "age": 0.0, "error": f"{folder} has no status.json any more"}
        rows = len(run.rows())
    except (UserError, ValueError) as error:
        return "unreadable", "", "", str(error)
    lines = str(status.get("error") or status.get("traceback") or "").strip().splitlines()
    expected = "?" if status.get("expected") is None else status["expected"]
    return status["state"], f"{rows}/{expected}", f"{age(status['age'])} ago", "".join(lines[-1:])


def age(seconds: float) -> str:
    """``41 s``, ``12 min``, ``5 h``, ``3 d``."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def console() -> Console:
    """The terminal's; into a file or a pipe wide, so that lines can be searched."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 when nothing matches or a run cannot be read (all are shown)."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.status", description=__doc__.partition(": ")[2])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, sweep folder or glob (outputs for all)")
    patterns = parser.parse_args(arguments).runs
    folders = find_runs(patterns, nested=True)
    if not folders:
        print(f"error: no run matches {' '.join(patterns)}", file=sys.stderr)
        return 2
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "state", "rows", "heartbeat", "error")
    described = [(folder, *describe(folder)) for folder in folders]
    for folder, state, rows, beat, error in described:
        table.add_row(Text(str(folder)), Text(state, COLOURS.get(state, "red")), rows, beat, Text(error))
    console().print(table)
    damages = [error for _, state, _, _, error in described if state in ("unknown", "unreadable")]
    for damage in damages:
        print(f"error: {damage}", file=sys.stderr)
    return 2 if damages else 0


if __name__ == "__main__":
    sys.exit(main())
