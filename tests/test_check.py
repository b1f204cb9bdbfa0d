"""`pipeline.check` on the command line: a table, a smallest example, an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.conformance import PROPERTIES
from tests.commands import Here, write_my_sampler

FAULTY = """
from dataclasses import dataclass
from samplers import ThresholdSampler

@dataclass(frozen=True, kw_only=True)
class Mine(ThresholdSampler):
    method_name = "mine"

    def update_state(self, state, prediction, step):
        super().update_state(state, prediction, step)
        if state.prompt_length > 2:
            state.tokens[1] = 3 if state.tokens[1] == 4 else 4
"""


def test_a_sampler_that_conforms_passes(tmp_path: Path) -> None:
    write_my_sampler(tmp_path)
    out, _ = Here(tmp_path)("--config-dir", "my", "sampler=mine", module="pipeline.check")
    assert "failed" not in out and "a threshold's two limits" in out and "does not apply" in out
    assert not (tmp_path / "outputs").exists()


SILENT = """
from samplers import ThresholdSampler

class Mine(ThresholdSampler):
    def decode(self, state):
        return
        yield
"""
RAISES = """
from samplers import ThresholdSampler

class Mine(ThresholdSampler):
    def update_state(self, state, prediction, step):
        raise KeyError("lost")
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SILENT, "the sampler ended and left slot 0 undecided"),
        (RAISES, "Mine raised KeyError: 'lost' (mine.py line 6, in"),
    ],
)
def test_a_sampler_that_breaks_has_one_fault_and_nothing_else_is_said_of_it(
    tmp_path: Path, source: str, said: str
) -> None:
    write_my_sampler(tmp_path)
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "my" / "sampler" / "mine.yaml").write_text("_target_: mine.Mine\nname: mine\n")
    out, _ = Here(tmp_path)("--config-dir", "my", "sampler=mine", module="pipeline.check", code=1)
    assert out.count("failed with") == 1 and said in out
    verdicts = [line for line in out.splitlines() if "not looked at" in line]
    assert len(verdicts) == len(PROPERTIES) - 1 and " held " not in out


@pytest.mark.slow
def test_a_fault_is_told_by_its_smallest_example(tmp_path: Path) -> None:
    write_my_sampler(tmp_path)
    (tmp_path / "mine.py").write_text(FAULTY)
    (tmp_path / "my" / "sampler" / "mine.yaml").write_text("_target_: mine.Mine\nname: mine\nthreshold: 0.8\n")
    out, _ = Here(tmp_path)("--config-dir", "my", "sampler=mine", module="pipeline.check", code=1)
    example = out.split("the prompt is untouched: failed with\n")[1].splitlines()[0]
    assert "full attention, network 0, 1 tokens asked, prompt [" in example and "threshold=0.8" in example
    assert example.count(",") < 16 and "became" in example
    assert "no mask id in an answer" in out and "held" in out


def test_what_cannot_be_checked_ends_in_one_sentence(tmp_path: Path) -> None:
    here = Here(tmp_path)
    for words, said in (
        (("sampler=nobody",), "sampler=nobody does not exist"),
        (("sampler=threshold", "sampler.threshold=2"), "sampler.threshold=2.0 is out of range"),
        (("sampler=threshold", "model=toy"), "model is no option of pipeline.check"),
    ):
        _, err = here(*words, module="pipeline.check", code=2)
        assert said in err and err.count("\n") == 1
