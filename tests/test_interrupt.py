"""Signals: rows so far are kept, the status says why it ended, W&B is closed, and the same command continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.commands import MY_SAMPLER, Here, Process, lines, write_my_sampler
from tests.test_tracking import run_folders, stored

SLOW = (*MY_SAMPLER, "sampler.delay=0.03", "engine.max_rows=2", "dataset.limit=60")  # a row a second


@pytest.fixture
def here(tmp_path: Path) -> Here:
    write_my_sampler(tmp_path)
    return Here(tmp_path)


@pytest.mark.parametrize(
    ("signum", "code", "state"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGUSR1, 138, "preempted")]
)
def test_a_signal_keeps_the_rows_and_the_same_command_decodes_the_rest(
    here: Here, signum: signal.Signals, code: int, state: str
) -> None:
    run, command = here.run("a"), [*SLOW, "run=a"]
    process = Process(here.folder, *command).wait_for(lambda: lines(run.path / "samples.jsonl") >= 2)
    ended, out, err = process.finish(signum, group=True)
    assert (ended, err) == (code, "")
    kept = run.rows
    assert f"{state}: {len(kept)} of 60 samples are kept in outputs/a" in out
    status = run.status
    assert (status["state"], status["rows"], status["expected"]) == (state, len(kept), 60)
    assert stored(run_folders(run.path)[0]).exit_code == 1
    assert not (run.path / "summary.json").exists()
    here(*command, "sampler.delay=0.03", "dataset.limit=4", "logger=none")
    assert run.rows[: len(kept)] == kept and run.status["state"] == "done"


def test_killed_while_it_writes_it_decodes_only_the_missing_rows(here: Here) -> None:
    run, command = here.run("a"), [*SLOW, "run=a", "logger=none"]
    process = Process(here.folder, *command).wait_for(lambda: lines(run.path / "samples.jsonl") >= 2)
    process.finish(signal.SIGKILL)
    assert run.status["state"] == "running"
    assert " dead " in here("outputs/a", module="pipeline.status")[0]
    whole = run.rows
    with (run.path / "samples.jsonl").open("a") as file:
        file.write('{"id": "arithmetic-test')  # torn
    out, _ = here(*command, "dataset.limit=4")
    assert f"continuing: {len(whole)} of 4" in out
    assert run.rows[: len(whole)] == whole and len(run.rows) == 4 and run.status["state"] == "done"


def test_a_signal_before_the_first_row_is_obeyed_too(here: Here) -> None:
    run = here.run("a")
    process = Process(here.folder, *SLOW, "run=a").wait_for(lambda: (run.path / "status.json").exists())
    ended, _, err = process.finish(signal.SIGTERM)  # W&B starts, the model loads
    assert (ended, err) == (143, "")
    assert (run.status["state"], run.status["rows"]) == ("preempted", 0)


def test_a_signal_before_the_run_has_a_folder_leaves_none(here: Here) -> None:
    (here.folder / "mine.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)\n")
    process = Process(here.folder, *SLOW, "run=a").wait_for(lambda: (here.folder / "importing").exists())
    ended, _, err = process.finish(signal.SIGINT)
    assert ended == 130 and err.count("\n") == 1 and "interrupted" in err
    assert not list((here.folder / "outputs").glob("*"))


@pytest.mark.parametrize("launcher", ["serial", "local"])
def test_a_signal_ends_a_sweep_at_once(here: Here, launcher: str) -> None:
    sweep = (f"hydra/launcher={launcher}", "sampler.greed=1,2,4", "sweep=s")
    options = ("hydra.launcher.workers=2",) if launcher == "local" else ()
    process = Process(here.folder, "-m", *SLOW, *sweep, *options)
    process.wait_for(lambda: _rows(here) >= 2)
    ended, out, err = process.finish(signal.SIGTERM if launcher == "local" else signal.SIGINT)
    code, state = (143, "preempted") if launcher == "local" else (130, "interrupted")
    assert (ended, err) == (code, "")
    assert "3 jobs" in out and "points: outputs/s/points.csv" in out
    assert out.count(f" {state} │") == (2 if launcher == "local" else 1) and " not run │" in out
    jobs = here.sweep("s")
    assert {run.status["state"] for run in jobs} == {state}
    assert len(jobs) == (2 if launcher == "local" else 1)  # no further job was begun
    for run in jobs:
        assert stored(run_folders(run.path)[0]).exit_code == 1
        assert run.status["rows"] == (len(run.rows) if (run.path / "samples.jsonl").exists() else 0)


def _rows(here: Here) -> int:
    return sum(lines(file) for file in (here.folder / "outputs" / "s").glob("*/samples.jsonl"))


def test_impatient_signals_change_nothing(here: Here) -> None:
    process = Process(here.folder, *SLOW, "run=a").wait_for(lambda: lines(here.run("a").path / "samples.jsonl"))
    for _ in range(5):
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    ended, _, err = process.finish(signal.SIGINT)
    assert (ended, err) == (130, "") and here.run("a").status["state"] == "interrupted"


def test_workers_do_not_outlive_a_killed_parent(here: Here) -> None:
    sweep = ("hydra/launcher=local", "hydra.launcher.workers=2", "sampler.greed=1,2,4", "sweep=s")
    process = Process(here.folder, "-m", *SLOW, *sweep).wait_for(lambda: _rows(here) >= 2)
    session = os.getsid(process.process.pid)
    process.process.kill()
    process.process.wait()
    deadline = time.monotonic() + 40
    while _members(session) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _members(session)
    assert {run.status["state"] for run in here.sweep("s")} == {"preempted"}


def _members(session: int) -> list[int]:
    """Living processes of a session (Linux)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z" and int(fields[2]) == session:
            members.append(int(stat.parent.name))
    return members
