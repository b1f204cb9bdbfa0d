"""D2F on LLaDA and on Dream: token for token and forward for forward as the authors' code."""

from __future__ import annotations

import pytest

from samplers import D2FSampler, DecodeState
from tests.golden import Case, Ours, Tally, cases, check
from tests.shared import shared

D2F = cases("d2f", "cases.json", "cases_dream.json")
ORDERS = {"default": "probability", "neg_entropy": "entropy", "margin_confidence": "margin"}


def decoded(state: DecodeState) -> list[int]:
    """Their canvas grows: it ends with the last block added, ours has masks behind it."""
    masked = state.masked_in(state.canvas)
    return state.tokens[: masked[0]] if masked else state.tokens


def ours(case: Case, cache: str = "block") -> Ours:
    settings = case.settings
    sampler = D2FSampler(
        block_size=settings["block_size"],
        block_add_threshold=settings["block_add_threshold"],
        block_activate_threshold=settings["decoded_token_threshold"],
        threshold=settings["skip_threshold"],
        order=ORDERS[settings["sampling_strategy"]],
        cache=cache,
    )
    eos = settings["eos_id"]
    ends = [eos] if eos is not None and eos < 256 else []  # LLaDA's own id is in their code: none of this vocabulary
    return Ours(sampler, settings["max_new_tokens"], {"end_ids": ends}, decoded, same_windows=cache == "block")


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", D2F)
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    check(case, ours(case), max_rows, tally)


@pytest.mark.golden
@pytest.mark.parametrize("case", D2F)
def test_caching_changes_neither_token_nor_count(case: Case) -> None:
    check(case, ours(case, cache="none"))


def test_golden_files_are_where_ci_has_them() -> None:
    """Without the files every case above would vanish silently."""
    assert len(D2F) >= 18, shared("golden", "d2f", "cases.json")
