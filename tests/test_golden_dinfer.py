"""dInfer's block diffusion on LLaDA2: token for token and forward for forward as the authors' code."""

from __future__ import annotations

from typing import Any

import pytest

from samplers import BlockThresholdSampler, CreditSampler, DecodeState, HierarchySampler
from tests.golden import Case, Ours, Tally, cases, check, decode
from tests.shared import shared

DINFER = cases("llada2_moe", "cases_dinfer_bd.json")
DECODERS = {"threshold": BlockThresholdSampler, "credit": CreditSampler, "hierarchy": HierarchySampler}


def rule(case: Case, cache: str = "block", compat: str | None = "dinfer") -> BlockThresholdSampler:
    settings = case.settings
    options: dict[str, Any] = {}
    if settings["decoder"] == "hierarchy":
        options["low_threshold"] = float(case.name.rpartition("_low")[2])  # told nowhere else
    if compat:
        options |= {name: settings[name] for name in ("maximum_unroll", "expected_tpf")}
    return DECODERS[settings["decoder"]](
        block_size=settings["block_length"],
        steps=settings["gen_length"],
        threshold=settings["threshold"],
        early_stop=settings["early_stop"],
        cache=cache,
        compat=compat,
        **options,
    )


def ours(case: Case) -> Ours:
    end_ids = [case.settings["eos_id"]]
    return Ours(rule(case), case.settings["gen_length"], {"end_ids": end_ids}, without_ends, project="dmax")


def without_ends(state: DecodeState) -> list[int]:
    """What their `get_generated_tokens` leaves: no end token, the prompt's neither, and no block left undone."""
    left_out = state.model.end_ids | {state.model.mask_id}
    return [token for token in state.tokens if token not in left_out]


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", DINFER)
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    check(case, ours(case), max_rows, tally)


@pytest.mark.golden
@pytest.mark.parametrize("case", DINFER)
def test_without_a_cache_and_without_their_faults_the_tokens_are_the_same(case: Case) -> None:
    """Keys of decided blocks are exact; what is left out is a forward to no use, and those on blocks without masks."""
    wish = ours(case)
    for kept in ("block", "none"):
        for outcome, prompt in zip(decode(case, wish, rule(case, kept, None)), case.prompts(), strict=True):
            assert outcome.state is not None and without_ends(outcome.state) == prompt.output
            assert prompt.forwards is not None
            spared = kept == "none" or len(prompt.ids) < case.settings["block_length"]
            unrolled = case.settings["maximum_unroll"] > 1
            nfe = outcome.counts()["nfe"]
            assert nfe < prompt.forwards if unrolled else nfe == prompt.forwards - spared


def test_golden_files_are_where_ci_has_them() -> None:
    assert len(DINFER) >= 6, shared("golden", "llada2_moe", "cases_dinfer_bd.json")
