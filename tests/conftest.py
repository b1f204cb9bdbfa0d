"""Helpers of all tests: small models, one way to run the command line, no network and no W&B login."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


# ---- a table of differences at the end of a run ----------------------------------------------------------------------

DIFFERENCES = pytest.StashKey[dict[tuple[str, str], float]]()


@pytest.fixture
def record_difference(request: pytest.FixtureRequest) -> Callable[[str, str, float], None]:
    """Note how far a tensor of a family is from what it should be; the largest of each is printed at the end."""
    noted = request.config.stash.setdefault(DIFFERENCES, {})

    def record(family: str, name: str, difference: float) -> None:
        noted[family, name] = max(difference, noted.get((family, name), 0.0))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    noted = config.stash.get(DIFFERENCES, {})
    if not noted:
        return
    terminalreporter.section("largest difference to the authors' tensors (float32, CPU)")
    for family in dict.fromkeys(family for family, _ in noted):
        worst, name = max((difference, name) for (of, name), difference in noted.items() if of == family)
        checked = sum(of == family for of, _ in noted)
        terminalreporter.write_line(f"{family:<16} {worst:.2e}  ({name}; {checked} tensors)")
