"""Helpers of all tests: small models, one way to run the command line, no network and no W&B login."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.closing_tables import CASE, DIFFERENCE, differences, golden, told

ROOT = Path(__file__).resolve().parents[1]
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in ("COLUMNS", "LINES"):  # pytest-xdist's workers have a terminal of 80 columns in them
        monkeypatch.delenv(name, raising=False)


class CommandLine:
    """Runs ``python -m pipeline…`` in a folder of its own and reads what it leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *arguments: str, module: str = "pipeline", code: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), **(env or {})}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
        return done

    def rows(self, run: str) -> list[dict]:
        lines = (self.folder / "outputs" / run / "samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def summary(self, run: str) -> dict:
        return json.loads((self.folder / "outputs" / run / "summary.json").read_text())

    def status(self, run: str) -> dict:
        return json.loads((self.folder / "outputs" / run / "status.json").read_text())


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


Runner = Callable[..., subprocess.CompletedProcess[str]]


# ---- tables at the end of a run: numbers travel in the tests' reports, which other processes hand over ---------------


@pytest.fixture
def record_difference(request: pytest.FixtureRequest) -> Callable[[str, str, float], None]:
    """Note how far a tensor of a family is from what it should be; the largest of each is printed at the end."""

    def record(family: str, name: str, difference: float) -> None:
        request.node.user_properties.append((DIFFERENCE, (family, name, difference)))

    return record


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Note what became of a golden case; all of them make a table at the end."""
    return lambda entry: request.node.user_properties.append((CASE, entry))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    for title, lines in (
        ("largest difference to the authors' tensors (float32, CPU)", differences(told(reports, DIFFERENCE))),
        ("golden cases: equal to the authors' code", golden(told(reports, CASE))),
    ):
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
