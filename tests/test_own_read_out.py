"""Samplers and read-outs of a user's own: the documentation's examples from a folder of their own, and the rules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adapters.readouts import Memory, function
from adapters.toy import TableAdapter
from pipeline.compose import compose
from pipeline.engine import Engine, Task
from pipeline.job import prepare
from pipeline.sources import code_hash
from samplers import DecodeState, Decoding, Forward, ModelFacts, Sampler
from tests.commands import Here
from tests.conftest import ROOT

FACTS = ModelFacts(6, 5, frozenset())


def snippets(heading: str, language: str) -> list[str]:
    """A section's blocks of code."""
    section = (ROOT / "docs" / "extending.md").read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """A user's folder, with nothing in it but what the documentation shows."""
    (sampler,), (preset,) = (snippets("A sampler: one file", language) for language in ("python", "yaml"))
    readouts, settled = snippets("A read-out", "python")
    (tmp_path / "my_sampler.py").write_text(f"{sampler}\n\n{settled}")
    (tmp_path / "my_readouts.py").write_text(readouts)
    (tmp_path / "my_conf" / "sampler").mkdir(parents=True)
    (tmp_path / "my_conf" / "sampler" / "half.yaml").write_text(preset)
    own = preset.replace("HalfSampler", "SettledSampler").replace("name: half", "name: settled")
    (tmp_path / "my_conf" / "sampler" / "settled.yaml").write_text(own)
    yield Here(tmp_path)
    for module in ("my_sampler", "my_readouts"):
        sys.modules.pop(module, None)
    function.cache_clear()


@pytest.mark.parametrize("name", ["half", "settled"])
def test_the_documented_samplers_run_and_conform_from_a_users_folder(here: Here, name: str) -> None:
    words = ("--config-dir", "my_conf", f"sampler={name}")
    out, _ = here(*words, module="pipeline.check")
    assert "failed" not in out and out.count("held") >= 9
    here(*words, "model=tiny", "dataset.limit=2", "dataset.gen_length=32", "logger=none", "run=own")
    rows = here.run("own").rows
    assert len(rows) == 2 and all(0 < row["nfe"] <= 32 for row in rows)


def test_the_examples_are_as_short_as_they_say() -> None:
    (sampler,) = snippets("A sampler: one file", "python")
    assert len(sampler.splitlines()) <= 30
    lines = [line for code in snippets("A read-out", "python") for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20


def test_a_wrong_name_is_refused_before_a_model_is_loaded(here: Here) -> None:
    file = here.folder / "my_sampler.py"
    file.write_text(file.read_text().replace("my_readouts.kl", "my_readouts.lk"))
    _, err = here("--config-dir", "my_conf", "sampler=settled", "model=tiny", "logger=none", code=2)
    assert err.startswith("error: read-out 'my_readouts.lk_to_previous' is no function") and err.count("\n") == 1


# ---- a row's key -----------------------------------------------------------------------------------------------------


def key_of(here: Here) -> str:
    words = ("sampler=settled", "model=tiny", "dataset.limit=1", "logger=none")
    return prepare(compose(words, str(here.folder / "my_conf"))).key(0)


def test_a_row_made_by_another_read_out_has_another_key(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here.folder))
    file, before = here.folder / "my_readouts.py", key_of(here)
    file.write_text("# eight are enough\n" + file.read_text())
    assert key_of(here) == before  # a comment computes nothing
    file.write_text(file.read_text().replace("law.topk(8)", "law.topk(9)"))
    assert key_of(here) != before


OWN_LOOP = """
from samplers import Forward, Sampler
from rules_of_mine import least
import torch.nn

class Loop(Sampler):
    method_name = "loop"
    attentions = frozenset({"full"})

    def decode(self, state):
        prediction = yield Forward(state.row, state.canvas, ask=frozenset({"heard.widest"}))
"""
PARTS = {
    "loop_of_mine.py": OWN_LOOP,
    "rules_of_mine.py": "least = 1\n",
    "heard.py": "from kit.numbers import half\n\ndef widest(logits, hidden):\n    return half * logits\n",
    "kit/__init__.py": "",
    "kit/numbers.py": "from . import base\nhalf = base.ONE / 2\n",
    "kit/base.py": "ONE = 1\n",
    "apart.py": "unused = 1\n",
}


def test_all_that_a_users_sampler_uses_is_hashed_and_nothing_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in PARTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    from loop_of_mine import Loop  # type: ignore[import-not-found]

    before = code_hash(Loop)
    for name, text in PARTS.items():
        (tmp_path / name).write_text(text + "more = 2\n")
        assert (code_hash(Loop) != before) is (name != "apart.py"), name
        (tmp_path / name).write_text(text)
    assert code_hash(Loop) == before
    (tmp_path / "apart.py").write_text("unused = 2\n")
    assert code_hash(Loop, {"apart.f"}) != before  # a name that is put together while it runs
    sys.modules.pop("loop_of_mine")
    sys.modules.pop("rules_of_mine")


# ---- the rules -------------------------------------------------------------------------------------------------------


def counting(logits: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """How often a slot was read, and its largest logit."""
    before = torch.zeros(len(logits)) if previous is None else previous[:, 0]
    return torch.stack((before + 1, logits.amax(-1)), 1)


def widest(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.amax(-1, keepdim=True)


def flat(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1)


class Listening(Sampler):
    """Reads ever more slots of the canvas and notes what it hears."""

    method_name = "listening"

    def __init__(self, *names: str) -> None:
        self.names, self.heard = names, {}  # type: ignore[misc]

    def decode(self, state: DecodeState) -> Decoding:
        heard = self.heard.setdefault(state.stream, [])
        for count in range(1, len(state.canvas) + 1):
            want = state.canvas[:count]
            prediction = yield Forward(state.row, want, ask=frozenset({*self.names, "entropy"}))
            assert prediction.entropy is not None and len(prediction.entropy) == count
            heard.append(prediction.read)
        for slot in state.canvas:
            state.commit(slot, prediction.token[slot])


def listen(*names: str, max_rows: int = 1) -> tuple[dict, list]:
    adapter = TableAdapter(FACTS, lambda seen, slot: [0.1 * slot, 0, 0, 0, 0, 0])
    sampler = Listening(*names)
    tasks = [Task(i, [1] * i, 3, stream=i) for i in range(4)]
    return sampler.heard, list(Engine(adapter, sampler, max_rows).decode(tasks, 6))


@pytest.mark.parametrize("max_rows", [1, 4])
def test_what_was_said_before_is_kept_by_row_and_slot_and_forgotten_with_the_row(max_rows: int) -> None:
    heard, outcomes = listen(f"{__name__}.counting", f"{__name__}.widest", max_rows=max_rows)
    assert [outcome.failure for outcome in outcomes] == [None] * 4
    for prompt, steps in heard.items():
        for step, read in enumerate(steps):
            assert list(read) == list(range(prompt, prompt + step + 1))
            for place, (slot, numbers) in enumerate(read.items()):
                assert numbers == pytest.approx((step - place + 1, 0.1 * slot, 0.1 * slot))


@pytest.mark.parametrize(
    ("name", "words"),
    [("novelty", "is not known"), ("no_module.x", "cannot be imported"), (f"{__name__}.missing", "none of that name")],
)
def test_a_name_that_only_a_forward_has_fails_the_sample_in_words(name: str, words: str) -> None:
    _, outcomes = listen(name)
    assert all(outcome.failure == "failed" and words in (outcome.error or "") for outcome in outcomes)


def test_a_read_out_that_gives_no_vector_a_slot_is_named() -> None:
    memory = Memory(1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"flat' gave shape \(2,\) for 2 slots: it must be \(2, k\)"):
        memory.read(f"{__name__}.flat", torch.zeros(2, 6), torch.zeros(2, 3), [(0, 0), (0, 1)])
