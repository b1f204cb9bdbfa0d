"""LLaDA2's rule and its token editing against traces worked by hand, and what caching and batching must leave alone."""

from __future__ import annotations

from typing import Any

import pytest

from samplers import Llada2Sampler
from tests.block_causal import END, M, canvases, decode, kinds, network, prompts, scripted, tokens
from tests.models import MASK

# what four forwards on a block of 4 say: tokens and their probabilities
WORKED = [
    ([5, 6, 7, 8], [0.90, 0.60, 0.30, 0.80]),
    ([5, 6, 7, 9], [0.95, 0.65, 0.40, 0.55]),
    ([5, 6, 7, 9], [0.99, 0.90, 0.60, 0.80]),
    ([5, 6, 7, 9], [0.99, 0.95, 0.90, 0.90]),
]


def trace(script: Any, given: list[int] | None = None, length: int = 4, **options: Any) -> list[list[int]]:
    sampler = Llada2Sampler(**{"block_size": 4, "steps": length, "threshold": 0.7, **options})
    (outcome,) = decode(scripted(script, len(given or [])), sampler, [given or []], length)
    return canvases(outcome)


@pytest.mark.parametrize("cache", ["none", "block"])
def test_the_worked_traces(cache: str) -> None:
    filling = [[5, M, M, 8], [5, 6, M, 8], [5, 6, 7, 8]]
    assert trace(WORKED, cache=cache) == filling
    assert trace(WORKED, cache=cache, editing_threshold=0.9) == [*filling, [5, 6, 7, 8]]  # 0.9 does not exceed 0.9
    edited = [[5, M, M, 8], [5, 6, M, 9], [5, 6, 7, 9], [5, 6, 7, 9]]
    assert trace(WORKED, cache=cache, editing_threshold=0.5) == edited


def test_an_editing_threshold_of_0_follows_every_change_and_null_none() -> None:
    unsure = [([5, 6, 7, 8], [0.9] * 4), ([6, 6, 7, 8], [0.2] * 4), ([6, 6, 7, 8], [0.2] * 4)]
    assert trace(unsure) == [[5, 6, 7, 8]]
    assert trace(unsure, editing_threshold=0.0) == [[5, 6, 7, 8], [6, 6, 7, 8], [6, 6, 7, 8]]


def test_thresholds_are_to_be_exceeded() -> None:
    """Certain slots have probability 1 exactly, which does not exceed 1: one slot a step, and no edits."""
    certain = [([5, 6, 7, 8], [1.0] * 4)] * 4 + [([1, 2, 3, 4], [1.0] * 4)]
    held_back = trace(certain, threshold=1.0, editing_threshold=1.0)
    assert len(held_back) == 5 and held_back[-1] == [5, 6, 7, 8]


def test_a_block_that_never_settles_is_left_after_its_post_steps() -> None:
    flipping = [([5 + step % 2, 6, 7, 8], [0.9] * 4) for step in range(40)]
    for most in (0, 1, 5, 16):
        assert len(trace(flipping, editing_threshold=0.5, max_post_steps=most)) == 1 + most
    # published: 16, but diffusers' pipeline makes one more
    assert len(trace(flipping, editing_threshold=0.5)) == 17
    assert len(trace(flipping, editing_threshold=0.5, compat="diffusers")) == 18
    assert len(trace(flipping, compat="diffusers")) == 2


def test_diffusers_leaves_a_block_unedited_that_took_all_its_steps() -> None:
    slow = [([5, 6, 7, 8], [0.6, 0.5, 0.4, 0.3])] * 4 + [([1, 2, 3, 4], [0.6] * 4)] * 9
    assert trace(slow, editing_threshold=0.55, compat="diffusers")[-1] == [5, 6, 7, 8]
    assert trace(slow, editing_threshold=0.55)[-1] == [1, 2, 3, 4]


def test_the_prompts_tail_is_never_edited() -> None:
    """Tail and canvas share the first block; the model would like to change all of it."""
    adapter, sampler = network(), Llada2Sampler(block_size=8, steps=16, threshold=0.3, editing_threshold=0.0)
    for outcome in decode(adapter, sampler, prompts(5, 11), 16):
        assert tokens(outcome)[: len(outcome.task.prompt)] == outcome.task.prompt


def test_steps_are_a_least_progress_also_below_the_threshold() -> None:
    """Block of 4 in 2 steps: two at a time, the surest first."""
    assert trace([([5, 6, 7, 8], [0.3, 0.5, 0.4, 0.6])] * 2, steps=2) == [[M, 6, M, 8], [5, 6, 7, 8]]


def test_minimal_topk_caps_the_steps_of_a_block() -> None:
    """8 tokens asked for and at least 4 a step leave a block of 8 two steps; in blocks of 2 it binds nothing."""
    unsure = [(list(range(8)), [0.3] * 8)] * 8
    assert len(trace(unsure, length=8, block_size=8, minimal_topk=4)) == 2
    assert len(trace(unsure, length=8, block_size=2, minimal_topk=4)) == 8


# slot 1 ends the answer; slot 0 is decided last but one, slot 2 last
ENDING = [([5, END, 7, 8], [0.40, 0.90, 0.20, 0.30])] * 4


def test_an_answer_is_done_once_nothing_before_its_end_token_is_open() -> None:
    assert trace(ENDING, length=8) == [[M, END] + [M] * 6, [5, END] + [M] * 6]
    assert len(trace(ENDING * 2, length=4, early_stop=False)) == 4
    # published: looks only at the step that commits an end token, and else finishes the block
    assert len(trace(ENDING, length=8, compat="llada2")) == 4
    assert len(trace(ENDING, length=8, compat="llada2", early_stop=False)) == 4
    sure = [([5, END, 7, 8], [0.9, 0.8, 0.2, 0.2])] * 4
    assert len(trace(sure, length=8, compat="llada2")) == 1
    assert len(trace(sure, length=8, compat="llada2", early_stop=False)) == 3


def test_with_editing_an_answer_is_done_once_its_block_is_settled() -> None:
    """An end token may be edited away: the block is finished first, but for diffusers' pipeline."""
    change = [([5, END, 7, 8], [0.9, 0.9, 0.2, 0.2]), *[([5, 6, 7, 8], [0.9] * 4)] * 2]
    assert trace(change, editing_threshold=0.5) == [[5, END, M, M], [5, 6, 7, 8], [5, 6, 7, 8]]
    assert trace(change, editing_threshold=0.5, compat="diffusers") == [[5, END, M, M]]
    first = [([END, 6, 7, 8], [0.9, 0.9, 0.2, 0.2]), *[([5, 6, 7, 8], [0.9] * 4)] * 3]
    assert len(trace(first, editing_threshold=0.5, compat="diffusers")) == 3


def test_top_1_at_temperature_1_is_certain_only_as_published() -> None:
    greedy: dict[str, Any] = {"threshold": 0.95, "temperature": 1.0, "top_k": 1}
    assert len(trace(WORKED, **greedy, compat="llada2")) == 1
    assert len(trace(WORKED, **greedy)) == 4


def test_without_editing_it_is_the_editing_rule_that_never_edits_less_a_forward_a_block() -> None:
    plain = Llada2Sampler(block_size=8, steps=32, threshold=0.3, early_stop=False)
    never = Llada2Sampler(block_size=8, steps=32, threshold=0.3, editing_threshold=1.0, early_stop=False)
    given, adapter = prompts(8, 16), network()
    for one, other in zip(decode(adapter, plain, given, 32), decode(adapter, never, given, 32), strict=True):
        assert tokens(one) == tokens(other)
        assert other.counts()["nfe"] == one.counts()["nfe"] + 4


SAMPLERS: list[dict[str, Any]] = [
    {"threshold": 0.3},
    {"threshold": 0.9, "steps": 12},
    {"threshold": 0.3, "editing_threshold": 0.2, "max_post_steps": 5},
    {"threshold": 0.3, "editing_threshold": 0.0, "block_size": 4, "max_post_steps": 3},
    {"threshold": 0.2, "editing_threshold": 0.3, "temperature": 0.8, "top_p": 0.9, "max_post_steps": 4},
]


@pytest.mark.parametrize("origin", ["zero", "prompt"])
@pytest.mark.parametrize("options", SAMPLERS, ids=range(len(SAMPLERS)))
def test_caching_changes_no_token_and_no_order(options: dict[str, Any], origin: str) -> None:
    given, adapter = prompts(1, 5, 8, 19), network(origin)
    plain, cached = (Llada2Sampler(**{"block_size": 8, "steps": 32, **options, "cache": c}) for c in ("none", "block"))
    for one, other in zip(decode(adapter, plain, given, 32), decode(adapter, cached, given, 32), strict=True):
        assert tokens(one) == tokens(other)
        made = [[change[:2] for change in record["changed"]] for record in one.trace]
        assert made == [[c[:2] for c in r["changed"]] for r in other.trace if r["kind"] == "denoise"]
        assert one.state.revised == other.state.revised  # type: ignore[union-attr]
        assert kinds(one) == ["denoise"] * len(one.log)


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("options", SAMPLERS, ids=range(len(SAMPLERS)))
def test_it_ends_leaves_no_mask_and_no_neighbour_matters(options: dict[str, Any], cache: str) -> None:
    given, adapter = prompts(3, 8, 12, 13, 21, 0), network()
    sampler = Llada2Sampler(**{"block_size": 8, "steps": 32, **options, "cache": cache, "early_stop": False})
    alone, together = (decode(adapter, sampler, given, 30, rows) for rows in (1, 4))
    posts = 0 if sampler.editing_threshold is None else sampler.max_post_steps
    for prompt, one, other in zip(given, alone, together, strict=True):
        assert tokens(one) == tokens(other) and one.log == other.log
        assert tokens(one)[: len(prompt)] == prompt and MASK not in tokens(one)[len(prompt) :]
        blocks = -(-len(tokens(one)) // sampler.block_size) - len(prompt) // sampler.block_size
        steps = sampler.steps_per_block(one.state) + posts  # type: ignore[arg-type]
        assert one.counts()["nfe_denoise"] <= blocks * steps


@pytest.mark.parametrize(("threshold", "forwards"), [(0.0, 4), (1.0, 32)])
def test_thresholds_of_0_and_1_are_the_two_limits(threshold: float, forwards: int) -> None:
    sampler = Llada2Sampler(block_size=8, steps=32, threshold=threshold, early_stop=False)
    (outcome,) = decode(network(), sampler, prompts(8), 32)
    assert outcome.counts()["nfe"] == forwards


def test_options_out_of_range_are_refused() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"editing_threshold": 1.5},
        {"max_post_steps": -1},
        {"minimal_topk": 0},
        {"compat": "sdar"},
    )
    for option in wrong:
        with pytest.raises(ValueError, match=f"sampler.{next(iter(option))}="):
            Llada2Sampler(block_size=4, steps=4, **option)
