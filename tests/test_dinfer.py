"""dInfer's decoders against traces worked by hand, its keys stored in passing, and what must not change a token."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.base import Request, group_key
from adapters.readout import ReadOut
from samplers import BlockThresholdSampler, CreditSampler, Forward, HierarchySampler, ModelFacts, Prediction
from samplers.block_threshold import as_sure_as
from samplers.hierarchy import runs
from tests.block_causal import END, FACTS, SIZE, M, canvases, decode, kinds, network, prompts, scripted, tokens
from tests.models import MASK, random_llama
from tests.shared import shared

# ---- which slots -----------------------------------------------------------------------------------------------------


PREDICTED_AS_MASK = 0.5739099  # a slot that their decoder passes over; here the mask is never predicted


def test_what_the_authors_threshold_decoder_takes() -> None:
    vectors = json.loads(shared("golden", "units", "units.json").read_text())["dinfer_transfer_threshold"]
    for vector in vectors:
        sampler = BlockThresholdSampler(block_size=8, steps=8, threshold=vector["threshold"])
        sure = dict(enumerate(vector["max_probs"]))
        chosen = sampler.chosen([i for i in sure if vector["mask"][i] and sure[i] != PREDICTED_AS_MASK], sure)
        assert [int(slot in chosen) for slot in range(8)] == vector["selected"]
    assert len(vectors) > 20


def test_what_is_as_sure_as_the_surest_but_for_rounding_goes_with_it() -> None:
    assert as_sure_as(0.9, [0.5, 0.3]) == pytest.approx(0.5 - 1e-5) and as_sure_as(0.9, [0.95]) == 0.9
    sampler = BlockThresholdSampler(block_size=4, steps=4, threshold=0.9)
    assert sampler.chosen([0, 1, 2], {0: 0.5, 1: 0.5 - 9e-6, 2: 0.5 - 2e-5}) == [0, 1]
    assert sampler.chosen([0, 1, 2], {0: 0.9, 1: 0.91, 2: 0.899}) == [0, 1]
    assert sampler.chosen([], {}) == []


def test_each_run_of_masks_gives_its_surest_if_that_is_fairly_sure() -> None:
    sampler = HierarchySampler(block_size=8, steps=8, threshold=0.8, low_threshold=0.4)
    sure = {0: 0.5, 1: 0.3, 3: 0.35, 4: 0.2, 6: 0.7, 7: 0.9}
    assert runs(sorted(sure)) == [[0, 1], [3, 4], [6, 7]]
    assert sampler.chosen(sorted(sure), sure) == [0, 7]
    assert sampler.chosen([3, 4], sure) == [3]  # nobody is sure: the surest of all
    assert sampler.chosen([6, 7], sure | {6: 0.81}) == [6, 7]
    assert sampler.chosen([0], {0: 0.4}) == [0] and runs([]) == []
    assert sampler.chosen([0, 2], {0: 0.4, 2: 0.5}) == [2]  # both thresholds are to be exceeded


def test_a_block_is_split_again_and_again() -> None:
    script = [([1, 2, 3, 4, 5, 6, 7, 8], [0.1, 0.2, 0.5, 0.6, 0.65, 0.5, 0.2, 0.1])] * 8
    sampler = HierarchySampler(block_size=8, steps=8, threshold=0.9, low_threshold=0.05)
    (outcome,) = decode(scripted(script), sampler, [[]], 8)
    assert [[slot for slot, *_ in record["changed"]] for record in outcome.trace] == [[4], [3, 5], [2, 6], [1, 7], [0]]


def test_fewer_steps_commit_more() -> None:
    script = [([1, 2, 3, 4], [0.3, 0.5, 0.4, 0.6])] * 2
    for sampler in (BlockThresholdSampler(block_size=4, steps=2), HierarchySampler(block_size=4, steps=2)):
        (outcome,) = decode(scripted(script), sampler, [[]], 4)
        assert canvases(outcome) == [[M, 2, M, 4], [1, 2, 3, 4]]


# ---- credit ----------------------------------------------------------------------------------------------------------


def test_credit_grows_with_a_token_that_is_kept_to_and_decays() -> None:
    """One slot says 3 three times with 0.5: 1 id has credit, which raises its probability against all others'."""
    sampler = CreditSampler(block_size=2, steps=2, threshold=0.75, boost_gamma=1.0)
    script = [([1, 3], [0.9, 0.5]), ([1, 3], [0.9, 0.5]), ([1, 3], [0.9, 0.5])]
    (outcome,) = decode(scripted(script), sampler, [[]], 2)
    first = (0.9 * 1.9**0.7) / (1 + 0.9 * (1.9**0.7 - 1))
    credit = 0.8 * 0.5 + 0.5
    second = (0.5 * (1 + credit) ** 0.7) / (1 + 0.5 * ((1 + credit) ** 0.7 - 1))
    changed = [record["changed"] for record in outcome.trace]
    assert changed == [[[0, 1, pytest.approx(first, abs=1e-6)]], [[1, 3, pytest.approx(second, abs=1e-6)]]]


def test_a_credited_token_can_win_against_the_likeliest() -> None:
    """Slot 1 said 3 with 0.6 and now 4 with 0.35 before 3 with 0.3: 0.3 (1 + C)^alpha is more with enough credit."""
    rows = iter([{3: 0.6}, {3: 0.6}, {4: 0.35, 3: 0.3}, {4: 0.35, 3: 0.3}])
    rest = {"alpha": 2.0, "boost_gamma": 0.0, "decay_beta": 1.0, "threshold": 1.0}
    sampler = CreditSampler(block_size=4, steps=4, **rest)
    given = Prediction((1,), {1: 3}, {1: 0.6})
    credit: dict = {}
    for row in rows:
        top = max(row, key=row.__getitem__)
        given = Prediction(
            (1,), {1: top}, {1: row[top]}, rivals={1: {i: row[i] for i in credit.get(1, {}) if i in row}}
        )
        sampler._give(credit, given)
    assert credit == {1: {3: 2.0, 4: 2.0}}
    assert sampler._raised(credit, given).token == {1: 4}  # as much credit by now
    assert sampler._raised({1: {3: 2.0, 4: 1.0}}, given).token == {1: 3}  # 0.3 * 9 > 0.35 * 4


def test_the_raised_law_is_that_of_logits_with_the_logarithm_of_their_credit() -> None:
    """Three steps of the sampler's arithmetic on probabilities against tensors of logits."""
    generator, sampler = torch.Generator().manual_seed(5), CreditSampler(block_size=8, steps=8)
    held, credit = torch.zeros(6, 20, dtype=torch.float64), {}
    for _ in range(6):
        logits = torch.randn(6, 20, generator=generator, dtype=torch.float64)
        law = logits.softmax(-1)
        p, token = law.max(-1)
        held = (held * 0.8).scatter_add(1, token[:, None], p[:, None] ** 0.2)
        raised = (logits + 0.7 * (held + 1).log()).softmax(-1).max(-1)
        rivals = {slot: {i: float(law[slot, i]) for i in of} for slot, of in credit.items()}
        said = Prediction(range(6), dict(enumerate(token.tolist())), dict(enumerate(p.tolist())), rivals=rivals)
        sampler._give(credit, said)
        ours = sampler._raised(credit, said)
        assert list(ours.token.values()) == raised.indices.tolist()
        assert list(ours.confidence.values()) == pytest.approx(raised.values.tolist(), rel=1e-12)


def test_without_weight_credit_is_the_threshold_rule() -> None:
    given, options = prompts(3, 8, 13), {"block_size": 8, "steps": 32, "threshold": 0.3, "cache": "block"}
    credited = decode(network(), CreditSampler(**options, alpha=0.0), given, 32)  # type: ignore[arg-type]
    plain = decode(network(), BlockThresholdSampler(**options), given, 32)  # type: ignore[arg-type]
    for one, other in zip(credited, plain, strict=True):
        assert tokens(one) == tokens(other) and one.log == other.log


# ---- probabilities of further ids ------------------------------------------------------------------------------------


def test_the_probabilities_of_further_ids_are_those_of_the_softmax_in_any_chunks_and_groups() -> None:
    draw, adapter = random.Random(1), random_llama()
    rows = [[draw.randrange(MASK) for _ in range(12)] for _ in range(3)]
    adapter.open(3, 12)
    for index, row in enumerate(rows):
        adapter.place(index, row, 0)
    wishes = [
        Forward(range(12), range(2, 9), rivals={2: (5, 7, 9), 4: (1,)}),
        Forward(range(10), range(8)),
        Forward(range(12), range(12), rivals={11: (3, 3)}),
    ]
    adapter.read_out = ReadOut(MASK, MASK + 1, logits_mib=1)
    adapter.read_out.bytes = 4 * (MASK + 1) * 3 * 2  # chunks of 2 slots
    together = adapter.forward([Request(index, wish, [], []) for index, wish in enumerate(wishes)])
    assert [set(said.rivals) for said in together] == [set(range(2, 9)), set(), set(range(12))]
    for index, (wish, said) in enumerate(zip(wishes, together, strict=True)):
        law = adapter.logits(rows[index][: wish.window.stop], wish.window).softmax(-1)
        for slot, ids in wish.rivals.items():
            assert list(said.rivals[slot]) == list(dict.fromkeys(ids))
            assert [said.rivals[slot][i] for i in ids] == pytest.approx([float(law[slot, i]) for i in ids], rel=1e-4)
    assert len({group_key(wish) for wish in wishes}) == 1


# ---- keys stored in passing ------------------------------------------------------------------------------------------


def test_a_blocks_keys_are_stored_by_the_first_forward_of_the_next() -> None:
    sampler = BlockThresholdSampler(block_size=4, steps=12, threshold=0.0, cache="block", early_stop=False)
    (outcome,) = decode(network(), sampler, prompts(5), 11)
    windows = [(record["window"], record["cached"], record["kind"]) for record in outcome.trace]
    assert windows == [
        ([0, 4], [0, 0], "prefill"),
        ([4, 8], [0, 4], "denoise"),
        ([4, 12], [0, 4], "denoise"),
        ([8, 16], [0, 8], "denoise"),
    ]


def test_as_published_forwards_go_on_until_the_next_look_and_one_on_a_full_block_stores_it() -> None:
    common = {"block_size": 4, "steps": 12, "threshold": 0.0, "cache": "block", "early_stop": False}
    sampler = BlockThresholdSampler(**common, compat="dinfer", maximum_unroll=2, expected_tpf=2)  # type: ignore[arg-type]
    (outcome,) = decode(network(), sampler, prompts(0), 8)
    windows = [(record["window"], record["cached"], record["kind"]) for record in outcome.trace]
    assert windows == [
        ([0, 4], [0, 0], "commit"),  # the block that a short prompt is in, to no use
        ([0, 4], [0, 0], "denoise"),
        ([0, 4], [0, 0], "commit"),
        ([4, 8], [0, 4], "denoise"),
        ([4, 8], [0, 4], "commit"),
    ]
    plain = BlockThresholdSampler(**common)  # type: ignore[arg-type]
    assert tokens(outcome) == tokens(decode(network(), plain, prompts(0), 8)[0])


def test_an_end_token_ends_the_answer_after_its_block_and_as_published_the_prompts_too() -> None:
    script = [([1, END, 3, 4, 5, 6, 7, 8], [0.9] * 8)] * 4
    sampler = BlockThresholdSampler(block_size=4, steps=8, cache="block")
    (outcome,) = decode(scripted(script), sampler, [[]], 8)
    assert tokens(outcome) == [1, END, 3, 4, M, M, M, M]
    script = [([1, 2, 3, 4, 5, 6, 7, 8], [0.9] * 8)] * 4
    (ours,) = decode(scripted(script), sampler, [[END]], 7)
    assert M not in tokens(ours)
    (whole,) = decode(scripted(script), replace(sampler, early_stop=False), [[END]], 7)
    assert tokens(whole) == tokens(ours)
    (published,) = decode(scripted(script), replace(sampler, compat="dinfer"), [[END]], 7)
    assert tokens(published) == [END, 2, 3, 4, END, M, M, M]


SAMPLERS = [
    BlockThresholdSampler(block_size=8, steps=32, threshold=0.3),
    BlockThresholdSampler(block_size=4, steps=16, threshold=0.9),
    BlockThresholdSampler(block_size=8, steps=32, threshold=0.3, temperature=0.8, top_k=5),
    CreditSampler(block_size=8, steps=32, threshold=0.5),
    HierarchySampler(block_size=8, steps=32, threshold=0.5, low_threshold=0.2),
]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("origin", ["zero", "prompt"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_caching_changes_no_token_no_order_and_no_count(
    sampler: BlockThresholdSampler, origin: str, shift: int
) -> None:
    adapter, given = network(origin), prompts(1, 5, 8, 19)
    adapter.facts = replace(adapter.facts, shift=shift)
    cached = replace(sampler, cache="block")
    for one, other in zip(decode(adapter, sampler, given, 32), decode(adapter, cached, given, 32), strict=True):
        assert tokens(one) == tokens(other)
        made, remade = ([[c[:2] for c in r["changed"]] for r in o.trace if r["changed"]] for o in (one, other))
        assert made == remade
        assert other.counts()["nfe"] - other.counts()["nfe_prefill"] == one.counts()["nfe"]
        assert "commit" not in kinds(other)


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_it_ends_leaves_no_mask_and_no_neighbour_matters(sampler: BlockThresholdSampler, cache: str) -> None:
    given, adapter = prompts(3, 8, 12, 13, 21, 0), network()
    sampler = replace(sampler, cache=cache, early_stop=False)
    alone, together = (decode(adapter, sampler, given, 30, rows) for rows in (1, 4))
    for prompt, one, other in zip(given, alone, together, strict=True):
        assert tokens(one) == tokens(other) and one.log == other.log
        assert tokens(one)[: len(prompt)] == prompt and MASK not in tokens(one)[len(prompt) :]
        assert one.counts()["nfe"] <= len(tokens(one)) - len(prompt) + 1


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
def test_a_model_that_attends_fully_takes_its_own_caches(sampler: BlockThresholdSampler, cache: str) -> None:
    for outcome in decode(random_llama(), replace(sampler, cache=cache, early_stop=False), prompts(3, 8), 32):
        assert MASK not in tokens(outcome)


@pytest.mark.parametrize("method", [BlockThresholdSampler, HierarchySampler])
@pytest.mark.parametrize(("threshold", "denoising"), [(0.0, 4), (1.0, 32)])
def test_thresholds_of_0_and_1_are_the_two_limits(method: Any, threshold: float, denoising: int) -> None:
    low = {"low_threshold": threshold} if method is HierarchySampler else {}
    sampler = method(block_size=8, steps=32, threshold=threshold, early_stop=False, cache="block", **low)
    (outcome,) = decode(network(), sampler, prompts(8), 32)
    assert outcome.counts()["nfe"] == denoising + 1


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"maximum_unroll=4 only adds forwards: use 1, or sampler.compat=dinfer"):
        BlockThresholdSampler(block_size=4, steps=4, maximum_unroll=4)
    wrongs: list[tuple[Any, dict[str, Any]]] = [
        *((BlockThresholdSampler, {name: -1}) for name in ("threshold", "maximum_unroll", "expected_tpf", "compat")),
        *((CreditSampler, {name: -1}) for name in ("alpha", "boost_gamma", "decay_beta")),
        (CreditSampler, {"temperature": 0.5}),
        (CreditSampler, {"alpha": math.inf}),
        (HierarchySampler, {"low_threshold": 2}),
        (HierarchySampler, {"low_threshold": 0.91}),  # above the threshold: no run's surest slot would ever need it
    ]
    for method, wrong in wrongs:
        with pytest.raises(ValueError, match=f"sampler.{next(iter(wrong))}="):
            method(block_size=4, steps=4, **wrong)
    assert CreditSampler.options().isdisjoint({"temperature", "top_k", "top_p", "order", "cfg_scale"})


def test_credit_of_any_weight_is_computed_without_overflow() -> None:
    """With alpha towards infinity the raised law is certain of the id with the largest credit."""
    for alpha in (10.0, 1e3, 1e6, 1e300):
        sampler = CreditSampler(block_size=8, steps=8, threshold=0.95, alpha=alpha)
        (outcome,) = decode(network(), sampler, prompts(8), 8)
        assert MASK not in tokens(outcome) and all(0 <= c <= 1 for c in outcome.state.confidences)
    near = CreditSampler(block_size=8, steps=8, alpha=700.0)
    token, confidence = near._surest({3: 0.2, 5: 0.1}, {3: 0.1, 5: 2.0})
    assert token == 5 and confidence == pytest.approx(1)
    plain = CreditSampler(block_size=8, steps=8, alpha=0.7)._surest({3: 0.2, 5: 0.1}, {3: 0.1, 5: 2.0})
    raised = {3: 0.2 * 1.1**0.7, 5: 0.1 * 3**0.7}
    assert plain == (5, pytest.approx(raised[5] / (0.7 + sum(raised.values()))))


def test_the_cache_is_the_models_natural_one() -> None:
    full = ModelFacts(SIZE, M, frozenset())
    assert BlockThresholdSampler.suited(full) == {"cache": "none"}
    assert CreditSampler.suited(FACTS) == {"cache": "block"}
    assert math.isclose(CreditSampler(block_size=4, steps=4).alpha, 0.7)
