"""The bar a user watches: samples, accuracy and tokens per forward so far."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A Rich progress bar over samples; on a pipe or a further rank it stays silent."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self.total, self.right, self.tokens, self.forwards, self.done, self.scored = total, 0, 0, 0, 0, 0
        columns = (
            TextColumn("decoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = shown and sys.stderr.isatty()
        self.bar = RichProgress(*columns, console=Console(stderr=True), disable=not shown)

    def __enter__(self) -> Progress:
        self.bar.start()
        self.task = self.bar.add_task("decoding", total=self.total, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def add(self, row: dict[str, Any]) -> None:
        """Count a finished row."""
        self.done += 1
        self.scored += row["correct"] is not None
        self.right += bool(row["correct"])
        self.tokens += row["tokens"] or 0
        self.forwards += row["nfe"] or 0
        self.bar.update(self.task, completed=self.done, figures=self.figures())

    def figures(self) -> str:
        """Accuracy and tokens per forward so far, where there are any."""
        parts = []
        if self.scored:
            parts.append(f"accuracy {self.right / self.scored:.3f}")
        if self.forwards:
            parts.append(f"{self.tokens / self.forwards:.2f} tokens a forward")
        return "  ".join(parts)
