"""A run's folder: status, rows as they finish, atomic files, and who may write.

``samples.jsonl`` is the source of truth. A process that decodes first claims the folder (``RunFolder(path).claim()``);
``RunFolder(path)`` alone reads, or appends the rows of one rank of a run that its parent has claimed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import IO, Any

from pipeline.errors import UserError

STATES = ("running", "done", "failed", "interrupted", "preempted")
PACKAGES = ("blockdiff", "torch", "transformers", "lightning", "hydra-core", "omegaconf", "numpy", "wandb")
BEAT_SECONDS = 5.0  # the heartbeat is written at most this often
SILENT_SECONDS = 120.0  # a run on another host counts as alive until it has been silent for so long


class RunFolder:
    """One folder under ``outputs/``; see the module's first lines for the two ways to use it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: IO[bytes] | None = None
        self._facts: dict[str, Any] = {}
        self._mended: set[Path] = set()
        self._last_beat = 0.0

    def __reduce__(self) -> tuple[type[RunFolder], tuple[Path]]:
        return RunFolder, (self.path,)  # what another process unpickles has no claim

    def claim(self, **facts: Any) -> RunFolder:
        """Make the folder, become its only writer, gather what earlier tries left, write status ``running``.

        ``facts`` (``expected=200``) stay in every later status of this claim, which ends with the process or with any
        other state. Raises ``UserError`` while another process writes here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock, status = _try_lock(self.path / ".lock"), self.status()
        if lock is None or (status and _busy(status)):
            holder = f"process {status['pid']} on {status['host']}" if status else "another process"
            raise UserError(f"{self.path} is being written by {holder}: wait for it, or give this run another name")
        self._lock, self._facts = lock, facts
        self.merge_ranks()
        self.write_status("running")
        return self

    def write_status(self, state: str, **extra: Any) -> None:
        """Replace status.json; any state but ``running`` also gives the claim back."""
        assert state in STATES, state
        process = {"pid": os.getpid(), "pid_birth": _birth(os.getpid()), "host": socket.gethostname()}
        heartbeat = datetime.now().astimezone().isoformat(timespec="seconds")
        job = {"job_id": os.environ.get("SLURM_JOB_ID"), "heartbeat": heartbeat}
        self.write_json("status.json", {"state": state, **process, **job, **self._facts, **extra})
        if state != "running" and self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_failure(self, error: BaseException, **extra: Any) -> None:
        """Status ``failed`` with ``error`` (one line: type and message) and the whole ``traceback``."""
        line = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        self.write_status("failed", error=line, traceback="".join(traceback.format_exception(error)), **extra)

    def status(self) -> dict[str, Any] | None:
        """status.json (None without one) plus ``age``, the seconds since the last heartbeat.

        A run that says ``running`` but whose process on this host is gone reads ``dead``.
        """
        path = self.path / "status.json"
        try:
            status, beat = json.loads(path.read_text("utf-8")), path.stat().st_mtime
        except FileNotFoundError:
            return None
        status["age"] = max(0.0, time.time() - beat)
        if status["state"] == "running" and status["host"] == socket.gethostname() and not _alive(status):
            status["state"] = "dead"
        return status

    def beat(self) -> None:
        """Say that the run is alive (the time stamp of status.json); cheap enough for every tick."""
        if time.monotonic() - self._last_beat > BEAT_SECONDS:
            self._last_beat = time.monotonic()
            with suppress(FileNotFoundError):
                os.utime(self.path / "status.json")

    def append(self, row: dict[str, Any], rank: int = 0) -> None:
        """Add one finished row in one write; a line that a crash tore is cut off first."""
        path = self.path / ("samples.jsonl" if rank == 0 else f"samples.rank{rank}.jsonl")
        if path not in self._mended:
            _mend(path)
            self._mended.add(path)
        with path.open("ab", buffering=0) as file:
            file.write(_line(row))
        self.beat()

    def rows(self) -> list[dict[str, Any]]:
        """The newest row of each (id, sample) over all ranks, in dataset order; a torn last line is left out."""
        newest = {(row["id"], row.get("sample", 0)): row for path in self._row_files() for row in _read_rows(path)}
        return sorted(newest.values(), key=lambda row: (row.get("index", 0), row.get("sample", 0)))

    def merge_ranks(self) -> None:
        """Leave one samples.jsonl, each (id, sample) once, in dataset order; atomic, and nothing to do twice."""
        files = self._row_files()
        if not files:
            return
        merged, target = b"".join(_line(row) for row in self.rows()), self.path / "samples.jsonl"
        if not target.exists() or target.read_bytes() != merged:
            _replace(target, merged)
        for path in files:
            if path != target:
                path.unlink()

    def write_json(self, name: str, data: Any) -> None:
        """Write a file whole or not at all; numbers that are not finite become null."""
        text = json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        _replace(self.path / name, text.encode("utf-8", "backslashreplace"))

    def read_json(self, name: str) -> Any:
        """The content of a file of the folder, None when there is none."""
        path = self.path / name
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def _row_files(self) -> list[Path]:
        first = self.path / "samples.jsonl"
        ranks = sorted(self.path.glob("samples.rank*.jsonl"), key=lambda path: int(re.sub(r"\D", "", path.name)))
        return [first, *ranks] if first.exists() else ranks


def settings_hash(settings: Any) -> str:
    """Ten hex digits for plain settings: sorted JSON, floats to 9 significant digits (0.7000000000000001 is 0.7)."""
    text = json.dumps(_plain(settings, lambda x: float(f"{x:.9g}")), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def folder_name(model: str, sampler: str, dataset: str, hash: str) -> str:
    """``<model>-<sampler>-<dataset>-<hash>`` with every sign that a folder or a shell could trip over made ``_``."""
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in (model, sampler, dataset, hash))


def unique_folder(root: Path | str, model: str, sampler: str, dataset: str, hash: str) -> Path:
    """Make ``<root>/<date>/<time>-<model>-<sampler>-<dataset>-<hash>``, ``-2`` … behind it when that is taken."""
    now = datetime.now()
    day = Path(root) / f"{now:%Y-%m-%d}"
    day.mkdir(parents=True, exist_ok=True)
    name, number = f"{now:%H-%M-%S}-{folder_name(model, sampler, dataset, hash)}", 1
    while True:
        folder = day / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # exclusive: of two launches in one second one fails here and takes the next name
            return folder
        except FileExistsError:
            number += 1


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Run folders (those with a status.json) that the names or globs mean, each once, in the order given.

    A folder that is no run stands for the runs one or two levels below it (a sweep, a day, outputs).
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for hit in [pattern] if Path(pattern).exists() else sorted(glob(os.path.expanduser(pattern))):
            found |= dict.fromkeys(_runs_in(Path(hit)))
    return list(found)


def environment(command: list[str]) -> dict[str, Any]:
    """What environment.json holds: versions, the checkout's commit and changes, the machine, the command to rerun.

    ``command`` is an argument list (``["python", "-m", "pipeline", *overrides]``); it is stored quoted for a shell.
    Nothing heavy is imported: the GPU's name is known only where torch already is.
    """
    root = Path(__file__).resolve().parents[1]
    checkout = _git(root, "rev-parse", "--show-toplevel") == str(root)  # an installed copy may lie in a foreign one
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {
        "command": shlex.join(command),
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
        "git_commit": _git(root, "rev-parse", "--verify", "HEAD") if checkout else None,
        "git_diff": _git(root, "diff", "HEAD") if checkout else None,
        "git_untracked": _git(root, "ls-files", "--others", "--exclude-standard") if checkout else None,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "gpu": gpu,
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode("utf-8", "replace").strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runs_in(folder: Path) -> list[Path]:
    for depth in ("", "*/", "*/*/"):
        if found := sorted(path.parent for path in folder.glob(f"{depth}status.json")):
            return found
    return []


def _plain(value: Any, number: Callable[[float], float] = float) -> Any:
    """Plain JSON data: floats through ``number``, null for those that are not finite, text for paths."""
    if isinstance(value, float):
        return number(value) + 0.0 if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item, number) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, number) for item in value]
    return str(value) if isinstance(value, Path) else value


def _line(row: dict[str, Any]) -> bytes:
    text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # half a surrogate pair becomes its \u escape: still JSON


def _read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number} is not JSON: delete the line and repeat the run") from error
    return rows


def _mend(path: Path) -> None:
    """Make the file end with a whole line: cut a torn one, or close one that only lacks its line break."""
    data = path.read_bytes() if path.exists() else b""
    tail = data.rpartition(b"\n")[2]
    if not tail:
        return
    try:
        json.loads(tail)
        with path.open("ab") as file:
            file.write(b"\n")
    except ValueError:
        os.truncate(path, len(data) - len(tail))


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _try_lock(path: Path) -> IO[bytes] | None:
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


def _busy(status: dict[str, Any]) -> bool:
    """Whether somebody else still runs; on another host only the heartbeat can tell."""
    if status["state"] != "running":
        return False
    here = status["host"] == socket.gethostname()
    return status["pid"] != os.getpid() if here else status["age"] < SILENT_SECONDS


def _alive(status: dict[str, Any]) -> bool:
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    born = _birth(status["pid"])
    return born is None or status.get("pid_birth") in (None, born)


def _birth(pid: int) -> str | None:
    """When a process started, in clock ticks (Linux, else None), so that a reused process id is not taken for it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "zombie" if state == "Z" else fields[18]
