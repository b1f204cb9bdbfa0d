"""SDAR's rules against traces worked by hand, and what caching and batching must leave alone."""

from __future__ import annotations

from typing import Any

import pytest

from samplers import ModelFacts, SdarSampler
from tests.block_causal import END, FACTS, M, canvases, decode, kinds, network, prompts, scripted, tokens
from tests.models import MASK

ONE_BLOCK = [([1, 2, 3, 4], [0.95, 0.90, 0.89, 0.20])] * 4


def test_static_commits_the_surest_and_sequential_the_first() -> None:
    static = SdarSampler(block_size=4, steps=2)
    (outcome,) = decode(scripted([([1, 2, 3, 4], [0.3, 0.5, 0.4, 0.6])] * 2), static, [[]], 4)
    assert canvases(outcome) == [[M, 2, M, 4], [1, 2, 3, 4]]
    sequential = SdarSampler(block_size=4, steps=2, order="left_to_right")
    (outcome,) = decode(scripted([([1, 2, 3, 4], [0.3, 0.5, 0.4, 0.6])] * 2), sequential, [[]], 4)
    assert canvases(outcome) == [[1, 2, M, M], [1, 2, 3, 4]]


def test_dynamic_commits_all_above_the_threshold_if_they_reach_the_quota() -> None:
    sampler = SdarSampler(block_size=4, steps=4, threshold=0.88)
    (outcome,) = decode(scripted(ONE_BLOCK), sampler, [[]], 4)
    assert canvases(outcome) == [[1, 2, 3, M], [1, 2, 3, 4]]
    sampler = SdarSampler(block_size=4, steps=2, threshold=0.92)  # one is above, two are due
    (outcome,) = decode(scripted(ONE_BLOCK), sampler, [[]], 4)
    assert canvases(outcome) == [[1, 2, M, M], [1, 2, 3, 4]]


def test_the_threshold_is_to_be_exceeded() -> None:
    """Certain slots have probability 1 exactly: a threshold of 1 holds them back, so each goes by quota."""
    certain = [([1, 2, 3, 4], [1.0] * 4)] * 4
    (outcome,) = decode(scripted(certain), SdarSampler(block_size=4, steps=4, threshold=1.0), [[]], 4)
    assert outcome.counts()["nfe"] == 4


def test_entropies_but_the_largest_fit_the_budget() -> None:
    """Entropies of 12 ids with p and the rest over 10: 0.9996: 0.0047, 0.99: 0.079, 0.9: 0.555, 0.5: 1.844 nats."""
    script = [([1, 2, 3, 4], [0.5, 0.9, 0.9996, 0.99])] * 4
    rounds = {}
    for budget in (0.0, 0.05, 0.1, 1.0):
        sampler = SdarSampler(block_size=4, steps=4, entropy_budget=budget, order="entropy")
        (outcome,) = decode(scripted(script), sampler, [[]], 4)
        rounds[budget] = [canvas.count(M) for canvas in canvases(outcome)]
    # 0.1: 0.0047 + 0.079 + (0.555); 1.0: 0.0047 + 0.079 + 0.555 + (1.844)
    assert rounds == {0.0: [3, 2, 1, 0], 0.05: [2, 1, 0], 0.1: [1, 0], 1.0: [0]}


def test_an_entropy_budget_yields_to_the_quota_and_works_in_any_order() -> None:
    script = [([1, 2, 3, 4], [0.5, 0.9, 0.9996, 0.99])] * 4
    (outcome,) = decode(scripted(script), SdarSampler(block_size=4, steps=2, entropy_budget=0.0), [[]], 4)
    assert canvases(outcome) == [[M, M, 3, 4], [1, 2, 3, 4]]
    rightwards = SdarSampler(block_size=4, steps=4, entropy_budget=0.6, order="left_to_right")
    (outcome,) = decode(scripted(script), rightwards, [[]], 4)
    assert canvases(outcome) == [[1, 2, 3, M], [1, 2, 3, 4]]  # 0.555 + 0.0047 beside 1.844; with 0.079 too much


def test_quotas_are_of_the_whole_block_and_never_more_than_its_masks() -> None:
    """Block of 8 in 3 steps is 3, 3, 2; a prompt of 13 leaves 3 masks in its last block: one step."""
    sampler = SdarSampler(block_size=8, steps=6, cache="block")
    (outcome,) = decode(network(), sampler, prompts(13), 11)
    assert [len(record["changed"]) for record in outcome.trace] == [0, 3, 0, 3, 3, 2]
    assert tokens(outcome)[:13] == prompts(13)[0] and MASK not in tokens(outcome)
    assert kinds(outcome) == ["prefill", "denoise", "commit", "denoise", "denoise", "denoise"]


def test_the_last_block_is_run_once_more_only_as_published() -> None:
    """4 slots in 4 steps cost 5 forwards; 3 blocks of the prompt are prefilled at once."""
    ours = SdarSampler(block_size=4, steps=8, cache="block")
    theirs = SdarSampler(block_size=4, steps=8, cache="block", compat="sdar")
    (mine,), (published,) = (decode(network(), sampler, prompts(12), 8) for sampler in (ours, theirs))
    assert tokens(mine) == tokens(published)
    assert (mine.counts()["nfe"], published.counts()["nfe"]) == (1 + 5 + 4, 1 + 5 + 5)
    assert [run.window for run in published.log] == [12] + [4] * 10


def test_nothing_runs_behind_a_block_with_an_end_token() -> None:
    script = [([1, END, 3, 4, 5, 6, 7, 8], [0.95] * 8)] * 4
    sure: dict[str, Any] = {"block_size": 4, "steps": 8, "threshold": 0.9, "cache": "block"}
    (stopped,) = decode(scripted(script), SdarSampler(**sure), [[]], 8)
    (whole,) = decode(scripted(script), SdarSampler(**sure, early_stop=False), [[]], 8)
    (published,) = decode(scripted(script), SdarSampler(**sure, compat="sdar"), [[]], 8)
    assert tokens(stopped) == tokens(published) == [1, END, 3, 4, M, M, M, M]
    assert tokens(whole) == [1, END, 3, 4, 5, 6, 7, 8]
    assert [kinds(outcome) for outcome in (stopped, whole, published)] == [
        ["denoise"],
        ["denoise", "commit", "denoise"],
        ["denoise", "commit"],
    ]


def test_a_block_is_left_once_nothing_before_its_end_token_is_open_and_finished_as_published() -> None:
    script = [([1, END, 3, 4], [0.95, 0.94, 0.5, 0.4])] * 4
    (ours,) = decode(scripted(script), SdarSampler(block_size=4, steps=4), [[]], 4)
    (published,) = decode(scripted(script), SdarSampler(block_size=4, steps=4, compat="sdar"), [[]], 4)
    assert canvases(ours) == [[1, M, M, M], [1, END, M, M]]
    assert canvases(published) == [[1, M, M, M], [1, END, M, M], [1, END, 3, M], [1, END, 3, 4]]


def test_top_1_at_temperature_1_is_certain_only_as_published() -> None:
    """SDAR's greedy setting judges by the law that is left of one id: the whole block goes at once."""
    greedy: dict[str, Any] = {"block_size": 4, "steps": 4, "threshold": 0.92, "temperature": 1.0, "top_k": 1}
    (published,) = decode(scripted(ONE_BLOCK), SdarSampler(**greedy, compat="sdar"), [[]], 4)
    (ours,) = decode(scripted(ONE_BLOCK), SdarSampler(**greedy), [[]], 4)
    assert tokens(published) == tokens(ours) == [1, 2, 3, 4]
    assert (published.counts()["nfe"], ours.counts()["nfe"]) == (1, 4)


SAMPLERS = [
    SdarSampler(block_size=8, steps=32),
    SdarSampler(block_size=8, steps=12, order="left_to_right"),
    SdarSampler(block_size=4, steps=32, threshold=0.3),
    SdarSampler(block_size=8, steps=32, entropy_budget=1.5, order="entropy"),
    SdarSampler(block_size=8, steps=32, threshold=0.2, temperature=0.8, top_k=5),
]


@pytest.mark.parametrize("origin", ["zero", "prompt"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_caching_changes_no_token_and_no_order(sampler: SdarSampler, origin: str) -> None:
    given = prompts(1, 5, 8, 19)
    adapter = network(origin)
    cached = type(sampler)(**{**vars_of(sampler), "cache": "block"})
    for one, other in zip(decode(adapter, sampler, given, 32), decode(adapter, cached, given, 32), strict=True):
        assert tokens(one) == tokens(other)
        made = [[change[:2] for change in record["changed"]] for record in one.trace]
        assert made == [[c[:2] for c in r["changed"]] for r in other.trace if r["kind"] == "denoise"]
        assert other.counts()["nfe_denoise"] == one.counts()["nfe"]
        assert other.counts()["token_forwards"] <= one.counts()["token_forwards"]


def vars_of(sampler: SdarSampler) -> dict[str, Any]:
    return {name: getattr(sampler, name) for name in sampler.options()}


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_it_ends_leaves_no_mask_and_no_neighbour_matters(sampler: SdarSampler, cache: str) -> None:
    given, adapter = prompts(3, 8, 12, 13, 21, 0), network()
    sampler = type(sampler)(**{**vars_of(sampler), "cache": cache, "early_stop": False})
    alone, together = (decode(adapter, sampler, given, 30, rows) for rows in (1, 4))
    for prompt, one, other in zip(given, alone, together, strict=True):
        assert tokens(one) == tokens(other) and one.log == other.log
        assert tokens(one)[: len(prompt)] == prompt and MASK not in tokens(one)[len(prompt) :]
        assert len(tokens(one)) % sampler.block_size == 0 and len(tokens(one)) >= len(prompt) + 30
        blocks = -(-len(tokens(one)) // sampler.block_size) - len(prompt) // sampler.block_size
        assert one.counts()["nfe_denoise"] <= blocks * sampler.steps_per_block(one.state)  # type: ignore[arg-type]


@pytest.mark.parametrize(("threshold", "denoising"), [(0.0, 4), (1.0, 32)])
def test_thresholds_of_0_and_1_are_the_two_limits(threshold: float, denoising: int) -> None:
    sampler = SdarSampler(block_size=8, steps=32, threshold=threshold, early_stop=False, cache="block")
    (outcome,) = decode(network(), sampler, prompts(8), 32)
    assert outcome.counts()["nfe_denoise"] == denoising and outcome.counts()["nfe_commit"] == 3


def test_two_rules_at_once_and_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=0.9 and sampler.entropy_budget=0.3 are two rules"):
        SdarSampler(block_size=4, steps=4, threshold=0.9, entropy_budget=0.3)
    out_of_range: list[dict[str, Any]] = [{"threshold": 1.5}, {"entropy_budget": -1.0}, {"compat": "theirs"}]
    for wrong in out_of_range:
        with pytest.raises(ValueError, match=f"sampler.{next(iter(wrong))}="):
            SdarSampler(block_size=4, steps=4, **wrong)
    with pytest.raises(AssertionError, match="at least one for each block of 4 slots"):  # the sample's failure
        decode(network(), SdarSampler(block_size=4, steps=1), prompts(4), 8)


def test_another_model_may_be_tried_with_the_cache_that_it_can_have() -> None:
    full = ModelFacts(10, 9, frozenset(), attention="full")
    SdarSampler.check(full)
    assert SdarSampler.suited(full) == {"cache": "none"} and SdarSampler.suited(FACTS) == {"cache": "block"}
