"""Weights & Biases offline: one run a job, failed when the job failed, and nothing in it that is nobody's business."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import tracking
from pipeline.errors import UserError
from pipeline.tracking import check_options, choose_mode, public, track
from tests.commands import Here

pytest.importorskip("wandb")
LOGGER = {"kind": "wandb", "project": "blockdiff", "entity": None, "group": None, "mode": None, "table_rows": 2}
BLOCK, HEADER = 32_768, 7


@pytest.fixture(autouse=True)
def no_key_and_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tracking._warn.cache_clear()


def run_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("offline-run-*") if path.is_dir())


def records(folder: Path) -> Iterator[Any]:
    """The records of an offline run's file: LevelDB's log format, a record in chunks of at most one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = next(folder.glob("run-*.wandb")).read_bytes()
    position, body = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + HEADER + size > len(data):
            return  # still being written
        body += data[position + HEADER : position + HEADER + size]
        position += HEADER + size
        if kind in (1, 4):  # whole, or the last chunk
            record = Record()
            record.ParseFromString(body)
            yield record
            body = b""


def stored(folder: Path) -> SimpleNamespace:
    """What W&B has kept of a run, once its service, a process of its own, has written the end of it."""
    deadline = time.monotonic() + 20
    while (found := read(folder)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def read(folder: Path) -> SimpleNamespace:
    """Name, group, config, summary, exit code, … of a run, as far as they are in its file."""
    found = SimpleNamespace(config={}, summary={}, exit_code=None, artifacts=[])
    for record in records(folder):
        if record.HasField("run"):
            found.name, found.group, found.job_type = record.run.display_name, record.run.run_group, record.run.job_type
            found.id, found.tags, found.project = record.run.run_id, list(record.run.tags), record.run.project
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.summary.update if record.HasField("summary") else ():
            found.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("exit"):
            found.exit_code = record.exit.exit_code
        if record.HasField("artifact"):
            found.artifacts.append(record.artifact)
    return found


def test_every_job_has_its_own_run_and_a_failed_one_does_not_touch_the_next(tmp_path: Path) -> None:
    for x in (1, 2, 3):  # WBD-01
        try:
            with track(LOGGER, name=f"r{x}", config={"x": x}, folder=tmp_path / f"job{x}") as tracker:
                tracker.summary({"accuracy": x / 10})
                if x == 2:
                    raise RuntimeError("job 2 breaks")
        except RuntimeError as error:
            assert (x, str(error)) == (2, "job 2 breaks")
    runs = [stored(folder) for folder in run_folders(tmp_path)]
    assert len(runs) == 3 and len({run.id for run in runs}) == 3
    assert [run.name for run in runs] == ["r1", "r2", "r3"]
    assert [run.config["x"] for run in runs] == [1, 2, 3]
    assert [run.exit_code for run in runs] == [0, 1, 0]
    assert [run.summary["accuracy"] for run in runs] == [0.1, 0.2, 0.3]
    assert [len(run_folders(tmp_path / f"job{x}")) for x in (1, 2, 3)] == [1, 1, 1]


def test_the_stored_config_is_plain_and_resolved(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"root": "data", "x": 1, "path": "${root}/run", "nested": {"name": "${x}-run"}})  # WBD-03
    plain = OmegaConf.to_container(config, resolve=True)
    with track(LOGGER, name="r", config=plain, folder=tmp_path):
        pass
    kept = stored(run_folders(tmp_path)[0]).config
    assert {key: kept[key] for key in plain} == plain
    assert kept["path"] == "data/run" and kept["nested"]["name"] == "1-run"


def test_labels_sort_runs_in_the_interface(tmp_path: Path) -> None:
    labels = {"group": "my-sweep", "job_type": "gsm8k", "tags": ["toy", "threshold", ""]}
    with track({**LOGGER, "project": "mine"}, name="r", config={}, folder=tmp_path, **labels) as tracker:
        assert tracker.location and Path(tracker.location).is_dir()
    run = stored(run_folders(tmp_path)[0])
    assert (run.group, run.job_type, run.tags, run.project) == ("my-sweep", "gsm8k", ["toy", "threshold"], "mine")


def test_the_summary_leaves_out_what_does_not_exist(tmp_path: Path) -> None:
    figures = {"accuracy": 0.5, "complete": True, "samples": 3, "memory_peak_gib": None, "overhead": float("nan")}
    with track(LOGGER, name="r", config={}, folder=tmp_path) as tracker:
        tracker.summary({**figures, "tokens_per_forward_as_dmax": 3.0})
    summary = stored(run_folders(tmp_path)[0]).summary
    assert {name for name in summary if not name.startswith("_")} == {"accuracy", "complete", "samples"}
    assert (summary["accuracy"], summary["samples"]) == (0.5, 3)


DRAFT_FIGURES = {"accepted_draft_tokens_mean", "acceptance_length", "draft_acceptance_rate", "nfe_draft_mean"}


@pytest.mark.parametrize(
    ("options", "figures"),
    [
        (("model=tiny_ar_dflash", "sampler=dflash"), DRAFT_FIGURES),
        (("model=tiny", "sampler=speculative"), DRAFT_FIGURES),
        (("model=tiny_ar", "sampler=autoregressive"), set()),
    ],
)
def test_only_the_run_of_a_job_that_drafts_holds_figures_of_drafts(
    tmp_path: Path, options: tuple[str, ...], figures: set[str]
) -> None:
    here = Here(tmp_path)
    here(*options, "logger.mode=offline", "dataset.limit=2", "run=a")
    (folder,) = run_folders(tmp_path)
    summary, files = stored(folder).summary, here.run("a").summary
    told = {name for name in summary if "draft" in name or "accept" in name}
    assert {name for name in told if not name.startswith("accepted_by_position")} == figures
    assert ("accepted_by_position.nrows" in told) == bool(figures), "a table"
    assert summary["samples"] == 2 and all(summary[name] == pytest.approx(files[name]) for name in figures)
    assert figures or all(files[name] is None for name in (*DRAFT_FIGURES, "accepted_by_position"))
    tables = [json.loads(path.read_text()) for path in folder.rglob("accepted_by_position*.table.json")]
    histogram = [list(pair) for pair in enumerate(files["accepted_by_position"] or [], start=1)]
    assert [table["data"] for table in tables] == ([histogram] if figures else [])


def test_the_table_is_capped_in_dataset_order_with_long_texts_clipped(tmp_path: Path) -> None:
    rows = [{"id": f"q{i}", "index": i, "text": "x" * 900, "output_ids": [1], "correct": None} for i in (2, 1, 0)]
    with track(LOGGER, name="r", config={}, folder=tmp_path) as tracker:
        tracker.table(rows)
    table = json.loads(next(run_folders(tmp_path)[0].rglob("*.table.json")).read_text())
    assert [line[table["columns"].index("id")] for line in table["data"]] == ["q0", "q1"]
    assert len(table["data"][0][table["columns"].index("text")]) == 500
    assert "output_ids" not in table["columns"]


def test_files_become_one_artifact(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n")
    (tmp_path / "summary.json").write_text("{}\n")
    with track(LOGGER, name="r", config={}, folder=tmp_path) as tracker:
        tracker.files([tmp_path / "samples.jsonl", tmp_path / "summary.json", tmp_path / "absent.html"])
    artifacts = [a for a in stored(run_folders(tmp_path)[0]).artifacts if a.type == "results"]
    assert [sorted(entry.path for entry in a.manifest.contents) for a in artifacts] == [
        ["samples.jsonl", "summary.json"]
    ]


def test_secrets_and_absolute_paths_stay_here(tmp_path: Path) -> None:
    config = {
        "model": {"path": "/somewhere/else/llada", "api_key": "abc", "mask_token": "<mask>", "tokens_per_step": 2},
        "hf_token": "abc",
        "password": "abc",
        "data": str(tmp_path / "data" / "test.jsonl"),
        "stop": ["\n\n", "/", "</s>", "Q: a=b"],
        "overrides": ["dataset.path=/private/me/x.jsonl", "model.hub_token=abc", "sampler.threshold=0.9"],
        "hardware_key": "cpu",
    }
    shown = public(config)
    assert "abc" not in json.dumps(shown) and "/somewhere" not in json.dumps(shown)
    assert shown["model"] == {"path": ".../llada", "mask_token": "<mask>", "tokens_per_step": 2}
    assert shown["data"] == "data/test.jsonl"
    assert shown["stop"] == config["stop"] and shown["hardware_key"] == "cpu"
    assert shown["overrides"] == ["dataset.path=.../x.jsonl", "sampler.threshold=0.9"]


def test_mode_follows_option_then_environment_then_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mode(None) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    assert choose_mode(None) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert (choose_mode(None), choose_mode("offline")) == ("disabled", "offline")
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert choose_mode(None) == "offline"
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UserError, match="WANDB_MODE=onlin is not known"):
        choose_mode(None)


def test_online_without_a_key_logs_offline_says_so_once_and_asks_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    online = {**LOGGER, "mode": "online"}
    check_options(online)  # as the job does before it starts
    with track(online, name="r", config={}, folder=tmp_path) as tracker:
        tracker.summary({"accuracy": 1.0})
    assert len(run_folders(tmp_path)) == 1
    line = "warning: W&B mode online needs a key (`wandb login`, or WANDB_API_KEY): logging offline\n"
    assert capfd.readouterr() == ("", line)


def test_variables_that_are_set_but_empty_are_like_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_SILENT"):
        monkeypatch.setenv(name, "")
    assert choose_mode(None) == "offline"
    monkeypatch.setenv("WANDB_MODE", "")
    with track({**LOGGER, "mode": "offline"}, name="r", config={}, folder=tmp_path):
        pass
    assert len(run_folders(tmp_path)) == 1 and "WANDB_MODE" not in os.environ


def test_a_server_that_does_not_answer_costs_seconds_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking.START_SECONDS == 10
    code = "from pipeline import tracking; tracking.START_SECONDS = 0.5\n"  # in a process of its own:
    code += f"with tracking.track({LOGGER}, name='r', config={{}}, folder='run'): pass"  # W&B reads the address once
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("PYTHONPATH", str(Path(tracking.__file__).parents[1]))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert time.monotonic() - began < 10
    assert done.stdout == ""
    assert re.fullmatch(r"warning: W&B could not start online \(.*\): logging offline\n", done.stderr), done.stderr
    assert stored(run_folders(tmp_path)[0]).exit_code == 0


@pytest.mark.parametrize("kind", ["wandb", "none"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("project", "a/b"), ("project", "x" * 129), ("entity", "a/b"), ("entity", "a b"), ("mode", "foo")],
)
def test_options_that_would_be_refused_are_refused_early_whatever_the_kind(kind: str, option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"logger.{option}={value} is .*: use "):
        check_options({**LOGGER, "kind": kind, option: value})


def test_names_that_are_fine_pass() -> None:
    assert check_options({**LOGGER, "project": "My project-1.0", "entity": "a_team-2", "mode": "offline"}) == "offline"
    assert check_options({**LOGGER, "kind": "none", "mode": "online"}) == "disabled"


def test_jobs_of_a_sweep_never_share_a_run_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.compose import compose
    from pipeline.job import prepare

    monkeypatch.setenv("WANDB_RUN_ID", "by-hand")
    words = ["model=toy", "dataset.limit=1"]
    prepare(compose([*words, "logger=none"]), (), in_sweep=True)
    prepare(compose(words))
    assert os.environ["WANDB_RUN_ID"] == "by-hand" and capsys.readouterr().err == ""  # one run takes the name
    for seed in (0, 1):
        prepare(compose([*words, f"seed={seed}"]), ("seed",), in_sweep=True)
    assert "WANDB_RUN_ID" not in os.environ
    told = "warning: WANDB_RUN_ID=by-hand names one W&B run and is not used in a sweep, whose jobs have a run each\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("changes", [{"kind": "none"}, {"mode": "disabled"}])
def test_switched_off_it_leaves_nothing(tmp_path: Path, changes: dict) -> None:
    with track({**LOGGER, **changes}, name="r", config={}, folder=tmp_path / "run") as tracker:
        tracker.summary({"accuracy": 1.0})
        tracker.table([])
        tracker.files([])
    assert not (tmp_path / "run").exists()


def test_other_ranks_than_the_first_open_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # WBD-06
    with track(LOGGER, name="r", config={}, folder=tmp_path) as tracker:
        tracker.summary({"accuracy": 1.0})
    assert run_folders(tmp_path) == []


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    unknown = track({**LOGGER, "kind": "tensorboard"}, name="r", config={}, folder=tmp_path)
    with pytest.raises(UserError, match=r"logger.kind=tensorboard is not known: use one of wandb, none"), unknown:
        pass
