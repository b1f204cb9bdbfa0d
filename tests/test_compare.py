"""Runs side by side: paired figures on the samples they share, and a line for everything that spoils a comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.compare import main
from pipeline.runs import RunFolder


def make_run(folder: Path, correct: list[bool | None], nfe: int = 10, first: int = 0, **facts: object) -> Path:
    """A run over samples ``first``, ``first + 1``, … with 20 tokens each."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True)
    rows = [
        {"id": f"q{i}", "index": i, "sample": 0, "gold": "7", "correct": right, "tokens": 20, "nfe": nfe, "canvas": 32}
        for i, right in enumerate(correct, start=first)
    ]
    for row in rows:
        run.append(row)
    right = sum(map(bool, correct)) / len(correct)
    quality = {"accuracy": right, "accuracy_low": right - 0.1, "accuracy_high": right + 0.1}
    counts = {"nfe_mean": nfe, "tokens_per_forward": 20 / nfe, "samples": len(rows), "samples_expected": len(rows)}
    same = {"complete": True, "protocol_hash": "p", "scorer": "numbers-1", "hardware_key": "cpu"}
    run.write_json("summary.json", {**quality, **counts, **same, **facts})
    run.write_status("done")
    return folder


def compared(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict:
    assert main([*map(str, runs), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_difference_is_paired_and_the_ratio_is_to_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", [True] * 90 + [False] * 10)
    b = make_run(tmp_path / "b", [False] * 9 + [True] * 81 + [True] + [False] * 9, nfe=5)
    result = compared(capsys, a, b)
    base, other = result["runs"]
    assert (base["run"], other["run"], other["common"]) == ("a", "b", 100)
    assert other["difference"] == pytest.approx(-0.08)
    assert -0.16 < other["difference_low"] < -0.08 < other["difference_high"] < 0
    assert other["mcnemar_p"] == pytest.approx(22 / 1024)  # 9 lost, 1 won
    assert other["tokens_per_forward_ratio"] == 2.0
    assert "difference" not in base and result["warnings"] == []


def test_all_figures_are_over_the_samples_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", [True] * 6)
    b = make_run(tmp_path / "b", [True, False, True, False], first=4)
    result = compared(capsys, a, b)
    assert (result["runs"][1]["common"], result["runs"][1]["difference"]) == (2, -0.5)
    assert result["warnings"] == ["b and a share 2 samples of 6 and 4: differences are over those"]


def test_runs_without_a_common_sample_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = compared(capsys, make_run(tmp_path / "a", [True]), make_run(tmp_path / "b", [True], first=5))
    assert result["runs"][1]["difference"] is None and result["runs"][1]["mcnemar_p"] is None
    assert result["warnings"] == ["b shares no sample with a: there is no difference to give"]


@pytest.mark.parametrize("fact", ["protocol_hash", "scorer", "hardware_key", "gen_length"])
def test_every_unlike_fact_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], fact: str) -> None:
    a, b = make_run(tmp_path / "a", [True, False]), make_run(tmp_path / "b", [True, False], **{fact: 77})
    (line,) = compared(capsys, a, b)["warnings"]
    assert line.startswith(f"{fact} differs (a: ") and "b: 77" in line


def test_an_unfinished_run_never_looks_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", [True, False])
    b = make_run(tmp_path / "b", [True, False], complete=False, samples_expected=50)
    assert "b is incomplete (2 of 50 samples): repeat its command to finish it" in compared(capsys, a, b)["warnings"]


def test_repeated_samples_are_averaged_before_they_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [True, False]), make_run(tmp_path / "b", [True, False])
    for folder, right in ((a, False), (b, True)):
        again = {"id": "q0", "index": 0, "sample": 1, "gold": "7", "correct": right, "tokens": 20, "nfe": 10}
        RunFolder(folder).append(again)
    other = compared(capsys, a, b)["runs"][1]
    assert other["difference"] == 0.25 and other["mcnemar_p"] is None


def test_failed_samples_and_samples_without_reference_do_not_break_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [True, None]), make_run(tmp_path / "b", [True, False])
    failed = {"id": "q0", "index": 0, "sample": 0, "gold": "7", "correct": False, "tokens": None, "nfe": None}
    RunFolder(b).append(failed)
    other = compared(capsys, a, b)["runs"][1]
    assert other["difference"] == -1.0 and other["tokens_per_forward_ratio"] == 1.0


def test_a_sweep_folder_stands_for_its_runs_and_the_table_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "sweep" / "one", [True, False])
    make_run(tmp_path / "sweep" / "two", [True, True], nfe=4, scorer="numbers-2")
    assert main([str(tmp_path / "sweep")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"one .*0\.500 \[0\.400, 0\.600\].*2\.00", out) and re.search(r"two .*\+0\.500.*2\.50x", out)
    assert "warning: scorer differs (one: numbers-1, two: numbers-2)" in out


def test_folders_that_cannot_be_compared_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [True]), make_run(tmp_path / "b", [True])
    (b / "summary.json").unlink()
    (tmp_path / "empty").mkdir()
    cases = [([a, b], "b has no summary.json"), ([a, tmp_path / "empty"], "empty has no samples.jsonl")]
    cases += [([a, tmp_path / "absent"], "absent is not a folder"), ([a], "at least two runs")]
    for runs, reason in cases:
        assert main([str(run) for run in runs]) == 2
        assert reason in (error := capsys.readouterr().err)
        assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("samples.jsonl", "[1]\n", "samples.jsonl line 1 is no row"),
        ("samples.jsonl", '{"id": "q0"}\n', "the row of q0 has no correct: delete its line and repeat the run"),
        (
            "samples.jsonl",
            '{"id": "q0", "correct": true, "gold": "7", "tokens": 2, "nfe": "x"}\n',
            "the row of q0 has nfe='x'",
        ),
        ("summary.json", "[1]", "summary.json is damaged"),
        ("summary.json", "{bad", "summary.json is damaged"),
    ],
)
def test_a_damaged_run_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, reason: str
) -> None:
    a, b = make_run(tmp_path / "a", [True]), make_run(tmp_path / "b", [True])
    (b / file).write_text(text)
    assert main([str(a), str(b)]) == 2
    assert re.fullmatch(rf"error: {re.escape(str(b))}/.*{re.escape(reason)}.*\n", capsys.readouterr().err)


def test_a_run_stands_for_itself_and_not_for_runs_inside_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [True]), make_run(tmp_path / "b", [True])
    make_run(a / "inner", [False])
    assert [run["run"] for run in compared(capsys, a, b)["runs"]] == ["a", "b"]
