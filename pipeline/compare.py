"""``python -m pipeline.compare A B …``: finished runs side by side, each against the first, on shared samples."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.runs import RunFolder, find_runs
from pipeline.statistics import mcnemar_p, paired_interval
from pipeline.status import console

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
Pair = tuple[Row, Row]  # the first run's row and the other's, of one (id, sample)

# what must agree for which figure to be comparable
DIFFERENCES = {
    "protocol_hash": "the questions are put differently, so accuracies differ for that too",
    "scorer": "answers are judged by different rules",
    "hardware_key": "don't compare tokens per second",
    "gen_length": "the canvases have different lengths",
}


# what a comparison reads of a row, besides its id; each may be null
READ: dict[str, tuple[type, ...]] = {"correct": (bool,), "gold": (str,), "tokens": (int,), "nfe": (int,)}


@dataclass(frozen=True)
class Run:
    """A run as read from its folder; ``rows`` by (id, sample)."""

    name: str
    summary: dict[str, Any]
    rows: dict[tuple[str, int], Row]

    @property
    def gen_length(self) -> int | None:
        """The summary's, else the longest canvas."""
        canvases = [row["canvas"] for row in self.rows.values() if isinstance(row.get("canvas"), int)]
        return self.summary.get("gen_length") or max(canvases, default=None)

    def fact(self, name: str) -> Any:
        """What a run says of itself under one of the names of ``DIFFERENCES``."""
        return self.gen_length if name == "gen_length" else self.summary.get(name)


def load(folder: Path, name: str) -> Run:
    """Read a run; ``UserError`` for a folder that holds no run, has not got as far as a summary, or is damaged."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a folder: give folders of finished runs, such as outputs/<run>")
    run = RunFolder(folder)
    summary, rows = run.read_json("summary.json"), run.rows()
    for file, found in (("samples.jsonl", rows), ("summary.json", summary)):
        if not found:
            raise UserError(
                f"{folder} has no {file}: give the folder of a finished run, or repeat its command to finish"
            )
    for row in rows:
        _refuse_damaged(row, folder / "samples.jsonl")
    return Run(name, summary, {(row["id"], row.get("sample", 0)): row for row in rows})


def _refuse_damaged(row: Row, file: Path) -> None:
    for name, kinds in READ.items():
        if not isinstance(row.get(name, ...), (*kinds, type(None))):
            fault = f"{name}={row[name]!r}" if name in row else f"no {name}"
            raise UserError(f"{file}: the row of {row['id']} has {fault}: delete its line and repeat the run")


def load_all(patterns: Sequence[str]) -> list[Run]:
    """The runs that folders, sweep folders or globs mean, in the order given; ``UserError`` for fewer than two."""
    folders = [folder for pattern in patterns for folder in find_runs([pattern]) or [Path(pattern)]]
    if len(folders) < 2:
        raise UserError(f"compare needs at least two runs, {' '.join(patterns)} means {len(folders)}")
    twice = Counter(folder.resolve().name for folder in folders)
    names = [folder.resolve().name if twice[folder.resolve().name] == 1 else str(folder) for folder in folders]
    return [load(folder, name) for folder, name in zip(folders, names, strict=True)]


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """All figures and warnings as plain data: ``runs`` (one mapping a run, the first is the base) and ``warnings``."""
    return {"runs": [_figures(runs[0], run) for run in runs], "warnings": _warnings(runs)}


def _figures(first: Run, run: Run) -> dict[str, Any]:
    pairs = _pairs(first, run)
    own = ("accuracy", "accuracy_low", "accuracy_high", "nfe_mean", "tokens_per_forward", "samples", "samples_expected")
    figures = {"run": run.name, **{name: run.summary.get(name) for name in own}, "common": len(pairs)}
    if run is first:
        return figures
    return {**figures, **_accuracy_difference(pairs), "tokens_per_forward_ratio": _forward_ratio(pairs)}


def _pairs(first: Run, run: Run) -> list[Pair]:
    return [(first.rows[key], run.rows[key]) for key in first.rows if key in run.rows]


def _accuracy_difference(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """Run minus first over the common ids (repeats of an id are averaged first); McNemar's p where none is repeated."""
    scored = [(a, b) for a, b in pairs if a["correct"] is not None and b["correct"] is not None]
    by_id: dict[str, list[int]] = {}
    for a, b in scored:
        by_id.setdefault(a["id"], []).append(b["correct"] - a["correct"])
    means = [sum(values) / len(values) for values in by_id.values()]
    low, high = paired_interval(means) or (None, None)
    lost, won = (sum(values == [sign] for values in by_id.values()) for sign in (-1, 1))
    return {
        "difference": sum(means) / len(means) if means else None,
        "difference_low": low,
        "difference_high": high,
        "mcnemar_p": mcnemar_p(lost, won) if means and len(by_id) == len(scored) else None,
    }


def _forward_ratio(pairs: Sequence[Pair]) -> float | None:
    """Tokens per forward of the run over that of the first, on the samples that both decoded."""
    both = [pair for pair in pairs if all(row["nfe"] and row["tokens"] is not None for row in pair)]
    tokens_a, nfe_a, tokens_b, nfe_b = (
        sum(pair[i][name] for pair in both) for i in (0, 1) for name in ("tokens", "nfe")
    )
    return (tokens_b / nfe_b) / (tokens_a / nfe_a) if tokens_a else None


def _warnings(runs: Sequence[Run]) -> list[str]:
    first = runs[0]
    lines = []
    for fact, consequence in DIFFERENCES.items():
        if len({str(run.fact(fact)) for run in runs}) > 1:
            values = ", ".join(f"{run.name}: {run.fact(fact)}" for run in runs)
            lines.append(f"{fact} differs ({values}): {consequence}")
    lines += [line for run in runs[1:] for line in _overlap(first, run)]
    for run in runs:
        if not run.summary.get("complete"):
            done, expected = len(run.rows), run.summary.get("samples_expected")
            lines.append(f"{run.name} is incomplete ({done} of {expected} samples): repeat its command to finish it")
    return lines


def _overlap(first: Run, run: Run) -> list[str]:
    pairs = _pairs(first, run)
    if not pairs:
        return [f"{run.name} shares no sample with {first.name}: there is no difference to give"]
    lines = []
    if not len(pairs) == len(first.rows) == len(run.rows):
        sizes = f"{len(first.rows)} and {len(run.rows)}"
        lines.append(f"{run.name} and {first.name} share {len(pairs)} samples of {sizes}: differences are over those")
    if other := sum(a["gold"] != b["gold"] for a, b in pairs):
        lines.append(f"{run.name}: {other} shared ids have another reference answer than in {first.name}")
    return lines


def _table(figures: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption="difference, p and ratio: against the first run, on shared samples; intervals are 95 %")
    table.add_column("run", overflow="fold")
    for title in ("accuracy", "difference", "McNemar p", "forwards", "tokens/forward", "ratio"):
        table.add_column(title, justify="right")
    for run in figures:
        table.add_row(
            Text(run["run"]),
            _with_interval(run, "accuracy", "accuracy", "{:.3f}"),
            _with_interval(run, "difference", "difference", "{:+.3f}"),
            _number(run.get("mcnemar_p"), "{:.2g}"),
            _number(run["nfe_mean"], "{:.1f}"),
            _number(run["tokens_per_forward"], "{:.2f}"),
            _number(run.get("tokens_per_forward_ratio"), "{:.2f}x"),
        )
    return table


def _with_interval(run: dict[str, Any], name: str, bounds: str, form: str) -> str:
    low, high = run.get(f"{bounds}_low"), run.get(f"{bounds}_high")
    value = _number(run.get(name), form)
    return value if low is None or high is None else f"{value} [{form.format(low)}, {form.format(high)}]"


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 for folders that cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.compare", description=__doc__.partition(": ")[2])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder, sweep folder or glob; the first is the base"
    )
    parser.add_argument("--json", action="store_true", help="print all figures and warnings as JSON")
    options = parser.parse_args(arguments)
    try:
        result = compare(load_all(options.runs))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    console().print(_table(result["runs"]))
    for line in result["warnings"]:
        print(f"warning: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
