"""The tables at the end of a test run, in one process and in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.closing_tables import golden
from tests.conftest import ROOT

SUITE = """
import pytest

@pytest.mark.parametrize("n", range(4))
def test_case(tally, record_difference, n):
    record_difference("LLaDA", "logits", n * 1e-6)
    tokens = n != 3
    rest = {"forwards": tokens or None, "lengths": None, "reported": None}
    verdict = {"place": [n, 0], "tokens": tokens, "tied": False, **rest}
    told = {"file": "llada/cases.json", "method": "llada.generate", "case": f"c{n % 2}", "max_rows": 1 + n % 2}
    tally({**told, "prompts": [verdict], "excused": {"unstable": n % 2, "seeded": 3}})
    assert tokens
"""


def verdict(row: int = 0, **parts: Any) -> dict[str, Any]:
    equal = {"tokens": True, "tied": False, "forwards": True, "lengths": True, "reported": None}
    return {"place": [row, 0], **equal, **parts}


def entry(*prompts: dict[str, Any], case: str = "a", rows: int = 1, **excused: int) -> dict[str, Any]:
    told = {"file": "f/cases.json", "method": "m", "case": case, "max_rows": rows}
    return {**told, "prompts": list(prompts), "excused": excused}


def line(*entries: dict[str, Any]) -> list[str]:
    """Cells of the first group."""
    return [cell for cell in golden(entries)[1].split("  ") if cell]


def test_a_prompt_is_equal_if_it_is_at_every_number_of_rows_in_flight() -> None:
    found = line(entry(verdict(0), verdict(1)), entry(verdict(0), verdict(1, lengths=False), rows=4))
    assert [cell.strip() for cell in found] == ["f/cases.json", "m", "1", "2", "2/2", "2/2", "1/2", "-"]


def test_cases_and_what_is_not_required_are_counted_once() -> None:
    cases = [entry(verdict(), case=case, rows=rows, unstable=2, seeded=3) for case in "ab" for rows in (1, 4)]
    found = [cell.strip() for cell in line(*cases)]
    assert found[2:4] == ["2", "2"] and found[-1] == "4 unstable, 3 seeded"


def test_a_tie_is_told_and_not_called_equal() -> None:
    tied = verdict(1, tokens=False, tied=True, forwards=None, lengths=None)
    found = [cell.strip() for cell in line(entry(verdict(0), tied))]
    assert found[3:] == ["2", "1/2", "1/1", "1/1", "-", "1 tied"]


def test_files_and_methods_have_lines_of_their_own_and_a_sum() -> None:
    other = {**entry(verdict(), verdict(1)), "method": "n"}
    lines = golden([entry(verdict()), other])
    assert [text.split()[:3] for text in lines[1:4]] == [
        ["f/cases.json", "m", "1"],
        ["f/cases.json", "n", "1"],
        ["all", "2", "3"],
    ]
    assert golden([]) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_several_processes_print_the_table_of_one(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_terminal_summary, record_difference, tally\n"
    )
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), "test_suite.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout
    cells = next(text.split() for text in done.stdout.splitlines() if text.startswith("llada/cases.json"))
    assert cells == [
        "llada/cases.json",
        "llada.generate",
        "2",
        "4",
        "3/4",
        "3/3",
        "-",
        "-",
        "1",
        "unstable,",
        "3",
        "seeded",
    ]
    assert "LLaDA            3.00e-06  (logits; 1 tensors)" in done.stdout
