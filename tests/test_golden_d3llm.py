"""d3LLM, also as dParallel, on LLaDA and on Dream: token for token and forward for forward as the authors' code."""

from __future__ import annotations

import pytest

from samplers import D3LLMSampler
from tests.golden import Case, Ours, Tally, cases, check
from tests.shared import shared

D3LLM = cases("d3llm", "cases.json", "cases_dream.json")
NEVER = 10_000  # what their code has for no caching and for no refresh


def ours(case: Case) -> Ours:
    settings = case.settings
    if "block_length" in settings:  # `generate`: one block after the other, as dParallel
        sampler = D3LLMSampler(
            block_size=settings["block_length"],
            entropy_threshold=settings["threshold"],
            block_add_threshold=1.0,
            block_activate_threshold=1.0,
        )
        return Ours(sampler, settings["gen_length"], {"end_ids": []}, project="d3llm")
    delay, interval = settings.get("cache_delay_iter", NEVER), settings.get("refresh_interval", NEVER)
    stops = settings.get("early_stop", False)
    sampler = D3LLMSampler(
        block_size=settings["block_size"],
        entropy_threshold=settings["threshold"],
        block_add_threshold=settings["block_add_threshold"],
        block_activate_threshold=settings["decoded_token_threshold"],
        always_surest="llada" in settings["algo"],
        cache="none" if delay == NEVER else "prefix",
        cache_delay=delay if delay < NEVER else 1,
        cache_refresh_interval=interval if interval < NEVER else None,
        early_stop=stops,
        compat="d3llm",
    )
    ends = [settings.get("eos_token_id", settings.get("eos_id"))] if stops else []
    return Ours(sampler, settings["max_new_tokens"], {"end_ids": ends}, project="d3llm")


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", D3LLM)
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    check(case, ours(case), max_rows, tally)


def test_golden_files_are_where_ci_has_them() -> None:
    """Without the files every case above would vanish silently."""
    assert len(D3LLM) >= 25, shared("golden", "d3llm", "cases.json")
