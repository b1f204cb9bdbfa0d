"""The run folder: rows survive a crash, one writer at a time, names and hashes that don't collide."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.environment import environment
from pipeline.errors import UserError
from pipeline.runs import RunFolder, find_runs, folder_name, settings_hash, unique_folder
from pipeline.status import main as status_main

ROOT = Path(__file__).resolve().parents[1]
CLAIM = "import sys; from pipeline.runs import RunFolder; RunFolder(sys.argv[1]).claim(expected=3); "


def row(id: str, index: int, **extra) -> dict:
    return {"id": id, "index": index, "sample": 0, "text": "so 1", **extra}


def status_of_another_process(folder: Path, pid: int, host: str | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(
        json.dumps({"state": "running", "pid": pid, "host": host or socket.gethostname(), "expected": 9})
    )


def pid_of_a_finished_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_rows_come_back_in_dataset_order_and_the_newest_wins(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for number, (id, index) in enumerate([("b", 1), ("a", 0), ("b", 1)]):
        run.append(row(id, index, number=number))
    assert [(r["id"], r["number"]) for r in run.rows()] == [("a", 1), ("b", 2)]


def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next_row(tmp_path: Path) -> None:
    RunFolder(tmp_path).append(row("a", 0))
    file = tmp_path / "samples.jsonl"
    file.write_bytes(file.read_bytes() + b'{"id": "b", "ind')
    run = RunFolder(tmp_path)
    assert [r["id"] for r in run.rows()] == ["a"]
    run.append(row("c", 2))
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["a", "c"]


def test_a_whole_last_line_without_line_break_is_kept(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(row("a", 0)))
    run = RunFolder(tmp_path)
    run.append(row("b", 1))
    assert [r["id"] for r in run.rows()] == ["a", "b"]


def test_a_broken_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(row("a", 0)) + "\n{oops\n" + json.dumps(row("b", 1)) + "\n")
    with pytest.raises(UserError, match="line 2"):
        RunFolder(tmp_path).rows()


@pytest.mark.parametrize("line", ["[1]", "7", "{}", '{"id": [1]}', '{"id": "a", "index": null}'])
def test_a_line_that_is_no_row_is_refused_by_its_number_and_left_alone(tmp_path: Path, line: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(row("a", 0)) + f"\n{line}\n")
    for use in (RunFolder(tmp_path).rows, RunFolder(tmp_path).claim):
        with pytest.raises(UserError, match=r"samples.jsonl line 2 is no row .*: delete the line and repeat the run"):
            use()
    assert file.read_text() == json.dumps(row("a", 0)) + f"\n{line}\n"


def test_a_last_line_that_is_no_row_and_has_no_line_break_counts_as_torn(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(row("a", 0)) + "\n[1]")
    run = RunFolder(tmp_path)
    run.append(row("b", 1))
    assert [r["id"] for r in run.rows()] == ["a", "b"]


def test_rows_that_are_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    for use in (RunFolder(tmp_path).rows, RunFolder(tmp_path).claim, lambda: RunFolder(tmp_path).append(row("a", 0))):
        with pytest.raises(UserError, match=r"samples.jsonl cannot be (read|written): it is a folder"):
            use()


def test_odd_text_survives_one_row_a_line(tmp_path: Path) -> None:
    text = "a\nb\u2028c\x85 \ud800 é"
    RunFolder(tmp_path).append(row("a", 0, text=text, seconds=float("nan")))
    RunFolder(tmp_path).append(row("b", 1))
    assert [r["text"] for r in RunFolder(tmp_path).rows()] == [text, "so 1"]
    assert RunFolder(tmp_path).rows()[0]["seconds"] is None


def test_pandas_reads_the_rows_in_one_line(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    RunFolder(tmp_path).append(row("a", 0, output_ids=[1, 2], text="é\u2028"))
    RunFolder(tmp_path).append(row("b", 1, output_ids=None))
    assert list(pandas.read_json(tmp_path / "samples.jsonl", lines=True)["id"]) == ["a", "b"]


def test_files_of_all_ranks_become_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for rank in (1, 0, 10, 2):
        run.append(row(f"q{rank}", rank), rank)
    assert [r["index"] for r in run.rows()] == [0, 1, 2, 10]
    run.merge_ranks()
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["samples.jsonl"]
    assert [r["index"] for r in run.rows()] == [0, 1, 2, 10]


def test_a_copy_sent_to_another_process_appends_without_a_claim(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).claim()
    pickle.loads(pickle.dumps(run)).append(row("a", 0), rank=1)
    assert [r["id"] for r in run.rows()] == ["a"]


def test_a_stale_rank_file_never_hides_a_newer_row(tmp_path: Path) -> None:
    RunFolder(tmp_path).append(row("a", 0, correct=False), rank=1)
    run = RunFolder(tmp_path).claim()
    run.append(row("a", 0, correct=True))
    assert [r["correct"] for r in run.rows()] == [True]


def test_a_second_process_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").claim(expected=3)
    second = subprocess.run([sys.executable, "-c", CLAIM, str(run.path)], cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 1
    assert "UserError" in second.stderr and "is being written by process" in second.stderr
    run.write_status("done")
    subprocess.run([sys.executable, "-c", CLAIM, str(run.path)], cwd=ROOT, check=True)


def test_a_status_that_names_a_living_process_is_enough_to_be_refused(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    status_of_another_process(tmp_path / "run", sleeper.pid)
    try:
        with pytest.raises(UserError, match=str(sleeper.pid)):
            RunFolder(tmp_path / "run").claim()
    finally:
        sleeper.communicate(b"\n")
    RunFolder(tmp_path / "run").claim()


def test_a_killed_run_is_dead_and_can_be_continued(tmp_path: Path) -> None:
    killed = [sys.executable, "-c", CLAIM + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path)]
    assert subprocess.run(killed, cwd=ROOT).returncode == -9
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    assert RunFolder(tmp_path).status()["state"] == "dead"
    assert RunFolder(tmp_path).claim().status()["state"] == "running"


def test_a_reused_process_id_is_not_taken_for_the_run(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("birth times of processes come from /proc")
    run = RunFolder(tmp_path).claim()
    status = run.read_json("status.json")
    run.write_json("status.json", {**status, "pid_birth": "1"})
    assert RunFolder(tmp_path).status()["state"] == "dead"


def test_a_fresh_heartbeat_from_another_host_is_respected(tmp_path: Path) -> None:
    status_of_another_process(tmp_path / "run", 1, host="elsewhere")
    with pytest.raises(UserError, match="elsewhere"):
        RunFolder(tmp_path / "run").claim()


@pytest.mark.parametrize("text", ["{bad", "{}", "[1]", "", '{"state": "running"}', '{"state": [1], "pid": "x"}'])
def test_a_damaged_status_is_unknown_and_the_run_can_be_continued(tmp_path: Path, text: str) -> None:
    RunFolder(tmp_path).append(row("a", 0))
    (tmp_path / "status.json").write_text(text)
    assert RunFolder(tmp_path).status()["state"] == "unknown"
    run = RunFolder(tmp_path).claim()
    assert (run.status()["state"], [r["id"] for r in run.rows()]) == ("running", ["a"])


def test_a_damaged_status_does_not_let_a_second_writer_in(tmp_path: Path) -> None:
    first = RunFolder(tmp_path).claim()
    (tmp_path / "status.json").write_text("{}")
    for again in (RunFolder(tmp_path), first, RunFolder(tmp_path)):  # a refused claim leaves the first one's as it is
        with pytest.raises(UserError, match="written by another process"):
            again.claim()
    first.write_status("done")
    RunFolder(tmp_path).claim()


def test_a_damaged_summary_is_refused_by_name(tmp_path: Path) -> None:
    for text in (b"{bad", b"[1]", b"\xff"):
        (tmp_path / "summary.json").write_bytes(text)
        with pytest.raises(UserError, match=r"summary.json is damaged: delete it and repeat the run's command"):
            RunFolder(tmp_path).read_json("summary.json")


def test_what_a_dead_process_left_half_written_goes_at_the_next_claim(tmp_path: Path) -> None:
    (tmp_path / ".summary.json.4711").write_text("{")
    (tmp_path / ".mine").write_text("")
    RunFolder(tmp_path).claim()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".mine", "status.json"]


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    places = {file: "exists", file / "x": "a file, not a folder", tmp_path / ("x" * 300): "too long"}
    for place, reason in places.items():
        assert RunFolder(place).rows() == [] and RunFolder(place).status() is None
        with pytest.raises(UserError) as refused:
            RunFolder(place).claim()
        assert str(refused.value).startswith(f"{place} cannot be written: ") and reason in str(refused.value)
        with pytest.raises(UserError, match="cannot be written: "):
            RunFolder(place).write_json("a.json", {})
    for root in (file, Path(os.devnull), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"cannot be written: .*: choose another run, sweep or output_root"):
            unique_folder(root, "m", "s", "d", "h")
    with pytest.raises(UserError, match="its name is too long"):
        unique_folder(tmp_path, "m" * 300, "s", "d", "h")
    assert file.read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
def test_a_file_system_without_folders_of_ours_is_refused() -> None:
    for make in (RunFolder("/proc/run").claim, lambda: unique_folder("/proc", "m", "s", "d", "h")):
        with pytest.raises(UserError, match=r"^/proc/.* cannot be written: no folder can be made there: choose"):
            make()


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    uses = [RunFolder(tmp_path).claim, RunFolder(tmp_path / "run").claim]
    uses += [lambda: RunFolder(tmp_path).append(row("a", 0)), lambda: RunFolder(tmp_path).write_json("a", {})]
    uses += [lambda: unique_folder(tmp_path, "m", "s", "d", "h")]
    user = os.geteuid()
    tmp_path.chmod(0o500)
    os.seteuid(user or 65534)  # the superuser may write everywhere
    try:
        for use in uses:
            with pytest.raises(UserError, match=r"cannot be written: Permission denied: choose another run"):
                use()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_a_refused_claim_does_not_hold_the_folder(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    run = RunFolder(tmp_path)
    with pytest.raises(UserError, match=r"status.json cannot be written: it is a folder"):
        run.claim()
    (tmp_path / "status.json").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    RunFolder(tmp_path).claim()


def test_a_failure_is_kept_with_its_traceback_and_frees_the_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).claim(expected=3)
    try:
        raise RuntimeError("no memory\nleft")
    except RuntimeError as error:
        run.write_failure(error)
    status = RunFolder(tmp_path).status()
    assert (status["state"], status["expected"]) == ("failed", 3)
    assert "test_runs.py" in status["traceback"]
    RunFolder(tmp_path).claim()


def test_settings_hash_sees_settings_and_not_their_order_or_the_last_bits() -> None:
    assert settings_hash({"a": 0.7, "b": 1}) == settings_hash({"b": 1, "a": 0.7000000000000001})
    assert settings_hash({"a": 0.7}) != settings_hash({"a": 0.71})
    assert settings_hash({"a": 1e-10}) != settings_hash({"a": 0.0})
    assert settings_hash({"a": None}) != settings_hash({"a": False})
    assert len(settings_hash({})) == 10


def test_two_launches_in_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = {unique_folder(tmp_path, "org/model", "threshold", "gsm8k", "abc") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() and folder.parent.parent == tmp_path for folder in folders)
    assert folder_name("org/model", "threshold", "gsm8k", "abc") == "org_model-threshold-gsm8k-abc"


def test_the_recorded_command_reruns_as_it_is() -> None:
    command = [
        "python",
        "-m",
        "pipeline",
        "ckpt='run/epoch=3-step=10.ckpt'",
        "note='#1'",
        "note='hello, world'",
        "x=$HOME",
    ]
    assert shlex.split(environment(command)["command"]) == command


def test_the_environment_names_versions_without_importing_torch() -> None:
    code = "import sys, json; from pipeline.environment import environment; print(json.dumps(environment(['a']))); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    assert record["torch"] and record["python"] and record["gpu"] is None


def test_status_shows_each_run_of_a_sweep_with_rows_and_the_last_line_of_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed = RunFolder(tmp_path / "sweep" / "one").claim(), RunFolder(tmp_path / "sweep" / "two").claim()
    done.append(row("a", 0))
    done.write_status("done", expected=1)
    failed.write_failure(ValueError("the last line"), expected=8)
    status_of_another_process(tmp_path / "sweep" / "three", pid_of_a_finished_process())
    assert status_main([str(tmp_path / "swe*")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for words in (("one", "done", "1/1"), ("two", "failed", "0/8", "ValueError: the last line"), ("dead", "0/9")):
        assert any(all(word in line for word in words) for line in lines), words


def test_status_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_main([str(tmp_path / "none*")]) == 2
    assert "error: no run matches" in capsys.readouterr().err
    assert find_runs([str(tmp_path)]) == []
    assert status_main(["x" * 300]) == 2


def test_status_shows_runs_inside_of_runs_and_a_name_means_the_outermost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "day" / "sweep" / "c"]
    for run in runs:
        RunFolder(run).claim().write_status("done")
    assert find_runs([str(tmp_path)], nested=True) == runs
    assert find_runs([str(tmp_path)]) == [tmp_path]
    assert find_runs([str(tmp_path / "*")]) == [tmp_path / "a", tmp_path / "day" / "sweep" / "c"]
    assert status_main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" done ") == 4


def test_status_names_a_damaged_run_and_still_shows_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fine", "status", "rows"):
        RunFolder(tmp_path / name).claim().write_status("done", expected=1)
    (tmp_path / "status" / "status.json").write_text("{}")
    (tmp_path / "rows" / "samples.jsonl").write_text("[1]\n")
    assert status_main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert all(word in out for word in (" done ", " unknown ", " unreadable "))
    errors = [f"{tmp_path}/rows/samples.jsonl line 1 is no row", f"{tmp_path}/status/status.json is damaged"]
    assert [line.startswith(f"error: {e}") for line, e in zip(err.splitlines(), errors, strict=True)] == [True, True]
