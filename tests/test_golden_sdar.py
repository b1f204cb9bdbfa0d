"""SDAR: token for token and forward for forward as the authors' code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samplers import SdarSampler
from tests.golden import Case, Ours, Tally, cases, check, decode
from tests.shared import shared

SDAR = cases("sdar", "cases.json")


def ours(case: Case) -> Ours:
    settings, stops = case.settings, case.settings["stopping_criteria_idx"]
    length, block = settings["gen_length"], settings["block_length"]
    strategy = settings["remasking_strategy"]
    sampler = SdarSampler(
        block_size=block,
        steps=settings["denoising_steps"] * -(-length // block),
        threshold=settings["confidence_threshold"] if strategy == "low_confidence_dynamic" else None,
        order="left_to_right" if strategy == "sequential" else "probability",
        temperature=settings["temperature"] if settings["sampler"] == "official" else 0.0,
        top_k=settings["top_k"] or None,
        cache="block",
        early_stop=stops is not None,
        compat="sdar",
    )
    return Ours(sampler, length, {"end_ids": stops} if stops else {})


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", SDAR)
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    check(case, ours(case), max_rows, tally)


@pytest.mark.golden
@pytest.mark.parametrize("case", SDAR)
def test_tokens_and_steps_are_the_same_without_a_cache(case: Case) -> None:
    wish = ours(case)
    assert isinstance(wish.sampler, SdarSampler)
    outcomes = decode(case, wish, replace(wish.sampler, cache="none"), max_rows=4)
    for outcome, prompt in zip(outcomes, case.prompts(), strict=True):
        assert outcome.state is not None and wish.output(outcome.state) == prompt.output
        blocks = sum(
            not any(outcome.state.mask[slot] for slot in b) for b in outcome.state.blocks(wish.sampler.block_size)
        )
        prefill = len(prompt.ids) >= wish.sampler.block_size
        assert outcome.counts()["nfe"] + blocks + prefill == prompt.forwards


def test_golden_files_are_where_ci_has_them() -> None:
    assert len(SDAR) >= 14, shared("golden", "sdar", "cases.json")
