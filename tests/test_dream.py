"""Dream's rule and Fast-dLLM's port of it, against traces worked by hand and properties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import torch

from adapters.toy import TableAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import BlockDiffusionSampler, DreamSampler, FastDLLMDreamSampler, ModelFacts, Sampler, stream_key
from samplers.schedule import portion, share
from tests.models import MASK, random_llama

VOCABULARY = 10
FULL = ModelFacts(VOCABULARY, 9, frozenset({8}), shift=1)


def row(probability: float, token: int = 1) -> list[float]:
    """Logits that give ``token`` this probability and share the rest evenly."""
    rest = (1 - probability) / (VOCABULARY - 1)
    return [math.log(probability if i == token else rest) for i in range(VOCABULARY)]


def run(adapter: Any, sampler: Sampler, length: int, stream: int = 0, prompt: tuple[int, ...] = (2,)) -> Outcome:
    task = Task(0, list(prompt), length, stream, traced=True)
    (outcome,) = Engine(adapter, sampler, max_rows=1).decode([task], len(prompt) + length)
    assert outcome.state is not None and outcome.failure is None, outcome.error
    return outcome


def decided(outcome: Outcome) -> list[list[int]]:
    """Slots of the canvas that each forward decided, counted from the prompt's end, in the order of their decision."""
    assert outcome.state is not None
    first = outcome.state.prompt_length
    return [[slot - first for slot, _, _ in record["changed"]] for record in outcome.trace]


def counts(outcome: Outcome) -> list[int]:
    return [len(step) for step in decided(outcome)]


def scripted(*confidences: float) -> TableAdapter:
    """A model that is as sure of each slot of the canvas as it is told, behind a prompt of one token."""
    rows = {1 + i: row(confidence) for i, confidence in enumerate(confidences)}
    return TableAdapter(FULL, lambda tokens, slot: rows.get(slot, [0.0] * VOCABULARY))


def even(length: int) -> TableAdapter:
    return scripted(*(0.5 + 0.4 * i / length for i in range(length)))


# ---- the schedule ----------------------------------------------------------------------------------------------------


def revealed(slots: int, steps: int, eps: float = 1e-3) -> list[int]:
    out = []
    for step in range(steps):
        out.append(portion(slots, share(step, steps, eps)))
        slots -= out[-1]
    return out


@pytest.mark.parametrize(
    ("slots", "steps", "expected"),
    [
        (8, 8, [0, *[1] * 6, 2]),
        *((n, n, [0, *[1] * (n - 2), 2]) for n in (128, 256, 512, 768)),
        *((n, n, [0, 0, *[1] * (n - 3), 3]) for n in (1024, 1280)),
        *((2 * n, n, [1, *[2] * (n - 2), 3]) for n in (128, 256)),
        *((4 * n, n, [3, *[4] * (n - 2), 5]) for n in (64, 128)),
    ],
)
def test_truncation_shifts_tokens_from_the_first_steps_to_the_last(slots: int, steps: int, expected: list[int]) -> None:
    assert revealed(slots, steps) == expected


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="linspace rounds twice")
def test_shares_equal_float32_tensors_bit_for_bit() -> None:
    for eps in (1e-3, 0.05):
        for steps in [*range(1, 65), 333, 512]:
            times = torch.linspace(1, eps, steps + 1)
            for step in range(steps - 1):
                assert share(step, steps, eps) == (1 - times[step + 1] / times[step]).item()


# ---- Dream -----------------------------------------------------------------------------------------------------------


def test_the_first_step_of_one_token_a_step_decides_nothing_and_the_surest_go_first() -> None:
    outcome = run(scripted(0.3, 0.9, 0.5, 0.7, 0.6, 0.8, 0.4, 0.2), DreamSampler(block_size=8, steps=8), 8)
    assert decided(outcome) == [[], [1], [5], [3], [4], [2], [6], [0, 7]]


@pytest.mark.parametrize("order", ["probability", "margin", "entropy", "random", "left_to_right"])
@pytest.mark.parametrize("steps", [1, 3, 12, 40])
def test_exactly_the_steps_asked_are_made_and_nothing_stays_open(order: str, steps: int) -> None:
    adapter = even(12)
    outcome = run(adapter, DreamSampler(block_size=12, steps=steps, order=order), 12)
    assert outcome.counts()["nfe"] == adapter.calls == steps and sum(counts(outcome)) == 12


def test_blocks_share_the_steps_and_are_decided_in_turn() -> None:
    outcome = run(even(16), DreamSampler(block_size=8, steps=16), 16)
    assert counts(outcome) == [0, 1, 1, 1, 1, 1, 1, 2] * 2
    assert all(slot // 8 == forward // 8 for forward, step in enumerate(decided(outcome)) for slot in step)


def test_random_decides_each_slot_apart_with_the_steps_share() -> None:
    """Of 64 slots in 4 steps each leaves a step with probability 1 - s / t: close to a quarter of all, not exactly."""
    adapter, sampler = even(64), DreamSampler(block_size=64, steps=4, order="random")
    tallies = [counts(run(adapter, sampler, 64, stream_key(0, sample))) for sample in range(60)]
    assert len({tally[0] for tally in tallies}) > 5
    for step in range(4):
        mean, deviation = 16, math.sqrt(64 * 0.25 * 0.75 / 60)
        assert abs(sum(tally[step] for tally in tallies) / 60 - mean) < 4 * deviation


SURE = (0.6, 0.5, 0.2, 0.4)


def pairs(heat: float, count: int) -> Counter[frozenset[int]]:
    """The two of four slots that the first of two steps takes, over many streams; at eps 0 its share is a half."""
    sampler = DreamSampler(block_size=4, steps=2, order_temperature=heat, schedule_eps=0.0)
    adapter = scripted(*SURE)
    return Counter(frozenset(decided(run(adapter, sampler, 4, stream_key(1, i)))[0]) for i in range(count))


def test_order_temperature_draws_one_after_the_other_without_replacement() -> None:
    """A pair comes by exp(confidence / heat): the first of all four, the second of the three left."""
    from scipy.stats import chisquare

    heat, count = 0.2, 1500
    weights = [math.exp(confidence / heat) for confidence in SURE]
    chance = dict.fromkeys((frozenset(pair) for pair in combinations(range(4), 2)), 0.0)
    for first, second in permutations(range(4), 2):
        chance[frozenset((first, second))] += (
            weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        )
    drawn = pairs(heat, count)
    assert chisquare([drawn[pair] for pair in chance], [count * p for p in chance.values()]).pvalue > 1e-3


def test_order_temperature_has_its_two_limits() -> None:
    assert set(pairs(1e-6, 20)) == {frozenset({0, 1})}
    assert min(pairs(1e6, 300)[frozenset(pair)] for pair in combinations(range(4), 2)) > 25


def test_the_published_confidence_is_of_the_filtered_law_and_raw_of_the_plain_one() -> None:
    """With the best id alone all are certain, so the lowest slot goes first; the plain law knows slot 2 best."""
    first = {}
    for judged in ("filtered", "raw"):
        sampler = DreamSampler(block_size=3, steps=4, top_k=1, judged=judged)
        first[judged] = next(filter(None, decided(run(scripted(0.4, 0.5, 0.6), sampler, 3))))
    assert first == {"filtered": [0], "raw": [2]}


def test_the_nucleus_is_cut_before_the_best_are() -> None:
    """0.55 of 0.4, 0.3, 0.2, 0.1 is the first two; of the best two alone the first would do, with 0.571."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1 - 6e-9, *[1e-9] * 6)]
    sampler = DreamSampler(block_size=1, steps=1, top_p=0.55, top_k=2)
    outcome = run(TableAdapter(FULL, lambda tokens, slot: logits), sampler, 1)
    assert outcome.state is not None
    assert outcome.state.confidences[1] == pytest.approx(0.4 / 0.7, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order_temperature": -1.0}, "order_temperature=-1.0 is out of range"),
        ({"order_temperature": 0.5, "order": "random"}, "does not go with sampler.order=random"),
        ({"schedule_eps": 1.0}, "schedule_eps=1.0 is out of range"),
        ({"judged": "plain"}, "judged=plain is out of range: use one of filtered, tempered, raw"),
    ],
)
def test_settings_of_dream_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DreamSampler(block_size=4, steps=4, **options)


# ---- Fast-dLLM on Dream ----------------------------------------------------------------------------------------------


def fast(block_size: int = 4, steps: int = 4, cache: str = "dual", **options: Any) -> FastDLLMDreamSampler:
    return FastDLLMDreamSampler(block_size=block_size, steps=steps, cache=cache, **options)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cached_block_takes_its_first_slot_whatever_its_confidence(cache: str) -> None:
    outcome = run(scripted(0.2, 0.95, 0.5, 0.92), fast(cache=cache, threshold=0.9), 4)
    assert decided(outcome) == [[0], [1, 3], [2]]


@pytest.mark.parametrize(
    ("cache", "windows"),
    [
        ("prefix", [(0, 9, 0), (1, 9, 1), (0, 9, 0), (5, 9, 5)]),
        ("dual", [(0, 9, 0), (1, 5, 9), (0, 9, 0), (5, 9, 9)]),
    ],
)
def test_later_forwards_of_a_cached_block_begin_at_it(cache: str, windows: list[tuple[int, int, int]]) -> None:
    outcome = run(scripted(*[0.95] * 8), fast(steps=8, cache=cache, threshold=0.9), 8)
    assert [(*record["window"], record["cached"][1]) for record in outcome.trace] == windows
    assert [record["kind"] for record in outcome.trace] == ["denoise", "denoise", "refresh", "denoise"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(32, [1, 0, *[1] * 29, 2]), (16, [1, *[2] * 14, 3]), (8, [1, *[4] * 5, 5, 6]), (2, [1, 31]), (1, [32])],
)
def test_without_a_threshold_a_cached_block_skips_the_schedules_first_share(steps: int, expected: list[int]) -> None:
    for cache in ("prefix", "dual"):
        assert counts(run(even(32), fast(32, steps, cache, order="entropy"), 32)) == expected


def test_uncached_tokens_that_are_not_sure_are_due_again() -> None:
    """Two are due a step. 0.4 and 0.3 are tried with those of the next step, and then each takes a forward more."""
    sampler = fast(steps=2, cache="none", threshold=0.9)
    assert decided(run(scripted(0.95, 0.92, 0.5, 0.3), sampler, 4)) == [[0, 1], [2], [3]]
    assert decided(run(scripted(0.95, 0.5, 0.4, 0.3), sampler, 4)) == [[0], [1], [2], [3]]
    assert decided(run(scripted(0.95, 0.5, 0.4, 0.3), replace(sampler, threshold=0.45), 4)) == [[0, 1], [2], [3]]


def test_the_uncached_threshold_is_never_faster_than_its_steps() -> None:
    for steps in (1, 2, 3, 4, 8):
        outcome = run(scripted(*[0.99] * 8), fast(8, steps, "none", threshold=0.9), 8)
        assert outcome.counts()["nfe"] == steps and sum(counts(outcome)) == 8


def test_thresholds_have_their_two_limits() -> None:
    adapter = even(8)
    for cache, fewest in (("prefix", 4), ("dual", 4), ("none", 2)):
        at_once = run(adapter, fast(4, 2, cache, threshold=0.0), 8)
        one_by_one = run(adapter, fast(4, 2, cache, threshold=1.0), 8)
        assert (at_once.counts()["nfe"], one_by_one.counts()["nfe"]) == (fewest, 8)


def test_a_block_of_one_slot_takes_one_forward_or_two_as_in_their_code() -> None:
    assert counts(run(scripted(0.5, 0.5), fast(1, 2, threshold=0.9), 2)) == [1, 1]
    assert counts(run(scripted(0.5, 0.5), fast(1, 2, threshold=0.9, compat="fastdllm"), 2)) == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "none"}, "threshold=null with sampler.cache=none is Dream's own rule: use sampler=dream"),
        ({"threshold": 1.5}, "threshold=1.5 is out of range"),
        ({"schedule_eps": -0.1}, "schedule_eps=-0.1 is out of range"),
        ({"compat": "fastdllm_a"}, "compat=fastdllm_a is out of range: use null or fastdllm"),
    ],
)
def test_settings_of_fast_dllm_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fast(**options)


# ---- both ------------------------------------------------------------------------------------------------------------

ALL: list[BlockDiffusionSampler] = [
    DreamSampler(block_size=24, steps=9),
    DreamSampler(block_size=8, steps=24, order="entropy", temperature=0.8, top_p=0.9),
    DreamSampler(block_size=12, steps=8, order="margin", order_temperature=0.3, cache="prefix"),
    DreamSampler(block_size=24, steps=6, order="random", cache="dual"),
    fast(8, 24, "prefix", threshold=0.3),
    fast(8, 24, "dual", threshold=0.3, temperature=0.8),
    fast(24, 4, "none", threshold=0.3),
    fast(8, 12, "dual", order="entropy"),
]


def stirred(tokens: Mapping[int, int], slot: int) -> list[float]:
    mixed = (slot * 7919 + sum(tokens.values()) * 104_729) % 8
    return [2.5 if i == mixed else 0.1 * ((slot + i) % 3) for i in range(VOCABULARY)]


@pytest.mark.parametrize("sampler", ALL, ids=lambda s: f"{s.method_name}-{s.order}-{s.cache}-{s.block_size}")
def test_all_slots_are_decided_once_and_the_prompt_stays(sampler: BlockDiffusionSampler) -> None:
    adapter = TableAdapter(FULL, stirred)
    outcome = run(adapter, sampler, 24, stream=11, prompt=(3, 9, 4))
    assert outcome.state is not None and outcome.state.tokens[:3] == [3, 9, 4]
    assert 9 not in outcome.state.tokens[3:] and outcome.counts()["nfe"] == adapter.calls
    assert sorted(slot for step in decided(outcome) for slot in step) == list(range(24))


@pytest.mark.parametrize("sampler", ALL, ids=lambda s: f"{s.method_name}-{s.order}-{s.cache}-{s.block_size}")
def test_a_batch_equals_its_rows(sampler: BlockDiffusionSampler) -> None:
    def decode(max_rows: int) -> list[tuple[list[int], list[int]]]:
        adapter = random_llama()
        adapter.facts = replace(adapter.facts, shift=1)
        tasks = [Task(i, [5 + i] * (3 + 2 * i), 24, stream_key(3, i), traced=True) for i in range(5)]
        outcomes = sorted(Engine(adapter, sampler, max_rows).decode(tasks, 40), key=lambda o: o.task.index)
        return [(o.state.tokens, counts(o)) for o in outcomes if o.state and not o.failure]

    alone = decode(1)
    assert len(alone) == 5 and alone == decode(4)
    assert all(MASK not in tokens for tokens, _ in alone)


@pytest.mark.parametrize(
    "sampler",
    [DreamSampler(block_size=8, steps=12, order="entropy"), fast(8, 12, "none", threshold=0.3)],
    ids=lambda s: s.method_name,
)
@pytest.mark.parametrize("origin", ["prompt", "zero"])
def test_a_cache_of_blocks_changes_no_token(sampler: BlockDiffusionSampler, origin: str) -> None:
    adapter = random_llama()
    facts = replace(adapter.facts, attention="blocks", attentions=frozenset({"blocks"}), block_origin=origin)
    adapter.facts = facts
    prompt = (7, 3, 9, 4, 4, 1, 2, 6, 5, 11)
    length = sampler.canvas_length(len(prompt), 24, facts)

    def said(cache: str) -> tuple[list[int], list[list[int]]]:
        outcome = run(adapter, replace(sampler, cache=cache), length, stream=5, prompt=prompt)
        assert outcome.state is not None
        return outcome.state.tokens, [step for step in decided(outcome) if step]

    assert said("none") == said("block")
