"""The command line inside this process, a user's own sampler, and commands that get a signal while they run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.conftest import OFFLINE, ROOT

MINE = '''
from __future__ import annotations
import time
from dataclasses import dataclass
from typing import ClassVar
from samplers import BlockDiffusionSampler, DecodeState, Prediction

@dataclass(frozen=True, kw_only=True)
class Mine(BlockDiffusionSampler):
    """Commits the next ``greed`` slots; slow or broken at will."""

    method_name: ClassVar[str] = "mine"
    greed: int = 1
    delay: float = 0.0
    explode: bool = False

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        time.sleep(self.delay)
        if self.explode:
            raise RuntimeError("boom")
        for i in [i for i in prediction.positions if state.mask[i]][: self.greed]:
            state.commit(i, prediction.token[i], prediction.confidence[i])
'''
MINE_YAML = "# A rule of my own.\n_target_: mine.Mine\nname: mine\ngreed: 2\ndelay: 0.0\nexplode: false\n"
MY_SAMPLER = ("--config-dir", "my", "model=toy", "sampler=mine")


def write_my_sampler(folder: Path) -> None:
    """One Python file in the current folder and one YAML in a folder of options: all that a user writes."""
    (folder / "my" / "sampler").mkdir(parents=True)
    (folder / "mine.py").write_text(MINE)
    (folder / "my" / "sampler" / "mine.yaml").write_text(MINE_YAML)


class Here:
    """Runs ``python -m pipeline…`` in this process, with a folder as the current one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, module: str = "pipeline", code: int = 0) -> tuple[str, str]:
        """What it printed on stdout and stderr; its exit code must be ``code``."""
        out, err, left = io.StringIO(), io.StringIO(), 0
        with _at_home(self.folder, [module, *arguments]), redirect_stdout(out), redirect_stderr(err):
            try:
                left = _entry(module)() or 0
            except SystemExit as exit:
                left = exit.code if isinstance(exit.code, int) else 1
        assert left == code, f"exit code {left}, not {code}\n{out.getvalue()}\n{err.getvalue()}"
        return out.getvalue(), err.getvalue()

    def run(self, name: str) -> Run:
        return Run(self.folder / "outputs" / name)

    def sweep(self, name: str) -> list[Run]:
        return [Run(path.parent) for path in sorted((self.folder / "outputs" / name).glob("*/status.json"))]


class Run:
    """A run folder, read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "samples.jsonl").read_text().splitlines()]

    @property
    def timeless(self) -> list[dict]:
        """Rows without what may differ between two runs of the same."""
        return [{key: value for key, value in row.items() if key != "seconds"} for row in self.rows]

    def __getattr__(self, name: str) -> Any:
        """``status``, ``summary``, ``environment``: the JSON file of that name."""
        if name.startswith("_"):
            raise AttributeError(name)
        return json.loads((self.path / f"{name}.json").read_text())


class Process:
    """A command in a process of its own, in a session of its own, so that it can get signals."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), **(env or {})}
        command = [sys.executable, "-m", "pipeline", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def wait_for(self, what: Any, seconds: float = 120) -> Process:
        deadline = time.monotonic() + seconds
        while not what():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended or too slow: {self.finish(signal.SIGKILL)}")
            time.sleep(0.02)
        return self

    def finish(self, signum: int, group: bool = False) -> tuple[int, str, str]:
        """Send a signal, to its whole group as a terminal would, and wait: exit code, stdout, stderr."""
        send = os.killpg if group else os.kill
        if self.process.poll() is None:
            send(self.process.pid, signum)
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, out, err


def lines(*patterns: Path) -> int:
    """Lines in the files so far."""
    return sum(file.read_bytes().count(b"\n") for pattern in patterns for file in pattern.parent.glob(pattern.name))


def _entry(module: str) -> Any:
    import importlib

    import pipeline.cli

    return pipeline.cli.run if module == "pipeline" else importlib.import_module(module).main


@contextmanager
def _at_home(folder: Path, argv: list[str]) -> Iterator[None]:
    before = (Path.cwd(), list(sys.path), sys.argv)
    os.chdir(folder)
    sys.argv = argv
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.path[:], sys.argv = before[1], before[2]
        sys.modules.pop("mine", None)
