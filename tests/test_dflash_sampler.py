"""Speculation with a drafter: whatever is drafted, plain decoding comes out; and the rounds, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.description import describe
from adapters.drafted import DraftedAdapter
from adapters.loading import load
from adapters.mixing import MixingAdapter
from adapters.places import ModelOptions
from pipeline.conformance import MODELS
from samplers import CAUSAL, AutoregressiveSampler, DFlashSampler, ModelFacts, NGram, Role
from samplers.dflash import EMITTED
from samplers.forward import Kind
from tests import layouts
from tests.drafters import write_drafter
from tests.drafting import Pair, adversary, answer, decoded, greedy, oracle, pair, random_law, run, run_all, surely

V, END = 11, 7
PLAIN = AutoregressiveSampler()
TEXT = NGram([[1, 2, 3, 1, 2, 4, 5, 1, 2, 3, 9, 8, 7, 6] * 3, list(range(V))])


def drafts(model: Pair) -> list[Any]:
    return [forward for forward in model.forwards if forward.role is Role.DRAFT]


def verified(model: Pair) -> list[Any]:
    return [forward for forward in model.forwards if forward.kind is Kind.VERIFY]


def lengths(outcome: Any) -> list[int]:
    """Tokens that each verification emitted."""
    return [len(entry.decided) for entry in outcome.verified]


def cyclic(size: int = V) -> Any:
    """After t comes t + 1: a chain of drafts is easy to write down."""
    return lambda tokens: surely((tokens[-1] + 1) % size, size)


def right_for(count: int, size: int = V) -> Any:
    """A drafter for `cyclic` that is right for that many tokens."""
    return lambda tokens, depth: surely((tokens[-1] + depth + (depth > count)) % size, size)


# ---- worked by hand --------------------------------------------------------------------------------------------------


def test_a_round_worked_by_hand() -> None:
    """Prompt 0..4, blocks of 4, one draft right. Prefill decides slot 5, the anchor.

    Round 1 drafts 6, 7, 8 and runs 5..8: 6 is right, the bonus is 7's. Kept are 5 and 6; the anchor is 7.
    Round 2 runs 7..10 behind 7 stored slots; its drafter takes in the features of 5 and 6.
    """
    model = pair(cyclic(), right_for(1), block=4)
    outcome = run(DFlashSampler(), model, [0, 1, 2, 3, 4], 12)
    assert answer(outcome) == [(5 + i) % V for i in range(12)]
    prefill, draft, verify, second, third = model.forwards[:5]
    assert (prefill.window, list(prefill.want), prefill.store) == (range(5), [5], range(5))
    assert (draft.window, draft.context, draft.keep, draft.role) == (range(5, 9), range(5), None, Role.DRAFT)
    assert (list(draft.want), draft.store) == ([6, 7, 8], range(0))
    assert (verify.window, verify.context, verify.keep, verify.store) == (range(5, 9), range(5), None, range(5, 9))
    assert (list(verify.want), list(verify.proposed)) == ([6, 7, 8, 9], [6, 7, 8])
    assert verify.variants == [{6: 6, 7: 8, 8: 9}] and verify.attend == CAUSAL and verify.positions is None
    assert (second.window, second.context, second.keep) == (range(7, 11), range(7), [5, 6])
    assert (third.window, third.context, third.keep) == (range(7, 11), range(7), [5, 6])
    counts = outcome.counts()
    assert (counts["nfe"], counts["nfe_draft"], counts["nfe_prefill"], counts["nfe_verify"]) == (7, 5, 1, 5)
    assert lengths(outcome) == [2, 2, 2, 2, 2]


def test_the_last_block_is_cut_to_the_canvas_and_its_last_slot_is_not_drafted() -> None:
    """Slots 3..9, anchor 3, blocks of 4, one draft right: anchors 3, 5, 7, 9; of the third block 8 is drafted."""
    model = pair(cyclic(), right_for(1), block=4)
    outcome = run(DFlashSampler(), model, [0, 1, 2], 7)
    assert answer(outcome) == [3, 4, 5, 6, 7, 8, 9]
    assert [forward.window for forward in verified(model)] == [range(3, 7), range(5, 9), range(7, 9)]
    assert [list(forward.want) for forward in verified(model)][-1] == [8, 9]
    assert [forward.window for forward in drafts(model)] == [forward.window for forward in verified(model)]


def test_the_authors_first_version_runs_whole_blocks_and_a_round_more() -> None:
    """As above, and a round on anchor 9, the last slot: nothing of it is kept; 2 + 2 + 2 + 2 tokens are counted."""
    model = pair(cyclic(), right_for(1), block=4)
    outcome = run(DFlashSampler(compat="dflash_v0"), model, [0, 1, 2], 7)
    windows = [range(3, 7), range(5, 9), range(7, 11), range(9, 13)]
    assert [forward.window for forward in verified(model)] == windows
    assert [forward.window for forward in drafts(model)] == windows
    assert lengths(outcome) == [2, 2, 2, 0] and outcome.state is not None and outcome.state.notes[EMITTED] == 8
    assert answer(outcome) == [3, 4, 5, 6, 7, 8, 9]
    spec = pair(cyclic(), right_for(1), block=4)
    run(DFlashSampler(compat="dflash_v0"), spec, [0, 1, 2, 3, 4], 4)
    assert [forward.window for forward in verified(spec)] == [range(5, 9), range(7, 11)]
    assert drafts(spec)[1].keep == [5, 6], "the drafter's second call is at 5..10: two of context, four of the block"


@pytest.mark.parametrize("width", [0, 3])
def test_the_first_version_goes_on_once_behind_an_end_token_that_comes_first(width: int) -> None:
    model = pair(cyclic(), right_for(3), block=4, ends=[3])
    outcome = run(DFlashSampler(compat="dflash_v0", draft_width=width), model, [1, 2], 6)
    assert answer(outcome) == [3] and outcome.counts()["nfe"] == 2
    assert run(DFlashSampler(draft_width=width), model, [1, 2], 6).counts()["nfe"] == 1


def test_without_drafts_the_first_version_makes_as_many_forwards_as_tokens_and_one() -> None:
    model = pair(cyclic(), right_for(3), block=1)
    outcome = run(DFlashSampler(compat="dflash_v0"), model, [1, 2], 24)
    assert outcome.counts()["nfe"] == 25 and outcome.counts()["nfe_draft"] == 0


def test_a_tree_worked_by_hand() -> None:
    """Depth 1 (.6 .4), depth 2 (.7 .3), four nodes: 0, 0 0, 1, 1 0 at slots 3..6. The target says 1, 0, then 2.

    The path is the anchor and the nodes at slots 5 and 6; kept are 2, 5 and 6, which close up before slot 5.
    """
    marginals = {1: (0.6, 0.4, 0.0), 2: (0.7, 0.3, 0.0)}
    said = {(2, 2, 0): 1, (2, 2, 0, 1): 0, (2, 2, 0, 1, 0): 2, (2, 2): 0}
    model = pair(lambda tokens: surely(said.get(tokens, 1), 3), lambda tokens, depth: marginals[min(depth, 2)], block=3)
    outcome = run(DFlashSampler(tree="ddtree", node_budget=4), model, [2, 2], 6)
    assert answer(outcome)[:4] == [0, 1, 0, 2]
    _, draft, verify, _, third = model.forwards[:5]
    assert (draft.best, draft.window) == (3, range(2, 5)), "there are no more ids than three"
    assert verify.variants == [{3: 0, 4: 0, 5: 1, 6: 0}] and verify.window == range(2, 7)
    assert verify.attend is not None and (verify.attend.pattern, verify.attend.parents) == ("tree", (0, 0, 1, 0, 3))
    assert list(verify.positions or ()) == [2, 3, 4, 3, 4]
    assert (third.window.start, third.keep) == (5, [2, 5, 6])
    assert outcome.verified[0].counts() == {"proposed": 4, "accepted": 2, "emitted": 3}


def test_a_tree_may_take_more_than_the_canvas_has() -> None:
    """Three slots are left behind the anchor: no node is deeper than 2, and the window ends behind the row."""
    model = pair(random_law(3, 4), lambda tokens, depth: (0.4, 0.3, 0.2, 0.1), block=6)
    sampler = DFlashSampler(tree="ddtree", node_budget=15)
    outcome = run(sampler, model, [1, 2], 4)
    first = verified(model)[0]
    assert first.window == range(2, 18) and max(first.positions or ()) == 4
    assert answer(outcome) == list(greedy(model.target, (1, 2), 4)[2:])


@pytest.mark.parametrize("options", [{}, {"tree": "ddtree", "node_budget": 9}, {"drafter": "random"}])
def test_a_last_slot_alone_is_decoded_plainly(options: dict[str, Any]) -> None:
    """Of two tokens the first is the prefill's and the second the target's own."""
    target = random_law(3, V)
    model = pair(target, oracle(target), 4)
    outcome = run(DFlashSampler(**options), model, [1, 2], 2)
    assert answer(outcome) == list(greedy(target, (1, 2), 2)[2:])
    assert drafts(model) == [] and outcome.verified == [] and outcome.counts()["nfe"] == 2


def test_a_tree_reserves_no_more_slots_than_it_can_hold() -> None:
    facts = pair(cyclic(), adversary(cyclic()), 4).facts
    for options, slots in (
        ({}, 0),
        ({"tree": "ddtree"}, 3),
        ({"tree": "ddtree", "node_budget": 100}, 100),
        ({"tree": "ddtree", "node_budget": 4096}, 11 + 11**2 + 11**3),  # an alphabet of 11, three deep
        ({"tree": "ddtree", "node_budget": 4096, "draft_candidates": 2}, 2 + 4 + 8),
    ):
        assert DFlashSampler(**options).spare_slots(facts) == slots


# ---- exactness -------------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "chain": DFlashSampler(),
    "ddtree": DFlashSampler(tree="ddtree", node_budget=6),
    "presto": DFlashSampler(tree="presto", node_budget=6),
    "a tree of few candidates": DFlashSampler(tree="presto", node_budget=9, draft_candidates=2, prefix_weight=1.0),
    "more nodes than there are": DFlashSampler(tree="ddtree", node_budget=200),
    "random chain": DFlashSampler(drafter="random"),
    "random tree": DFlashSampler(drafter="random", tree="ddtree", node_budget=7),
    "n-gram chain": DFlashSampler(drafter="ngram", ngram_order=3),
    "n-gram tree": DFlashSampler(drafter="ngram", tree="presto", node_budget=7),
    "first version": DFlashSampler(compat="dflash_v0"),
}


def drafter_for(name: str, target: Any, seed: int) -> Any:
    noise = random_law(seed + 1, V, 3.0)
    if name == "noise":
        return lambda tokens, depth: noise((*tokens[-1:], depth))
    return {"oracle": oracle, "adversary": adversary}[name](target)


@pytest.mark.parametrize("drafter", ["noise", "oracle", "adversary"])
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_greedy_output_is_that_of_plain_decoding(name: str, drafter: str, data: st.DataObject) -> None:
    seed, length = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 14))
    block = data.draw(st.integers(2, 6))
    ends = data.draw(st.sampled_from([(), (END,), (END, 2, 5)]))
    prompt = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=6))
    target = random_law(seed, V, 4.0)
    model = pair(target, drafter_for(drafter, target, seed), block, ends)
    plain = run(PLAIN, model, prompt, length)
    assert answer(run(KINDS[name], model, prompt, length, ngram=TEXT)) == answer(plain)


def test_a_drafter_that_is_always_right_fills_every_round_and_one_never_right_none() -> None:
    target = random_law(5, V, 4.0)
    for tree in ("chain", "ddtree"):
        sampler = DFlashSampler(tree=tree, node_budget=None if tree == "chain" else 3)
        right = run(sampler, pair(target, oracle(target), 4), [1, 2], 13)
        assert lengths(right) == [4, 4, 4]
    wrong = run(DFlashSampler(), pair(target, adversary(target), 4), [1, 2], 13)
    assert lengths(wrong) == [1] * 11 and wrong.drafts()["accepted_draft_tokens"] == 0


@pytest.mark.parametrize("width", [0, None])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["chain", "ddtree"])
def test_without_drafts_it_is_plain_decoding_call_for_call(width: int | None, temperature: float, tree: str) -> None:
    target = random_law(9, V, 2.0)
    block = 4 if width == 0 else 1  # a block of one token drafts nothing
    asked = []
    for sampler in (PLAIN, DFlashSampler(draft_width=width, tree=tree)):
        model = pair(target, adversary(target), block, ends=[END])
        outcome = run(replace(sampler, temperature=temperature), model, [4, 2, 6], 20)
        asked.append((model.forwards, answer(outcome), outcome.log, outcome.trace))
    assert asked[0] == asked[1]


def ending(at: int, length: int = 12) -> Any:
    """A target that says 0, 1, 2 … behind a prompt of one token, an end token in that place."""
    return lambda tokens: surely(END if len(tokens) - 1 == at else 0, V)


@pytest.mark.parametrize("tree", ["chain", "ddtree"])
@pytest.mark.parametrize(
    ("at", "rounds"),
    [(0, []), (1, [1]), (2, [2]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4])],
    ids=["first", "first draft", "second draft", "last draft", "bonus", "next round", "second bonus"],
)
def test_an_end_token_ends_it_wherever_in_a_round(at: int, rounds: list[int], tree: str) -> None:
    model = pair(ending(at), oracle(ending(at)), 4, ends=[END])
    sampler = DFlashSampler(tree=tree, node_budget=None if tree == "chain" else 3)
    outcome = run(sampler, model, [5], 12)
    assert answer(outcome) == [0] * at + [END] and lengths(outcome) == rounds
    assert outcome.state is not None and all(outcome.state.mask[at + 2 :])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("prompt", [[3], [3, 1, 4, 1, 5]])
def test_never_more_than_was_asked_for(prompt: list[int], length: int) -> None:
    target = random_law(2, V, 4.0)
    for sampler in (DFlashSampler(), DFlashSampler(tree="ddtree", node_budget=8), DFlashSampler(compat="dflash_v0")):
        outcome = run(sampler, pair(target, oracle(target), 4), prompt, length)
        assert answer(outcome) == list(greedy(target, tuple(prompt), length)[len(prompt) :])
    assert run(DFlashSampler(), pair(target, oracle(target), 4), [1], 1).counts()["nfe_draft"] == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_equals_its_rows(name: str) -> None:
    target = random_law(31, V, 3.0)
    prompts = [[1], [2, 3, 4], [5, 6], [9, 9, 9, 9, 9], [0, 1]]
    for temperature in (0.0, 1.0):
        sampler = replace(KINDS[name], temperature=temperature)
        model = pair(target, drafter_for("noise", target, 31), 4, [END])
        alone, together = (run_all(sampler, model, prompts, 11, rows, ngram=TEXT) for rows in (1, 4))
        for one, other in zip(alone, together, strict=True):
            assert (answer(one), one.log, one.trace) == (answer(other), other.log, other.trace)


def test_confidence_is_the_targets_of_the_token_that_was_kept() -> None:
    target = random_law(8, V, 3.0)
    for sampler in (DFlashSampler(temperature=1.0, sampled_drafts=True), DFlashSampler(temperature=1.0)):
        outcome = run(sampler, pair(target, lambda tokens, depth: target(tokens), 5), [1, 2], 12)
        state = outcome.state
        assert state is not None and outcome.drafts()["accepted_draft_tokens"] > 0
        for slot in state.canvas:
            assert state.confidences[slot] == target(tuple(state.tokens[:slot]))[state.tokens[slot]]


def test_eos_never_bans_end_tokens_from_drafts_too() -> None:
    model = pair(ending(2), oracle(ending(2)), 4, ends=[END])
    outcome = run(DFlashSampler(eos="never"), model, [5], 8)
    assert END not in answer(outcome)
    assert all(END not in content.values() for forward in verified(model) for content in forward.variants)


# ---- on networks -----------------------------------------------------------------------------------------------------

PROMPTS = [[1], [2, 3, 4], [5, 6, 7, 8, 9, 10], [1, 2, 1, 2]]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_output_of_a_network_in_whole_numbers_is_that_of_plain_decoding(name: str) -> None:
    """In which stale keys, features of other slots or a wrong mask change every token that follows."""
    facts = MODELS["causal, with a drafter"]
    for seed in range(3):
        plain = run_all(PLAIN, MixingAdapter(facts, seed), PROMPTS, 12, 3)
        model = MixingAdapter(facts, seed)
        outcomes = run_all(KINDS[name], model, PROMPTS, 12, 3, ngram=TEXT)
        assert [answer(outcome) for outcome in outcomes] == [answer(outcome) for outcome in plain]
        assert not model.misread


@pytest.mark.parametrize("name", KINDS)
def test_greedy_output_of_a_transformer_is_that_of_plain_decoding(name: str, network: DraftedAdapter) -> None:
    plain = run_all(PLAIN, network, PROMPTS, 16, 2)
    outcomes = run_all(KINDS[name], network, PROMPTS, 16, 2, ngram=TEXT)
    assert [answer(outcome) for outcome in outcomes] == [answer(outcome) for outcome in plain]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DraftedAdapter:
    """A target and a drafter of random weights."""
    folder = tmp_path_factory.mktemp("pair")
    layouts.write(folder / "target", "causal language model", num_hidden_layers=3)
    options = ModelOptions("pair", path=str(folder / "target"), draft=str(write_drafter(folder / "draft")))
    adapter = load(describe(options), torch.device("cpu"))
    assert isinstance(adapter, DraftedAdapter)
    return adapter


def test_drafts_are_the_likeliest_at_any_temperature_unless_they_are_to_be_drawn() -> None:
    """The drafter's laws have one likeliest id, 3; seldom does the target say it."""
    model = pair(random_law(12, V), lambda tokens, depth: tuple(0.2 if i == 3 else 0.08 for i in range(V)), 4)
    for sampler in (DFlashSampler(temperature=1.0), DFlashSampler(temperature=1.0, sampled_drafts=True)):
        model.forwards.clear()
        run(sampler, model, [1, 2], 20)
        shown = {token for forward in verified(model) for content in forward.variants for token in content.values()}
        assert (shown == {3}) is not sampler.sampled_drafts
        assert all(forward.carry is sampler.sampled_drafts for forward in drafts(model))
        assert all(forward.judged_drafts is sampler.sampled_drafts for forward in verified(model))


# ---- n-grams and random ids ------------------------------------------------------------------------------------------


def test_an_n_gram_drafter_continues_what_it_knows_and_needs_no_drafter() -> None:
    """After 1 2 it knows 3 and after that nothing; the target says 3, then 4."""
    model = pair(lambda tokens: surely(min(tokens[-1] + 1, 9), V), adversary(cyclic()), 4)
    model.facts = replace(model.facts, draft=None)
    outcome = run(DFlashSampler(drafter="ngram", draft_width=3), model, [1], 6, ngram=NGram([[1, 2, 3, 4, 5, 6, 7]]))
    assert answer(outcome) == [2, 3, 4, 5, 6, 7] and lengths(outcome) == [4]
    assert outcome.counts()["nfe_draft"] == 0


def test_a_tree_is_scored_by_what_follows_the_last_known_tokens() -> None:
    """The drafter finds 3 and 4 alike; behind 1 2, the prompt's end and the anchor, the n-gram model expects 4."""
    expects = NGram([[1, 2, 4] * 5, [7, 2, 3] * 20], order=3)
    model = pair(lambda tokens: surely(2, V), lambda tokens, depth: tuple(0.5 * (i in (3, 4)) for i in range(V)), 2)
    sampler = DFlashSampler(tree="presto", node_budget=1, draft_candidates=2)
    for prompt, drafted in (([0, 1], 4), ([0, 7], 3)):
        model.forwards.clear()
        run(sampler, model, prompt, 3, ngram=expects)
        assert verified(model)[0].variants == [{3: drafted}]


def test_an_n_gram_model_of_nothing_drafts_nothing() -> None:
    model = pair(cyclic(), adversary(cyclic()), 4)
    outcome = run(DFlashSampler(drafter="ngram", draft_width=3), model, [1], 6, ngram=NGram([]))
    assert answer(outcome) == [2, 3, 4, 5, 6, 7] and outcome.verified == []


def test_random_drafts_depend_on_the_seed_and_the_round_only() -> None:
    model = pair(random_law(4, V, 3.0), adversary(cyclic()), 4)
    run(DFlashSampler(drafter="random"), model, [1, 2], 9)
    first = [forward.variants for forward in verified(model)]
    model.forwards.clear()
    run(DFlashSampler(drafter="random"), model, [1, 2], 9)
    assert [forward.variants for forward in verified(model)] == first
    assert len({tuple(content[0].values()) for content in first}) > 1


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_width": -1}, "sampler.draft_width=-1 is out of range"),
        ({"tree": "bush"}, "sampler.tree=bush is out of range: use one of chain, ddtree, presto"),
        ({"tree": "ddtree", "node_budget": 0}, "sampler.node_budget=0 is out of range"),
        ({"tree": "ddtree", "draft_candidates": 0}, "sampler.draft_candidates=0 is out of range"),
        ({"tree": "presto", "prefix_weight": -0.1}, "sampler.prefix_weight=-0.1 is out of range"),
        ({"ngram_order": 0}, "sampler.ngram_order=0 is out of range"),
        ({"drafter": "me"}, "sampler.drafter=me is out of range: use one of model, ngram, random"),
        ({"compat": "v9"}, "sampler.compat=v9 is out of range: use null or dflash_v0"),
        ({"eos": "last"}, "sampler.eos=last is out of range: use allow or never"),
        ({"node_budget": 8}, "sampler.node_budget=8 is for tree=ddtree and presto, and has no effect here"),
        ({"draft_candidates": 8}, "sampler.draft_candidates=8 is for tree=ddtree and presto"),
        ({"tree": "ddtree", "prefix_weight": 0.2}, "sampler.prefix_weight=0.2 is for tree=presto, and has no"),
        ({"tree": "ddtree", "prefix_weight": 0.0}, "sampler.prefix_weight=0.0 is for tree=presto"),
        ({"tree": "ddtree", "node_budget": 10**8}, "sampler.node_budget=100000000 is out of range: use null, or 1 to"),
        ({"tree": "ddtree", "draft_candidates": 4097}, "sampler.draft_candidates=4097 is out of range"),
        (
            {"drafter": "random", "draft_width": 4097},
            "sampler.draft_width=4097 is out of range: use null, or 0 to 4096",
        ),
        ({"ngram_order": 3}, "sampler.ngram_order=3 is for tree=presto and drafter=ngram"),
        ({"tree": "ddtree", "ngram_order": 2}, "sampler.ngram_order=2 is for tree=presto and drafter=ngram"),
        (
            {"sampled_drafts": True},
            "sampler.sampled_drafts=True is for tree=chain with drafter=model and a temperature",
        ),
        ({"tree": "ddtree", "compat": "dflash_v0"}, "sampler.compat=dflash_v0 is for tree=chain"),
        ({"tree": "ddtree", "sampled_drafts": True}, "sampler.sampled_drafts=True is for tree=chain"),
        ({"drafter": "ngram", "sampled_drafts": True}, "sampler.sampled_drafts=True is for tree=chain with drafter="),
    ],
)
def test_options_out_of_range_or_without_a_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        DFlashSampler(**options)
    assert said in str(error.value)


def test_models_it_cannot_decode_are_refused() -> None:
    causal = pair(cyclic(), adversary(cyclic()), 4).facts
    DFlashSampler.check(causal)
    with pytest.raises(ValueError, match="needs causal attention"):
        DFlashSampler.check(ModelFacts(V, 10, frozenset()))
    with pytest.raises(ValueError, match="predicts it where it stands"):
        DFlashSampler.check(replace(causal, shift=0))


@pytest.mark.parametrize(
    ("sampler", "changes", "said"),
    [
        (DFlashSampler(), {"draft": None}, "needs a model that comes with a drafter, this one has none"),
        (DFlashSampler(draft_width=4), {}, r"draft_width=4 is more than .* blocks of 4 .* use at most 3"),
        (DFlashSampler(drafter="ngram"), {"draft": None}, "draft_width=null is what the model's drafter was trained"),
        (DFlashSampler(draft_width=3), {"attention": "blocks"}, "a diffusion model of its own"),
        (DFlashSampler(draft_width=3), {"trained_block": None}, "a diffusion model of its own"),
        (DFlashSampler(draft_width=0), {"draft": None}, None),
        (DFlashSampler(drafter="ngram", draft_width=9), {"draft": None}, None),
        (DFlashSampler(drafter="random", draft_width=9), {}, None),
        (DFlashSampler(), {}, None),
        (DFlashSampler(draft_width=3), {}, None),
    ],
)
def test_a_model_without_the_drafter_asked_for_is_refused(sampler: Any, changes: Any, said: str | None) -> None:
    facts = pair(cyclic(), adversary(cyclic()), 4).facts
    assert facts.draft is not None
    facts = replace(facts, **changes) if "draft" in changes else replace(facts, draft=replace(facts.draft, **changes))
    if said is None:
        sampler.refuse_misfit(facts)
        return
    with pytest.raises(ValueError, match=said):
        sampler.refuse_misfit(facts)


def test_the_drafters_trained_block_is_the_default_width() -> None:
    facts = pair(cyclic(), adversary(cyclic()), 16).facts
    assert DFlashSampler.suited(facts) == {"draft_width": 15}
    assert DFlashSampler.suited(replace(facts, draft=None)) == {}


def test_an_n_gram_model_counts_three_in_a_row_where_there_is_one() -> None:
    assert DFlashSampler().ngram_order is None and DFlashSampler(tree="ddtree").ngram_order is None
    assert DFlashSampler(tree="presto").ngram_order == DFlashSampler(drafter="ngram").ngram_order == 3


def test_it_says_whether_it_reads_n_grams() -> None:
    weightless = DFlashSampler(tree="presto", prefix_weight=0.0)
    for sampler, reads in (
        (DFlashSampler(), False),
        (DFlashSampler(tree="ddtree"), False),
        (DFlashSampler(tree="presto"), True),
        (weightless, False),
        (DFlashSampler(drafter="ngram"), True),
        (replace(weightless, drafter="ngram"), True),
    ):
        assert sampler.reads_ngrams is reads


# ---- the double itself -----------------------------------------------------------------------------------------------


class _Careless(DFlashSampler):
    """Negative control: tells neither the target nor the drafter which drafts were right."""

    def decode(self, state: Any) -> Any:
        decoding = super().decode(state)
        forward = next(decoding)
        while True:
            said = yield replace(forward, keep=forward.keep and [forward.keep[0] for _ in forward.keep])
            try:
                forward = decoding.send(said)
            except StopIteration:
                return


def test_the_pair_notices_keys_of_another_path() -> None:
    target = random_law(6, V, 3.0)
    model = pair(target, oracle(target), 4)
    with pytest.raises(AssertionError):
        decoded(_Careless(), model, [1, 2], 9, stream=1)
    assert decoded(DFlashSampler(), model, [1, 2], 9, stream=1) == greedy(target, (1, 2), 9)[2:]
