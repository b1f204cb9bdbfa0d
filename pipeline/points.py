"""``points.csv`` of a sweep: one row a finished job, with every option and figure."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def write_points(sweep: Path) -> Path:
    """Collect the summaries below a sweep's folder; a figure that does not exist is an empty cell."""
    rows = [_flat(json.loads(file.read_text())) for file in sorted(sweep.glob("*/summary.json"))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    path = sweep / "points.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    """Labels and figures as they are, a setting as ``sampler.<name>``."""
    flat = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    return flat | {f"sampler.{name}": entry["value"] for name, entry in summary["settings"].items()}
