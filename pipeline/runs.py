"""A run's folder: status, rows as they finish, atomic files, and who may write.

``samples.jsonl`` is the source of truth. A process that decodes first claims the folder (``RunFolder(path).claim()``);
``RunFolder(path)`` alone reads, or appends the rows of one rank of a run that its parent has claimed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import IO, Any

from pipeline.errors import UserError
from pipeline.files import encoded, mend, plain_json, read_rows, refusing, replace_file, try_lock

STATES = ("running", "done", "failed", "interrupted", "preempted")
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
        other state. Raises ``UserError`` while another process writes here, or where the folder cannot be written.
        """
        with refusing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = try_lock(self.path / ".lock")
        self._refuse_another_writer(lock)
        self._lock, self._facts = lock, facts
        try:
            with refusing(self.path):
                self._remove_drafts()
                self.merge_ranks()
            self.write_status("running")
        except BaseException:
            self._release()
            raise
        return self

    def write_status(self, state: str, **extra: Any) -> None:
        """Replace status.json; any state but ``running`` also gives the claim back."""
        assert state in STATES, state
        process = {"pid": os.getpid(), "pid_birth": _birth(os.getpid()), "host": socket.gethostname()}
        heartbeat = datetime.now().astimezone().isoformat(timespec="seconds")
        job = {"job_id": os.environ.get("SLURM_JOB_ID"), "heartbeat": heartbeat}
        self.write_json("status.json", {"state": state, **process, **job, **self._facts, **extra})
        if state != "running":
            self._release()

    def write_failure(self, error: BaseException, **extra: Any) -> None:
        """Status ``failed`` with ``error`` (one line: type and message) and the whole ``traceback``."""
        line = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        self.write_status("failed", error=line, traceback="".join(traceback.format_exception(error)), **extra)

    def status(self) -> dict[str, Any] | None:
        """status.json (None without one) plus ``age``, the seconds since the last heartbeat.

        A run that says ``running`` but whose process on this host is gone reads ``dead``; a file that cannot be read or
        makes no sense reads ``unknown``.
        """
        path = self.path / "status.json"
        if not os.path.lexists(path):
            return None
        try:
            status, age = json.loads(path.read_bytes()), max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            status, age = None, 0.0
        if not _is_status(status):
            damage = f"{path} is damaged: repeat the run's command, its rows are kept"
            return {"state": "unknown", "age": age, "error": damage}
        if status["state"] == "running" and status["host"] == socket.gethostname() and not _alive(status):
            status["state"] = "dead"
        return {**status, "age": age}

    def beat(self) -> None:
        """Say that the run is alive (the time stamp of status.json); cheap enough for every tick."""
        if time.monotonic() - self._last_beat > BEAT_SECONDS:
            self._last_beat = time.monotonic()
            with suppress(FileNotFoundError):
                os.utime(self.path / "status.json")

    def append(self, row: dict[str, Any], rank: int = 0) -> None:
        """Add one finished row in one write; a line that a crash tore is cut off first."""
        path = self.path / ("samples.jsonl" if rank == 0 else f"samples.rank{rank}.jsonl")
        with refusing(path):
            if path not in self._mended:
                mend(path)
                self._mended.add(path)
            file = path.open("ab")
        with file:
            file.write(encoded(row))
        self.beat()

    def rows(self) -> list[dict[str, Any]]:
        """The newest row of each (id, sample) over all ranks, in dataset order; a torn last line is left out."""
        newest = {(row["id"], row.get("sample", 0)): row for path in self._row_files() for row in read_rows(path)}
        return sorted(newest.values(), key=lambda row: (row.get("index", 0), row.get("sample", 0)))

    def merge_ranks(self) -> None:
        """Leave one samples.jsonl, each (id, sample) once, in dataset order; atomic, and nothing to do twice."""
        files = self._row_files()
        if not files:
            return
        merged, target = b"".join(encoded(row) for row in self.rows()), self.path / "samples.jsonl"
        if not target.exists() or target.read_bytes() != merged:
            replace_file(target, merged)
        for path in files:
            if path != target:
                path.unlink()

    def write_json(self, name: str, data: Any) -> None:
        """Write a file whole or not at all; numbers that are not finite become null."""
        text = json.dumps(plain_json(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        with refusing(self.path / name):
            replace_file(self.path / name, text.encode("utf-8", "backslashreplace"))

    def read_json(self, name: str) -> Any:
        """The JSON object in a file of the folder, None when there is no file; ``UserError`` if it holds none."""
        path = self.path / name
        if not os.path.exists(path):
            return None
        with refusing(path, "read"):
            text = path.read_bytes()
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise UserError(f"{path} is damaged: delete it and repeat the run's command, its rows are kept")
        return data

    def _refuse_another_writer(self, lock: IO[bytes] | None) -> None:
        status = self.status()
        if lock is not None and not (status and _busy(status)):
            return
        if lock is not None:
            lock.close()
        known = status is not None and "pid" in status and "host" in status
        holder = f"process {status['pid']} on {status['host']}" if status and known else "another process"
        raise UserError(f"{self.path} is being written by {holder}: wait for it, or give this run another name")

    def _remove_drafts(self) -> None:
        """Half-written files of processes that died (see ``_replace``)."""
        for path in self.path.glob(".*"):
            if re.fullmatch(r"\..+\.\d+", path.name) and path.is_file():
                path.unlink(missing_ok=True)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _row_files(self) -> list[Path]:
        if not os.path.isdir(self.path):
            return []
        first = self.path / "samples.jsonl"
        ranks = sorted(self.path.glob("samples.rank[0-9]*.jsonl"), key=lambda path: int(re.sub(r"\D", "", path.name)))
        return [first, *ranks] if os.path.exists(first) else ranks


def settings_hash(settings: Any) -> str:
    """Ten hex digits for plain settings: sorted JSON, floats to 9 significant digits (0.7000000000000001 is 0.7)."""
    text = json.dumps(plain_json(settings, lambda x: float(f"{x:.9g}")), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def folder_name(model: str, sampler: str, dataset: str, hash: str) -> str:
    """``<model>-<sampler>-<dataset>-<hash>`` with every sign that a folder or a shell could trip over made ``_``."""
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in (model, sampler, dataset, hash))


def unique_folder(root: Path | str, model: str, sampler: str, dataset: str, hash: str) -> Path:
    """Make ``<root>/<date>/<time>-<model>-<sampler>-<dataset>-<hash>``, ``-2`` … behind it when that is taken.

    Raises ``UserError`` where no folder can be made.
    """
    now = datetime.now()
    day = Path(root) / f"{now:%Y-%m-%d}"
    with refusing(day):
        day.mkdir(parents=True, exist_ok=True)
    name, number = f"{now:%H-%M-%S}-{folder_name(model, sampler, dataset, hash)}", 1
    while True:
        folder = day / (name if number == 1 else f"{name}-{number}")
        with refusing(folder), suppress(FileExistsError):
            folder.mkdir()  # exclusive: of two launches in one second one fails here and takes the next name
            return folder
        number += 1


def find_runs(patterns: Iterable[str], nested: bool = False) -> list[Path]:
    """Run folders (those with a status.json) that the names or globs mean, each once, in the order given.

    A folder that is no run stands for the runs up to three levels below it (a sweep, a day, outputs). With ``nested``
    a folder that is a run stands for those inside of it, too.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for hit in [pattern] if os.path.exists(pattern) else sorted(glob(os.path.expanduser(pattern))):
            found |= dict.fromkeys(_runs_in(Path(hit), nested))
    return list(found)


def _runs_in(folder: Path, nested: bool) -> list[Path]:
    levels = ("", "*/", "*/*/", "*/*/*/")
    found = sorted({path.parent for level in levels for path in folder.glob(f"{level}status.json")})
    return found if nested else [run for run in found if not set(run.parents) & set(found)]


def _is_status(status: Any) -> bool:
    """Whether status.json holds what ``write_status`` writes, as far as this module relies on it."""
    if not isinstance(status, dict) or status.get("state") not in STATES:
        return False
    pid, host = status.get("pid"), status.get("host")
    return status["state"] != "running" or (isinstance(pid, int) and 0 < pid < 2**31 and isinstance(host, str))


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
