"""Sweeps: merged, extended, repeated; one bad job among good ones; one W&B run a job."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.commands import MY_SAMPLER, Here, write_my_sampler
from tests.conftest import CommandLine
from tests.test_tracking import run_folders, stored

GRID = ("-m", "model=toy", "sampler=confidence,threshold,autoregressive", "dataset.limit=2", "sweep=grid")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    write_my_sampler(tmp_path)
    return Here(tmp_path)


def states(here: Here, sweep: str) -> dict[str, int]:
    found = [run.status["state"] for run in here.sweep(sweep)]
    return {state: found.count(state) for state in set(found)}


def points(here: Here, sweep: str) -> list[dict[str, str]]:
    with (here.folder / "outputs" / sweep / "points.csv").open() as file:
        return list(csv.DictReader(file))


def stamps(here: Here, sweep: str) -> dict[Path, int]:
    """When each job's rows were last written."""
    return {run.path: (run.path / "samples.jsonl").stat().st_mtime_ns for run in here.sweep(sweep)}


def test_a_sweep_merges_repeats_and_extends(here: Here) -> None:
    out, err = here(*GRID, "sampler.threshold=0.5,0.9")  # Done when 3
    assert err == "" and "6 combinations, 4 jobs after merging" in out
    assert re.search(r"dropped: sampler.threshold \(sampler=confidence does not use it\)", out)
    assert re.search(r"merged: toy autoregressive with sampler.threshold=0.5 stands for sampler.threshold=0.9 too", out)
    assert states(here, "grid") == {"done": 4}
    assert len({run.path.name for run in here.sweep("grid")}) == 4
    assert all(re.fullmatch(r"toy-\w+-arithmetic-[0-9a-f]{10}", run.path.name) for run in here.sweep("grid"))
    _one_wandb_run_a_job(here)

    before = stamps(here, "grid")
    out, _ = here(*GRID, "sampler.threshold=0.9,0.5")
    assert stamps(here, "grid") == before and out.count("finished already") == 4
    assert len(run_folders(here.folder)) == 4

    here(*GRID, "sampler.threshold=0.5,0.9,0.7", "logger=none")
    after = stamps(here, "grid")
    assert len(after) == 5 and all(after[path] == stamp for path, stamp in before.items())
    _points_equal_the_summaries(here)


def _one_wandb_run_a_job(here: Here) -> None:
    for run in here.sweep("grid"):  # WBD-01, WBD-03
        (folder,) = run_folders(run.path)
        kept = stored(folder)
        assert (kept.group, kept.exit_code, kept.name) == ("grid", 0, run.path.name)
        saved = OmegaConf.to_container(OmegaConf.load(run.path / "config.yaml"))
        assert isinstance(saved, dict)
        assert {key: kept.config[key] for key in saved} == saved
        assert kept.config["settings_hash"] == run.summary["settings_hash"]
        assert kept.summary["tokens_per_forward"] == run.summary["tokens_per_forward"]
    assert len({stored(folder).id for folder in run_folders(here.folder)}) == 4


def _points_equal_the_summaries(here: Here) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(here.folder / "outputs" / "grid" / "points.csv").set_index("settings_hash")
    assert len(table) == 5
    for run in here.sweep("grid"):
        line = table.loc[run.summary["settings_hash"]]
        for name, value in run.summary.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert line[name] == pytest.approx(value, rel=1e-12), name
        for name, setting in run.summary["settings"].items():
            if isinstance(setting["value"], float):
                assert line[f"sampler.{name}"] == setting["value"]


def test_failing_jobs_neither_stop_nor_hide_the_others(here: Here) -> None:
    variants = ("sampler.explode=false,true", "sampler.greed=1,4", "dataset.limit=2", "sweep=s")  # HYD-01
    out, err = here("-m", *MY_SAMPLER, *variants, code=1)
    assert "Traceback" not in err
    assert states(here, "s") == {"done": 2, "failed": 2}
    for run in here.sweep("s"):
        failed = run.status["state"] == "failed"
        assert failed == ("boom" in (run.status.get("error") or ""))
        assert stored(run_folders(run.path)[0]).exit_code == int(failed)
        assert run.summary["failed_rate"] == int(failed)
    told = re.findall(
        r"^failed: none of 2 .*: Mine raised RuntimeError: boom .*\) \[.*sampler.greed=(\d).*\] → .*/status.json$",
        out,
        re.M,
    )
    assert told == ["1", "4"]
    assert [line["accuracy"] != "" for line in points(here, "s")].count(True) == 2
    out, _ = here("outputs/s", module="pipeline.status")
    assert out.count("RuntimeError: boom") == 2 and out.count(" done ") == 2


def test_wrongly_typed_values_of_a_sweep_are_all_named_before_anything_runs(here: Here) -> None:
    words = ("sampler.temperature=-1,nan,abc", "sampler.steps=8,many,1.5", "dataset.limit=1", "sweep=s")
    _, err = here("-m", "model=toy", "logger=none", *words, code=2)
    told = [("temperature=abc", "'abc' is not a number"), ("steps=many", "'many' is not a whole number")]
    told.append(("steps=1.5", "'1.5' is not a whole number"))
    assert err == f"error: {'; '.join(f'sampler.{which} does not fit: {why}' for which, why in told)}\n"
    assert not (here.folder / "outputs").exists()
    here("-m", "model=toy", "logger=none", "sampler.temperature=-1,nan,0", "dataset.limit=1", "sweep=s", code=1)
    assert states(here, "s") == {"failed": 2, "done": 1}  # out of range is a job's own failure


def test_the_closing_table_breaks_no_setting(here: Here) -> None:
    swept = ("sampler.order=left_to_right,probability", "sampler.temperature=0.123456,0", "dataset.limit=1")
    out, _ = here("-m", "model=toy", "logger=none", "sampler=confidence", *swept, "sweep=s")
    table = out[out.rindex("4 jobs") :]
    assert table.count("order=left_to_right") == 2 and table.count("temperature=0.123456") == 2
    assert "done" in table and "nfe" in table


def test_a_job_whose_sampler_cannot_decode_the_model_is_refused_and_the_rest_runs(here: Here) -> None:
    common = ("-m", "sampler=threshold,autoregressive", "model=tiny_ar", "dataset.limit=2", "logger=none", "sweep=s")
    out, _ = here(*common, code=1)
    assert states(here, "s") == {"done": 1, "failed": 1}
    assert re.search(r"refused: model=tiny_ar with sampler=threshold: .* \[sampler=threshold", out)
    assert [line["sampler"] for line in points(here, "s")] == ["autoregressive"]
    refused = next(run for run in here.sweep("s") if run.status["state"] == "failed")
    assert "needs" in refused.status["error"] and not (refused.path / "samples.jsonl").exists()


def test_what_was_refused_and_is_mended_leaves_no_trace(here: Here) -> None:
    common = (
        "-m",
        "model=toy",
        "dataset=jsonl",
        "dataset.path=q.jsonl",
        "dataset.gen_length=8",
        "logger=none",
        "sweep=s",
    )
    here(*common, code=1)
    assert states(here, "s") == {"failed": 1}
    (here.folder / "q.jsonl").write_text('{"question": "6 * 7?"}\n')
    here(*common)
    assert states(here, "s") == {"done": 1}


def test_a_dataset_of_ones_own_that_raises_spoils_its_job_only(here: Here) -> None:
    (here.folder / "mydata.py").write_text(
        "from dataclasses import dataclass\nfrom pipeline.data.base import Dataset\n\n\n"
        "@dataclass\nclass Broken(Dataset):\n    def load(self):\n        return [1 / 0]\n"
    )
    (here.folder / "my" / "dataset").mkdir()
    (here.folder / "my" / "dataset" / "broken.yaml").write_text("_target_: mydata.Broken\nname: broken\nlimit: null\n")
    out, _ = here("-m", *MY_SAMPLER, "dataset=broken,arithmetic", "dataset.limit=2", "logger=none", "sweep=s", code=1)
    assert states(here, "s") == {"done": 1, "failed": 1}
    assert "ZeroDivisionError" in out
    assert any("mydata.py" in run.status.get("traceback", "") for run in here.sweep("s"))


def test_the_same_command_twice_in_one_sweep_runs_once(here: Here) -> None:
    out, _ = here("-m", *MY_SAMPLER, "sampler.greed=4,2,4", "dataset.limit=1", "logger=none", "sweep=s")
    assert "3 combinations, 2 jobs after merging" in out
    assert re.search(r"merged: .*sampler.greed=4.* was given 2 times", out)


def test_a_job_reruns_by_the_command_it_stored(here: Here) -> None:
    marks = "dataset.stop=['a=b, #1'],['c']"  # HYD-02
    here("-m", *MY_SAMPLER, marks, "dataset.limit=1", "logger=none", "sweep='my, sweep=1'")
    jobs = here.sweep("my, sweep=1")
    assert sorted(OmegaConf.load(run.path / "config.yaml").dataset.stop[0] for run in jobs) == ["a=b, #1", "c"]
    for run in jobs:
        rows = run.timeless
        (run.path / "samples.jsonl").unlink()
        words = shlex.split(run.environment["command"])
        assert words[:3] == ["python", "-m", "pipeline"]
        here(*words[3:])
        assert run.timeless == rows
    assert len(here.sweep("my, sweep=1")) == 2


def test_an_experiment_is_a_sweep_by_name(here: Here) -> None:
    (here.folder / "my" / "experiment").mkdir()
    (here.folder / "my" / "experiment" / "try.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      sampler.greed: 1,2,4\n"
        "sweep: try\ndataset:\n  limit: 1\n"
    )
    here(*MY_SAMPLER, "experiment=try", "logger=none")
    assert states(here, "try") == {"done": 3}
    assert sorted(float(line["tokens_per_forward"]) for line in points(here, "try")) == [1.0, 2.0, 4.0]


def test_no_run_where_none_is_wanted(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here("-m", *MY_SAMPLER, "sampler.greed=1,2", "dataset.limit=1", "logger=none", "sweep=a")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    here(*MY_SAMPLER, "dataset.limit=1", "run=b")
    assert not run_folders(here.folder) and not list(here.folder.glob("**/wandb"))


def test_the_local_launcher_runs_jobs_side_by_side_to_the_same_points(command_line: CommandLine) -> None:
    here = Here(command_line.folder)
    write_my_sampler(here.folder)
    variants = ("sampler.greed=1,2,4", "sampler.explode=false,true", "dataset.limit=2")
    here("-m", *MY_SAMPLER, *variants, "logger=none", "sweep=serial", code=1)
    local = ("hydra/launcher=local", "hydra.launcher.workers=2", "sweep=local")
    done = command_line("-m", *MY_SAMPLER, *variants, *local, code=1)
    assert "6 jobs on 2 workers" in done.stdout and done.stderr == ""
    assert states(here, "local") == states(here, "serial") == {"done": 3, "failed": 3}
    timed = re.compile("second|overhead|memory|hardware")
    one, other = (
        [{name: value for name, value in line.items() if not timed.search(name)} for line in points(here, sweep)]
        for sweep in ("serial", "local")
    )
    assert one == other
    assert [run.timeless for run in here.sweep("local") if run.status["state"] == "done"] == [
        run.timeless for run in here.sweep("serial") if run.status["state"] == "done"
    ]
    assert len(run_folders(here.folder)) == 6
    assert all("mine on toy" in (run.path / "log.txt").read_text() for run in here.sweep("local"))
    assert json.loads((here.sweep("local")[0].path / "status.json").read_text())["pid"]


def test_an_option_of_ones_own_sampler_is_swept_beside_other_samplers(here: Here) -> None:
    command = ("-m", "--config-dir", "my", "model=toy", "sampler=mine,threshold", "dataset.limit=1", "logger=none")
    out, _ = here(*command, "sampler.greed=2,4", "sweep=a")
    assert states(here, "a") == {"done": 3} and "dropped: sampler.greed (sampler=threshold does not use it)" in out
    assert "+" not in out.split("3 jobs")[-1]
    assert "sampler.gred is no option" in here(*command, "sampler.gred=2,4", "sweep=b", code=2)[1]


def test_a_sweep_never_writes_outside_the_outputs(here: Here) -> None:
    for name in ("../x", "/nowhere/x"):
        assert "is no folder name" in here("-m", "model=toy", f"sweep={name}", "dataset.limit=1,2", code=2)[1]
    assert not list(here.folder.glob("**/points.csv"))


def test_a_sampler_edited_between_two_sweeps_gets_new_folders(here: Here) -> None:
    command = ("-m", *MY_SAMPLER, "sampler.greed=1,2", "dataset.limit=1", "logger=none", "sweep=a")
    here(*command)
    code = here.folder / "mine.py"
    code.write_text(code.read_text().replace("time.sleep(self.delay)", "time.sleep(0 * self.delay)"))
    here(*command)
    assert states(here, "a") == {"done": 4}
