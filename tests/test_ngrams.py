"""The n-gram table of a sampler that drafts by one: what it is counted from, and what that changes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.compose import compose
from pipeline.engine import Engine, Outcome
from pipeline.errors import UserError
from pipeline.evaluation import load_model, make_task
from pipeline.job import Job, prepare
from pipeline.rows import decided

PLAIN = ("sampler=autoregressive",)
DRAFTING = ("sampler=dflash", "sampler.drafter=ngram", "sampler.draft_width=5")


def job(*options: str, limit: int = 3, in_sweep: bool = False) -> Job:
    return prepare(compose(["model=tiny_ar", "logger=none", f"dataset.limit={limit}", *options]), (), in_sweep)


def counted(corpus: Path | str, **changes: Any) -> Job:
    options = [f"sampler.{name}={value}" for name, value in changes.items()]
    return job(*DRAFTING, *options, f"sampler.ngram_corpus={corpus}")


def write_rows(path: Path, *answers: list[int], **changes: Any) -> Path:
    """A run's rows of the tiny models."""
    codec = job(*PLAIN).description.codec
    rows = [{"id": f"q{n}", "index": n, "output_ids": ids} for n, ids in enumerate(answers)]
    told = [{**row, "raw_text": codec.decode(row["output_ids"], raw=True), **changes} for row in rows]  # type: ignore[arg-type]
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


def decode(made: Job) -> list[Outcome]:
    adapter = load_model(made.description, torch.device("cpu"), 64)
    engine = Engine(adapter, made.settings.sampler, max_rows=2, ngrams=made.ngrams)
    outcomes = engine.decode([make_task(made, index) for index in range(3)], made.slots)
    return sorted(outcomes, key=lambda outcome: outcome.task.index)


def answer(outcome: Outcome) -> list[int]:
    assert outcome.state is not None
    return decided(outcome.state)


def test_without_a_corpus_each_row_has_a_table_of_its_own_prompt() -> None:
    few, more = job(*DRAFTING), job(*DRAFTING, limit=4)
    assert few.corpus is None and few.settings.sources["ngram_corpus"] == "default"
    assert few.ngrams is not None
    for prompt in few.prompts:
        counts = few.ngrams(prompt).counts
        assert counts[()].total() == len(prompt) and counts[()] == Counter(prompt)
    assert few.key(0) == more.key(0), "no row depends on which others there are"
    assert job(*PLAIN).ngrams is None


def test_an_option_that_the_others_leave_without_a_meaning_is_refused_and_in_a_sweep_dropped() -> None:
    budget = ("sampler=dflash", "sampler.drafter=random", "sampler.draft_width=5", "sampler.node_budget=8")
    with pytest.raises(UserError, match=r"sampler\.node_budget=8 is for tree=ddtree and presto"):
        job(*budget)
    chosen = compose(["model=tiny_ar", "logger=none", "dataset.limit=3", *budget])
    made = prepare(chosen, ("sampler.drafter", "sampler.draft_width", "sampler.node_budget"), in_sweep=True)
    assert made.settings.dropped == {"node_budget": 8} and made.settings.values["node_budget"] is None
    tree = job(*budget, "sampler.tree=ddtree", in_sweep=True)
    assert tree.settings.dropped == {} and tree.settings.values["node_budget"] == 8


def test_of_a_runs_rows_the_answers_are_counted_up_to_their_end(tmp_path: Path) -> None:
    end = min(job(*PLAIN).description.facts.end_ids)
    path = write_rows(tmp_path / "samples.jsonl", [50, 51, 52, end, 53, 53], [50, 51, 54], [])
    made = counted(path, ngram_order=2)
    assert made.corpus == [[50, 51, 52, end], [50, 51, 54], []]
    assert made.ngrams is not None and dict(made.ngrams([]).counts[50,]) == {51: 2}
    assert set(made.ngrams([]).counts) == {(), (50,), (51,), (52,)}, "of 2 tokens in a row"


def test_a_text_is_counted_as_the_model_spells_it(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("so 7 and so 7\n")
    made = counted(text)
    codec = made.description.codec
    assert made.corpus is not None and codec.decode(made.corpus[0]) == "so 7 and so 7\n"


def test_the_key_knows_the_contents_and_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = write_rows(tmp_path / "samples.jsonl", [50, 51, 52])
    same = write_rows(tmp_path / "elsewhere" / "samples.jsonl", [50, 51, 52], seconds=7)
    other = write_rows(tmp_path / "other.jsonl", [50, 51, 53])
    jobs = [counted(path) for path in (first, same, other)]
    assert jobs[0].key(0) == jobs[1].key(0) != jobs[2].key(0)
    assert jobs[0].hash == jobs[1].hash != jobs[2].hash
    assert jobs[0].effective["sampler"]["ngram_corpus"] == str(first), "a run can be repeated from its config.yaml"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("absent.txt", None, "is not there: name a text, or the samples.jsonl of a finished run"),
        (".", None, "is a folder: name a text, or"),
        ("empty.txt", b" \n", "holds no token to count"),
        ("empty.jsonl", b"", "holds no token to count"),
        ("bytes.txt", b"\xff\xfe7", "cannot be encoded: "),
        ("rows.jsonl", b"so 7\n\n", "is no samples.jsonl: its line 1 is not JSON: name a text"),
        ("rows.jsonl", b'{"text": "so 7"}\n', "line 1 is no row (an object with id, index and sample): name a text"),
        ("rows.jsonl", b'{"id": "a"}\n', "is no samples.jsonl: its row a has no output_ids"),
        ("rows.jsonl", b'{"id": "a", "output_ids": [5, 99999]}\n', "was written with another tokenizer"),
        (
            "rows.jsonl",
            b'{"id": "a", "output_ids": [5], "raw_text": "Gr\\u00fc\\u00dfe"}\n',
            "another tokenizer than that",
        ),
    ],
)
def test_a_corpus_that_is_none_is_refused_in_a_sentence(
    tmp_path: Path, name: str, data: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        counted(path)
    for misleading in ("choose another run", "no folder can be made", "delete the line"):
        assert misleading not in str(caught.value)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_corpus_that_nothing_is_counted_from_is_refused_and_in_a_sweep_dropped(tmp_path: Path) -> None:
    corpus = f"sampler.ngram_corpus={tmp_path / 'none.txt'}"
    idle = ("sampler=dflash", "sampler.draft_width=0")
    with pytest.raises(UserError, match=r"ngram_corpus=.* is not used by sampler=dflash with these settings"):
        job(*idle, corpus)
    with pytest.raises(UserError, match=r"ngram_corpus=.* is not used by sampler=autoregressive: leave it out"):
        job(*PLAIN, corpus)
    for options in (idle, PLAIN):
        made = job(*options, corpus, in_sweep=True)
        assert made.settings.dropped == {"ngram_corpus": str(tmp_path / "none.txt")}
        assert made.corpus is None and "ngram_corpus" not in made.settings.values | made.settings.sources


def test_the_table_drafts_and_changes_no_token(tmp_path: Path) -> None:
    """Counted from what it will say, it is often right."""
    answers = [answer(outcome) for outcome in decode(job(*PLAIN))]
    made = counted(write_rows(tmp_path / "samples.jsonl", *answers))
    outcomes = decode(made)
    assert [answer(outcome) for outcome in outcomes] == answers
    assert sum(outcome.drafts()["accepted_draft_tokens"] for outcome in outcomes) > 20
    for outcome in outcomes:
        assert outcome.state is not None and made.ngrams is not None and outcome.state.ngram is made.ngrams([])
        assert outcome.counts()["nfe_draft"] == 0, "a table is no model"
