"""Fast-dLLM v2 against traces worked by hand, and what caching and batching must leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.toy import TableAdapter
from adapters.transformer import TransformerAdapter
from pipeline.engine import Outcome
from samplers import FastDLLMV2Sampler, ModelFacts
from tests.block_causal import END, FACTS, M, canvases, decode, kinds, prompts, row, tokens
from tests.block_causal import network as plain_network
from tests.models import MASK

SHIFTED = replace(FACTS, shift=1)
SURE = [0.5, 0.6, 0.95, 0.92, 0.7, 0.9, 0.91, 0.3, 0.8]  # by slot; the token of slot i is i


def said(facts: ModelFacts = SHIFTED, **ends: int) -> TableAdapter:
    """A model that says the same at every step, and ``s3=10`` the token 10 at slot 3."""
    rows = {slot: row(ends.get(f"s{slot}", max(slot, 1)), sure) for slot, sure in enumerate(SURE)}
    return TableAdapter(facts, rows | {slot: row(9, 0.5) for slot in range(9, 40)})


def network(shift: int = 1, origin: str = "zero") -> TransformerAdapter:
    adapter = plain_network(origin)
    adapter.facts = replace(adapter.facts, shift=shift)
    return adapter


def windows(outcome: Outcome) -> list[tuple[int, int]]:
    return [(record["window"][0], record["window"][1]) for record in outcome.trace]


def test_sub_blocks_are_filled_in_order_and_a_block_is_begun_by_the_forward_that_stores_the_last() -> None:
    """Prompt of 1; blocks of 4, sub-blocks of 2; more than 0.9 is sure: slot 5 with 0.9 is not."""
    sampler = FastDLLMV2Sampler(block_size=4, sub_block_size=2, threshold=0.9)
    (outcome,) = decode(said(), sampler, [[5]], 7)
    assert canvases(outcome) == [
        [1, M, M, M, M, M, M],  # slot 1 is all there is to the first sub-block; slots 2 and 3 are surer but later
        [1, 2, 3, M, M, M, M],
        [1, 2, 3, 4, M, M, M],  # the block's keys are stored, its last row tells slot 4
        [1, 2, 3, 4, 5, M, M],
        [1, 2, 3, 4, 5, 6, M],
        [1, 2, 3, 4, 5, 6, 7],
    ]
    assert windows(outcome) == [(0, 4), (0, 4), (0, 4), (4, 8), (4, 8), (4, 8)]
    assert kinds(outcome) == ["denoise", "denoise", "commit", "denoise", "denoise", "denoise"]


def test_inside_a_block_only_the_sub_block_is_run_while_its_first_slot_is_decided() -> None:
    """As above with keys kept inside the block: a sub-block whose first slot is open needs the row before it."""
    sampler = FastDLLMV2Sampler(block_size=8, sub_block_size=4, threshold=0.99, cache="dual")
    (outcome,) = decode(said(), sampler, [[5]], 7)
    assert canvases(outcome)[-1] == [1, 2, 3, 4, 5, 6, 7]
    # slots 2, 3, 1 and then 6, 5, 4, 7: the surest first; slot 4 heads its sub-block
    assert windows(outcome) == [(0, 8), (0, 4), (0, 4), (0, 8), (0, 8), (0, 8), (4, 8)]
    assert [record["changed"][0][0] for record in outcome.trace] == [2, 3, 1, 6, 5, 4, 7]


def test_a_prompt_of_whole_blocks_is_prefilled_and_begins_the_next_one() -> None:
    sampler = FastDLLMV2Sampler(block_size=4, sub_block_size=4, threshold=0.0)
    (outcome,) = decode(said(), sampler, [[5, 5, 5, 5]], 4)
    assert canvases(outcome) == [[4, M, M, M], [4, 5, 6, 7]]
    assert windows(outcome) == [(0, 4), (4, 8)] and kinds(outcome) == ["prefill", "denoise"]


def test_as_published_a_prompt_of_one_block_is_never_shown() -> None:
    """The block's first slot then has no row before it: it is told what its own row says of the next slot."""
    published = FastDLLMV2Sampler(block_size=4, sub_block_size=4, threshold=0.0, compat="fast_dllm_v2")
    (outcome,) = decode(said(), published, [[5, 5, 5, 5]], 4)
    assert canvases(outcome) == [[5, 5, 6, 7, M], [5, 5, 6, 7, 8]]
    assert [record["cached"] for record in outcome.trace] == [[4, 4], [4, 4]]
    assert windows(outcome) == [(4, 8), (4, 8)]


def test_a_model_that_predicts_a_slot_at_its_own_row_begins_a_block_in_its_first_sub_block() -> None:
    sampler = FastDLLMV2Sampler(block_size=4, sub_block_size=2, threshold=0.0)
    (outcome,) = decode(said(FACTS), sampler, [[5]], 7)
    assert canvases(outcome)[2:4] == [[1, 2, 3, M, M, M, M], [1, 2, 3, 4, 5, M, M]]
    assert kinds(outcome) == ["denoise", "denoise", "commit", "denoise", "denoise"]


def test_an_answer_ends_inside_a_block_once_nothing_before_its_end_token_is_open() -> None:
    """Slot 3 ends: it is committed before slot 2 is, and the block is left when that is done."""
    sampler = FastDLLMV2Sampler(block_size=8, sub_block_size=4, threshold=0.94)
    (outcome,) = decode(said(s2=END, s1=7), sampler, [[5]], 7)
    assert canvases(outcome) == [[M, END, M, M, M, M, M], [M, END, 3, M, M, M, M], [7, END, 3, M, M, M, M]]
    (whole,) = decode(said(s2=END), replace(sampler, early_stop=False), [[5]], 7)
    assert M not in tokens(whole)


def test_an_end_token_that_begins_a_block_is_the_last() -> None:
    sampler = FastDLLMV2Sampler(block_size=4, sub_block_size=4, threshold=0.0)
    (outcome,) = decode(said(s4=END), sampler, [[5]], 11)
    assert tokens(outcome)[:5] == [5, 1, 2, 3, END] and set(tokens(outcome)[5:]) == {M}
    assert kinds(outcome) == ["denoise", "commit"]


def test_the_threshold_is_to_be_exceeded() -> None:
    """Certain slots have probability 1 exactly: a threshold of 1 holds them back, so each goes as the surest."""
    certain = TableAdapter(SHIFTED, {slot: row(3, 1.0) for slot in range(9)})
    (outcome,) = decode(certain, FastDLLMV2Sampler(block_size=8, sub_block_size=8, threshold=1.0), [[5]], 7)
    assert outcome.counts()["nfe"] == 7


@pytest.mark.parametrize(("threshold", "forwards"), [(0.0, 4 * 4 + 3), (1.0, 4 * 31 + 3)])
def test_thresholds_of_0_and_1_are_the_two_limits(threshold: float, forwards: int) -> None:
    """Blocks of 32 in sub-blocks of 8: four forwards and one that stores, or one for each of the 31 slots left."""
    sampler = FastDLLMV2Sampler(threshold=threshold, early_stop=False)
    (outcome,) = decode(network(), sampler, prompts(1), 127)
    assert outcome.counts()["nfe"] == forwards


def test_the_canvas_has_whole_blocks_and_as_published_what_the_tokens_asked_for_leave_behind_the_prompts_tail() -> None:
    ours, published = FastDLLMV2Sampler(), FastDLLMV2Sampler(compat="fast_dllm_v2")
    for prompt, asked, length, theirs in ((3, 64, 93, 62), (32, 64, 64, 65), (40, 64, 88, 57), (40, 20, 24, 0)):
        assert ours.canvas_length(prompt, asked, SHIFTED) == length
        assert published.canvas_length(prompt, asked, SHIFTED) == theirs
    assert ours.canvas_length(3, 61, replace(SHIFTED, block_origin="prompt")) == 61


SAMPLERS = [
    FastDLLMV2Sampler(block_size=8, sub_block_size=4, threshold=0.3),
    FastDLLMV2Sampler(block_size=8, sub_block_size=3, threshold=0.2),
    FastDLLMV2Sampler(block_size=4, sub_block_size=8, threshold=0.9),
    FastDLLMV2Sampler(block_size=8, sub_block_size=4, threshold=0.2, temperature=0.8, top_k=5),
]


@pytest.mark.parametrize("origin", ["zero", "prompt"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_keys_of_decided_blocks_change_no_token_and_no_order(
    sampler: FastDLLMV2Sampler, shift: int, origin: str
) -> None:
    adapter, given = network(shift, origin), prompts(1, 5, 8, 19)
    plain, cached = (decode(adapter, replace(sampler, cache=kept), given, 32) for kept in ("none", "block"))
    for one, other in zip(plain, cached, strict=True):
        assert tokens(one) == tokens(other)
        made, remade = ([[c[:2] for c in r["changed"]] for r in o.trace if r["changed"]] for o in (one, other))
        assert made == remade
        assert other.counts()["token_forwards"] <= one.counts()["token_forwards"] + 8 * one.counts()["nfe_prefill"] + 40


@pytest.mark.parametrize("shift", [0, 1])
def test_keys_inside_a_block_are_exact_where_the_sub_block_is_the_block(shift: int) -> None:
    adapter, given = network(shift), prompts(1, 5, 8, 19)
    exact = FastDLLMV2Sampler(block_size=8, sub_block_size=8, threshold=0.3)
    for one, other in zip(
        decode(adapter, exact, given, 32), decode(adapter, replace(exact, cache="dual"), given, 32), strict=True
    ):
        assert tokens(one) == tokens(other) and windows(one) == windows(other) and kinds(one) == kinds(other)


@pytest.mark.parametrize("cache", ["none", "block", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_it_ends_leaves_no_mask_and_no_neighbour_matters(sampler: FastDLLMV2Sampler, shift: int, cache: str) -> None:
    given, adapter = prompts(3, 8, 12, 13, 21, 1), network(shift)
    sampler = replace(sampler, cache=cache, early_stop=False)
    alone, together = (decode(adapter, sampler, given, 30, rows) for rows in (1, 4))
    for prompt, one, other in zip(given, alone, together, strict=True):
        assert tokens(one) == tokens(other) and one.log == other.log
        assert tokens(one)[: len(prompt)] == prompt and MASK not in tokens(one)[len(prompt) :]
        assert len(tokens(one)) % sampler.block_size == 0 and len(tokens(one)) >= len(prompt) + 30
        blocks = len(tokens(one)) // sampler.block_size
        assert one.counts()["nfe"] <= len(tokens(one)) - len(prompt) + blocks + 1


def test_above_temperature_0_the_law_after_top_p_judges_as_published() -> None:
    """One id is left of each law: it is certain, and all go at once."""
    greedy = FastDLLMV2Sampler(block_size=8, sub_block_size=8, temperature=1.0, top_p=0.01)
    (ours,) = decode(said(), greedy, [[5]], 7)
    (published,) = decode(said(), replace(greedy, compat="fast_dllm_v2"), [[5]], 8)
    assert tokens(ours) == tokens(published)[:8] == [5, 1, 2, 3, 4, 5, 6, 7]
    assert (ours.counts()["nfe"], published.counts()["nfe"]) == (5, 2)  # the second forward is for the one token more


def test_options_out_of_range_are_refused() -> None:
    wrongs: dict[str, Any] = {
        "threshold": 1.5,
        "block_size": 0,
        "sub_block_size": 0,
        "cache": "prefix",
        "compat": "theirs",
    }
    for name, value in wrongs.items():
        with pytest.raises(ValueError, match=f"sampler.{name}={value} is out of range"):
            FastDLLMV2Sampler(**{name: value})


def test_it_takes_the_models_block_and_refuses_models_without_masks_or_blocks() -> None:
    assert FastDLLMV2Sampler.suited(replace(SHIFTED, trained_block=32)) == {"block_size": 32}
    with pytest.raises(ValueError, match="fills mask tokens"):
        FastDLLMV2Sampler.check(replace(SHIFTED, mask_id=None))
    with pytest.raises(ValueError, match="needs blocks attention"):
        FastDLLMV2Sampler.check(replace(SHIFTED, attention="full", attentions=frozenset({"full"})))
