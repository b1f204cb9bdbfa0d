"""Several processes: the same rows, one folder, one W&B run, whoever starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.compose import compose
from pipeline.devices import refuse_shared_devices
from pipeline.errors import UserError
from pipeline.job import prepare
from tests.commands import MY_SAMPLER, Here, Process, lines, write_my_sampler
from tests.conftest import OFFLINE, ROOT, CommandLine
from tests.test_tracking import run_folders, stored

TWO = ("trainer.devices=2", "trainer.accelerator=cpu")


@pytest.fixture
def here(command_line: CommandLine) -> Here:
    write_my_sampler(command_line.folder)
    return Here(command_line.folder)


def figures(summary: dict) -> dict:
    timed = ("second", "overhead", "memory", "latency")
    return {name: value for name, value in summary.items() if not any(word in name for word in timed)}


def test_two_devices_give_the_rows_of_one(here: Here, command_line: CommandLine) -> None:
    done = command_line(*MY_SAMPLER, *TWO, "dataset.limit=3", "run=two")  # LIT-01, WBD-06
    assert done.stderr == ""
    here(*MY_SAMPLER, "dataset.limit=3", "run=one", "trainer.accelerator=cpu", "logger=none")
    one, two = here.run("one"), here.run("two")
    assert two.timeless == one.timeless and [row["index"] for row in two.rows] == [0, 1, 2]
    assert figures(two.summary) == figures(one.summary)
    assert two.summary["tokens_per_second_per_device"] == pytest.approx(two.summary["tokens_per_second"] / 2)
    (run,) = run_folders(here.folder)
    assert stored(run).summary["samples"] == 3
    left = {path.name for path in two.path.iterdir()} - {".lock"}
    expected = {"config.yaml", "environment.json", "sampler.py", "samples.jsonl", "status.json", "summary.json"}
    assert left == {*expected, "wandb"}

    kept = two.rows  # one sample is missing, for two devices
    here(*MY_SAMPLER, *TWO, "dataset.limit=4", "run=two", "logger=none")
    assert two.rows[:3] == kept and len(two.rows) == 4 and two.status["state"] == "done"


def test_processes_of_torchrun_share_a_run(here: Here) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "pipeline"]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}
    command = [*launch, *MY_SAMPLER, "dataset.limit=3", "trainer.accelerator=cpu"]
    done = subprocess.run(command, cwd=here.folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (folder,) = here.folder.glob("outputs/*/*/status.json")
    name = str(folder.parent.relative_to(here.folder / "outputs"))
    here(*MY_SAMPLER, "dataset.limit=3", "trainer.accelerator=cpu", "run=one", "logger=none")
    assert here.run(name).timeless == here.run("one").timeless
    assert figures(here.run(name).summary) == figures(here.run("one").summary)
    assert len(run_folders(here.folder)) == 1  # WBD-06


def test_a_signal_ends_every_process_before_the_last_word(here: Here) -> None:
    run = here.run("a")
    slow = ("sampler.delay=0.03", "engine.max_rows=1", "dataset.limit=40", "run=a")
    process = Process(here.folder, *MY_SAMPLER, *TWO, *slow)
    process.wait_for(lambda: lines(run.path / "samples*.jsonl") >= 2)
    ended, _, err = process.finish(signal.SIGUSR1)  # to the first process alone
    assert (ended, err) == (138, "")
    status = run.status
    assert status["state"] == "preempted"
    assert lines(run.path / "samples*.jsonl") == status["rows"] < 40
    assert stored(run_folders(run.path)[0]).exit_code == 1


def test_a_crash_on_one_of_two_devices_is_told_in_one_line(here: Here) -> None:
    _, err = here(*MY_SAMPLER, *TWO, "sampler.explode=true", "dataset.limit=2", "run=a", "logger=none", code=1)
    assert err.startswith("error: none of 2 samples was decoded: 2 failed; the first (") and err.count("\n") == 1
    assert "Mine raised RuntimeError: boom (mine.py line " in err
    status = here.run("a").status
    assert status["state"] == "failed" and "RuntimeError: boom" in status["error"]


def test_folders_of_runs_are_never_shared_by_accident(here: Here) -> None:
    for _ in range(2):
        here(*MY_SAMPLER, "dataset.limit=1", "logger=none")
    assert len(list((Path(here.folder) / "outputs").glob("*/*/status.json"))) == 2


def test_a_model_spread_over_all_gpus_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_shared_devices("auto", 1)
    refuse_shared_devices(None, 2)
    with pytest.raises(UserError, match=r"model.device_map=auto spreads .* but 2 processes would each do so: use"):
        refuse_shared_devices("auto", 2)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="but 4 processes"):
        refuse_shared_devices("auto", 1)


def test_it_is_refused_before_the_model_is_looked_for() -> None:
    cfg = compose(["model=llada", "model.path=nowhere", "model.device_map=auto", "trainer.devices=2", "logger=none"])
    with pytest.raises(UserError, match=r"model.device_map=auto spreads"):
        prepare(cfg)
