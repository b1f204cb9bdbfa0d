"""LLaDA2 and its token editing: token for token and forward for forward as the authors' code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.as_counted import Decoded, as_counted
from samplers import DecodeState, Llada2Sampler
from tests.golden import Case, Ours, Tally, cases, check, decode
from tests.shared import shared

LLADA2 = cases("llada2_moe", "cases.json")
EDITING = cases("llada2_moe", "cases_edit.json")


def ours(case: Case) -> Ours:
    settings = case.settings
    editing = settings["algo"] == "diffusers.LLaDA2Pipeline"
    length, block, early = settings["gen_length"], settings["block_length"], settings["eos_early_stop"]
    steps = settings["num_inference_steps"] if editing else settings["steps"]
    sampler = Llada2Sampler(
        block_size=block,
        steps=steps * -(-length // block),
        threshold=settings["threshold"],
        editing_threshold=settings.get("editing_threshold"),
        max_post_steps=settings.get("max_post_steps", 16),
        minimal_topk=settings["minimal_topk"],
        temperature=1.0 if settings.get("sampler") == "official" else 0.0,  # which at 0 draws as at 1
        top_k=settings.get("top_k"),
        early_stop=early,
        compat="diffusers" if editing else "llada2",
    )
    end = settings["eos_token_id" if editing else "eos_id"]

    def answer(state: DecodeState) -> list[int]:
        tokens = state.tokens[state.prompt_length :][:length]
        if editing or end not in tokens:
            return tokens
        first = state.prompt_length + tokens.index(end)
        ended = any(state.committed_at[i] == state.forwards and state.tokens[i] == end for i in state.canvas)
        return state.tokens[0 if early and ended else state.prompt_length : first + 1]

    return Ours(sampler, length, {"end_ids": [end]}, answer)


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", [*LLADA2, *EDITING])
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    check(case, ours(case), max_rows, tally)


@pytest.mark.golden
@pytest.mark.parametrize("case", [*LLADA2, *EDITING])
def test_tokens_and_steps_are_the_same_with_the_block_cache(case: Case) -> None:
    wish = ours(case)
    assert isinstance(wish.sampler, Llada2Sampler)
    outcomes = decode(case, wish, replace(wish.sampler, cache="block"), max_rows=4)
    for outcome, prompt in zip(outcomes, case.prompts(), strict=True):
        assert outcome.state is not None and wish.output(outcome.state) == prompt.output
        as_llada2 = as_counted(Decoded(outcome.log, outcome.state, []))["nfe_as_llada2"]
        assert outcome.counts()["nfe_denoise"] == as_llada2 == prompt.forwards


def test_golden_files_are_where_ci_has_them() -> None:
    assert len(LLADA2) >= 16 and len(EDITING) >= 11, shared("golden", "llada2_moe", "cases.json")
