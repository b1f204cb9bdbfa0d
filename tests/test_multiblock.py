"""Decoding of several blocks at once: the rules against traces worked by hand, and the limits they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adapters.toy import TableAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import (
    D2FSampler,
    D3LLMSampler,
    ModelFacts,
    MultiBDSampler,
    Sampler,
    ThresholdSampler,
)
from samplers.blocks import MultiBlockSampler
from samplers.d3llm import UNCOUNTED

WORD, END, MASK = 1, 8, 9
FULL = ModelFacts(10, MASK, frozenset({END}), attentions=frozenset({"full", "blocks"}))
BLOCKS = replace(FULL, attention="blocks", attentions=frozenset({"blocks"}))
FROM_ZERO = replace(BLOCKS, block_origin="zero")
Table = Mapping[int, Sequence[float]]


def row(probability: float, token: int = WORD) -> list[float]:
    """Logits of 10 ids: one has this probability, the others share the rest."""
    rest = (1 - probability) / 9
    return [math.log(probability if i == token else rest) for i in range(10)]


def entropy(probability: float) -> float:
    """Of such a row, nats."""
    rest = (1 - probability) / 9
    return -probability * math.log(probability) - 9 * rest * math.log(rest)


def table(probabilities: Mapping[int, float], ends: Sequence[int] = ()) -> Table:
    return {slot: row(p, END if slot in ends else WORD) for slot, p in probabilities.items()}


def run(sampler: Sampler, rows: Any, asked: int, prompt: int = 0, facts: ModelFacts = FULL) -> Outcome:
    """Decode ``asked`` slots behind a prompt of so many tokens; fails where the engine refuses a forward."""
    known = rows if callable(rows) else lambda tokens, slot: rows.get(slot, row(0.5))
    adapter = TableAdapter(facts, known)
    slots = prompt + sampler.canvas_length(prompt, asked, facts)
    (outcome,) = Engine(adapter, sampler, max_rows=1).decode([Task(0, [5] * prompt, asked, traced=True)], slots)
    assert outcome.state is not None and outcome.failure is None, outcome.error
    assert outcome.counts()["nfe"] == adapter.calls
    return outcome


def commits(outcome: Outcome) -> list[list[int]]:
    """Slots changed by each forward."""
    return [sorted(slot for slot, _, _ in record["changed"]) for record in outcome.trace]


def windows(outcome: Outcome) -> list[tuple[int, int]]:
    return [tuple(record["window"]) for record in outcome.trace]


def kinds(outcome: Outcome) -> list[str]:
    return [record["kind"] for record in outcome.trace]


D2F_ROWS = table(
    {2: 0.95, 3: 0.5, 4: 0.4, 5: 0.95, 6: 0.95, 7: 0.3, 8: 0.6, 9: 0.95, 10: 0.5, 11: 0.6, 12: 0.4, 13: 0.3}
)


def test_d2f_trace_worked_by_hand() -> None:
    """Prompt 0..1; blocks A 2..5, B 6..9, C 10..13; add 0.5, activate 0.75, threshold 0.9; sure are 2, 5, 6, 9.

    1. A is added (the prompt is done) and activated. Runs prompt + A, stores the prompt. A: 2 and 5.
    2. A is 2/4: B is added, not activated (2/4 < 0.75). Runs A + B. A: none is sure, its best is 3 (0.5). B: 6 and 9.
    3. B is 2/4: C is added. A is 3/4: B activated. Runs A + B + C. A: 4, done. B: best is 8 (0.6). C: nothing sure,
       not activated (B was 2/4), so nothing.
    4. A is final: the same forward stores it. B is 3/4: C activated. B: 7, done. C: best is 11 (0.6).
    5. Stores B, runs B + C. C: 10.   6. Runs C: 12.   7. C: 13, done; C need not be stored.
    """
    sampler = D2FSampler(block_size=4, block_add_threshold=0.5, block_activate_threshold=0.75, threshold=0.9)
    outcome = run(sampler, D2F_ROWS, 12, prompt=2)
    assert commits(outcome) == [[2, 5], [3, 6, 9], [4, 8], [7, 11], [10], [12], [13]]
    assert windows(outcome) == [(0, 6), (2, 10), (2, 14), (2, 14), (6, 14), (10, 14), (10, 14)]
    assert [record["cached"][1] for record in outcome.trace] == [0, 2, 2, 2, 6, 10, 10]


def test_d2f_without_cache_runs_everything_and_commits_the_same() -> None:
    sampler = D2FSampler(block_size=4, block_add_threshold=0.5, block_activate_threshold=0.75, cache="none")
    outcome = run(sampler, D2F_ROWS, 12, prompt=2)
    assert commits(outcome) == [[2, 5], [3, 6, 9], [4, 8], [7, 11], [10], [12], [13]]
    assert windows(outcome) == [(0, 6), (0, 10), *[(0, 14)] * 5]


def test_d2f_needs_one_forward_a_block_where_all_is_sure() -> None:
    """No forward only stores: blocks of 32 need one each."""
    outcome = run(D2FSampler(block_size=32, block_add_threshold=1.0), lambda tokens, slot: row(0.99), 96, prompt=3)
    assert [len(step) for step in commits(outcome)] == [32, 32, 32]


def test_an_end_token_stops_adding_but_not_the_blocks_in_work() -> None:
    """Blocks of 2 at 2, 4, 6, 8. Forward 1: block 2 (slot 2 is sure); 2: block 4 joins, its end token 4 is committed.

    No further block is added; 3 (forced in 2), 5 is forced once block 2 is done.
    """
    rows = table({2: 0.95, 3: 0.5, 4: 0.95, 5: 0.5}, ends=[4])
    sampler = D2FSampler(block_size=2, block_add_threshold=0.5, threshold=0.9)
    outcome = run(sampler, rows, 8, prompt=2)
    assert commits(outcome) == [[2], [3, 4], [5]]
    assert outcome.state is not None and outcome.state.masked_in(outcome.state.canvas) == [6, 7, 8, 9]
    stopped = run(replace(sampler, early_stop=True), rows, 8, prompt=2)
    assert commits(stopped) == [[2], [3, 4]]


def test_the_threshold_is_strict_and_one_forces_token_by_token() -> None:
    certain = [0.0 if i == WORD else -math.inf for i in range(10)]  # probability 1 exactly
    sampler = D2FSampler(block_size=4, threshold=1.0, block_activate_threshold=1.0)
    outcome = run(sampler, lambda tokens, slot: certain, 8, prompt=1)
    assert commits(outcome) == [[slot] for slot in range(1, 9)]
    eager = run(replace(sampler, block_activate_threshold=0.5), lambda tokens, slot: certain, 8, prompt=1)
    assert commits(eager) == [[1], [2], [3, 5], [4, 6], [7], [8]], "the second block goes on once the first is 2/4"
    bold = replace(sampler, threshold=0.0, block_add_threshold=1.0)
    assert run(bold, lambda tokens, slot: row(0.2), 8, prompt=1).counts()["nfe"] == 2


@pytest.mark.parametrize(("order", "first"), [("probability", 0), ("margin", 1), ("entropy", 2)])
def test_the_order_says_which_slot_an_activated_block_commits(order: str, first: int) -> None:
    """Slot 0 has the larger probability, slot 1 the larger margin and slot 2 the smaller entropy."""
    rare = 1e-9
    rows = {
        0: [math.log(p) for p in (0.50, 0.40, 0.10, *[rare] * 7)],
        1: [math.log(p) for p in (0.45, 0.11, 0.11, 0.11, 0.11, 0.11, *[rare] * 4)],
        2: [math.log(p) for p in (0.49, 0.48, 0.03, *[rare] * 7)],
    }
    assert commits(run(D2FSampler(block_size=3, order=order), rows, 3))[0] == [first]


BUFFER_ROWS = table(
    {6: 0.95, 7: 0.5, 8: 0.95, 9: 0.6, 10: 0.95, 11: 0.7, 12: 0.5, 13: 0.4, 14: 0.95, 15: 0.3},
)


def test_block_buffer_trace_worked_by_hand() -> None:
    """Blocks of 4 from 0; prompt 0..5, so A = 4..7 has two open slots; B = 8..11, C = 12..15; two places.

    Add 0.5, activate 0.75, accept 0.9; sure are 6, 8, 10, 14.
    1. A holds the prompt's tail: 2/4 decided, so B is added; places are full. Runs prompt, A and B, stores 0..3 (whole
       blocks of the prompt). A: 6. B: 8 and 10.
    2. A is 3/4: B is activated. A: none sure, its only one, 7: A is done. B: its best, 11 (0.7).
    3. B is 3/4, but A holds its place until it is stored, which this forward does: no C. B: 9, done.
    4. A has left: C is added (B is 4/4) and activated; B is stored on the way. C: 14.
    5. to 7. C alone: 12 (0.5), 13 (0.4), 15.
    """
    sampler = MultiBDSampler(
        block_size=4, block_add_threshold=0.5, block_activate_threshold=0.75, threshold=0.9, buffer_blocks=2
    )
    outcome = run(sampler, BUFFER_ROWS, 8, prompt=6, facts=FROM_ZERO)
    assert commits(outcome) == [[6, 8, 10], [7, 11], [9], [14], [12], [13], [15]]
    assert windows(outcome) == [(0, 12), (4, 12), (4, 12), (8, 16), (12, 16), (12, 16), (12, 16)]
    assert set(kinds(outcome)) == {"denoise"}
    roomy = run(replace(sampler, buffer_blocks=3), BUFFER_ROWS, 8, prompt=6, facts=FROM_ZERO)
    assert windows(roomy)[2] == (4, 16), "with a third place C joins in forward 3"


@pytest.mark.parametrize("shift", [0, 1])
def test_a_buffer_of_one_place_runs_a_forward_only_to_store(shift: int) -> None:
    """Prompt of one block, two blocks to decode, all sure: prompt, A, store A, B. The last one is not stored.

    Where rows are read one before their slot, B's first slot is read where A was stored.
    """
    facts = replace(FROM_ZERO, shift=shift)
    each = {slot: row(0.99, slot % 7) for slot in range(4, 12)}
    outcome = run(MultiBDSampler(block_size=4, buffer_blocks=1), each, 8, prompt=4, facts=facts)
    assert windows(outcome) == [(0, 4), (4, 8), (4, 8), (8, 12)]
    assert kinds(outcome) == ["prefill", "denoise", "commit", "denoise"]
    assert commits(outcome) == [[], [4, 5, 6, 7], [], [8, 9, 10, 11]]
    assert outcome.state is not None and outcome.state.tokens[4:] == [slot % 7 for slot in range(4, 12)]


def test_an_end_token_makes_the_buffers_last_block_the_last_one() -> None:
    outcome = run(
        MultiBDSampler(block_size=2, buffer_blocks=2, block_add_threshold=0.5),
        table({4: 0.99, 5: 0.5, 6: 0.99, 7: 0.5}, ends=[6]),
        8,
        prompt=4,
        facts=FROM_ZERO,
    )
    assert commits(outcome) == [[], [4], [5, 6], [7]]


ENTROPY_ROWS = table({1: 0.7, 2: 0.6, 3: 0.99, 4: 0.8, 5: 0.95, 6: 0.3, 7: 0.2, 8: 0.4})


def test_entropy_trace_worked_by_hand() -> None:
    """Blocks 1..4 and 5..8; add 0.25; entropy is small from probability 0.94 on: slots 3 and 5.

    1. The first block only, although all is run: 3.
    2. It is 1/4: the second joins. Small: 5, also the best of all; the first open block got nothing: its best, 4.
    3. None is small. The best of all, 1 (0.7), is in the first open block.   4. 2, which ends that block.
    5. to 7. The second block: 8 (0.4), 6 (0.3), 7 (0.2).
    """
    sampler = D3LLMSampler(block_size=4, block_add_threshold=0.25, entropy_threshold=entropy(0.94))
    outcome = run(sampler, ENTROPY_ROWS, 8, prompt=1)
    assert commits(outcome) == [[3], [4, 5], [1], [2], [8], [6], [7]]
    assert set(windows(outcome)) == {(0, 9)}, "the whole canvas is run from the first forward on"


def test_the_surest_of_all_blocks_goes_along_only_where_it_is_asked_for() -> None:
    """Block 0..1 is open and unsure (0.5), 2 in the next one is surer (0.7), none is sure."""
    rows = table({0: 0.5, 1: 0.4, 2: 0.7, 3: 0.6})
    sampler = D3LLMSampler(block_size=2, block_add_threshold=0.0, entropy_threshold=0.0, always_surest=True)
    assert commits(run(sampler, rows, 4)) == [[0, 2], [1, 3]]
    assert commits(run(replace(sampler, always_surest=False), rows, 4)) == [[0], [1], [2], [3]]
    assert (
        D3LLMSampler.suited(FULL)["always_surest"] and not D3LLMSampler.suited(replace(FULL, shift=1))["always_surest"]
    )


def mixed(tokens: Mapping[int, int], slot: int) -> list[float]:
    """A prediction that depends on all tokens in sight."""
    likely = (slot * 7919 + sum(tokens.values()) * 104_729) % 8
    peak = 1.5 + (slot * 31 + sum(tokens.values())) % 7 / 2
    return [peak if i == likely else 0.1 * ((slot + i) % 3) for i in range(10)]


def dparallel(threshold: float, prompt: int, length: int, size: int) -> tuple[list[int], int]:
    """Plain decoding by entropy, one block after the other, written apart: tokens and forwards."""
    held = [5] * prompt + [MASK] * length
    forwards = 0
    for start in range(prompt, prompt + length, size):
        while masked := [slot for slot in range(start, start + size) if held[slot] == MASK]:
            forwards += 1
            laws = {slot: _law(mixed(dict(enumerate(held)), slot)) for slot in masked}
            uncertain = {slot: -sum(p * math.log(p) for p in law) for slot, law in laws.items()}
            best = min(masked, key=uncertain.__getitem__)
            for slot in masked:
                if slot == best or uncertain[slot] <= threshold:
                    held[slot] = max(range(9), key=laws[slot].__getitem__)
    return held, forwards


def _law(logits: Sequence[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(value) / total for value in logits]


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.6, 3.0])
def test_block_thresholds_of_one_give_dparallel(threshold: float) -> None:
    sampler = D3LLMSampler(
        block_size=4, block_add_threshold=1.0, block_activate_threshold=1.0, entropy_threshold=threshold
    )
    outcome = run(sampler, mixed, 16, prompt=3)
    assert outcome.state is not None
    assert (outcome.state.tokens, outcome.counts()["nfe"]) == dparallel(threshold, 3, 16, 4)


def test_an_add_threshold_of_one_gives_semi_autoregressive_decoding() -> None:
    """D2F, one block at a time, is the threshold rule on a block-causal model, less the forwards that only store."""
    within = lambda tokens, slot: mixed({i: t for i, t in tokens.items() if i // 4 == slot // 4}, slot)  # noqa: E731
    plain = run(ThresholdSampler(block_size=4, steps=16, threshold=0.4, cache="block"), within, 16, 4, BLOCKS)
    piped = run(D2FSampler(block_size=4, threshold=0.4, block_add_threshold=1.0), within, 16, 4, BLOCKS)
    assert plain.state is not None and piped.state is not None
    assert plain.state.tokens == piped.state.tokens
    assert piped.counts()["nfe"] == plain.counts()["nfe_denoise"] < plain.counts()["nfe"]


def ending(tokens: Mapping[int, int], slot: int) -> list[float]:
    """Slots 0 and 1 unsure, an end token at 2; behind it words, that are sure only while slot 2 is open."""
    if slot == 2:
        return row(0.99, END)
    return row({0: 0.5, 1: 0.4}.get(slot, 0.9 if tokens[2] == MASK else 0.3))


def test_what_follows_an_end_token_becomes_it_and_is_not_decoded() -> None:
    """Forward 1 commits 2, the end token: all behind it is closed. Then 0 and 1, the surer first."""
    sampler = D3LLMSampler(block_size=4, entropy_threshold=entropy(0.95), early_stop=True)
    outcome = run(sampler, ending, 12)
    assert outcome.state is not None
    assert outcome.state.tokens == [WORD, WORD, *[END] * 10]
    assert outcome.counts()["nfe"] == 3


def test_compat_overwrites_what_was_just_closed() -> None:
    """As the authors' code: in the forward after the end token (2) came the slots behind it still are candidates.

    All that is open is sure then. So forward 2 decides 0 and 1 and, in the authors' code, writes words over the filling
    behind 2; no mask is left, so nobody closes it again.
    """

    def rows(tokens: Mapping[int, int], slot: int) -> list[float]:
        if tokens[2] == MASK:
            return row(0.99, END) if slot == 2 else row(0.2)
        return row(0.9)

    loose = D3LLMSampler(block_size=4, entropy_threshold=entropy(0.85), early_stop=True)
    right, theirs = run(loose, rows, 8), run(replace(loose, compat="d3llm"), rows, 8)
    assert right.state is not None and theirs.state is not None
    assert right.state.tokens == [WORD, WORD, *[END] * 6]
    assert theirs.state.tokens == [WORD, WORD, END, *[WORD] * 5]
    assert right.counts()["nfe"] == theirs.counts()["nfe"] == 2


def test_a_round_that_only_closes_is_noted_for_the_authors_count() -> None:
    rows = table({slot: 0.99 if slot < 3 else 0.3 for slot in range(8)}, ends=[2])
    outcome = run(D3LLMSampler(block_size=4, entropy_threshold=entropy(0.9), early_stop=True, compat="d3llm"), rows, 8)
    assert outcome.state is not None
    assert (outcome.counts()["nfe"], outcome.state.notes[UNCOUNTED]) == (1, 1)
    assert outcome.state.tokens == [WORD, WORD, *[END] * 6]


def test_the_delayed_cache_worked_by_hand() -> None:
    """Prompt 0..1, blocks of 2 at 2 and 4, delay 1, all forced one by one (entropy 0, one block at a time).

    1. The prompt has waited since before: stored by the first forward, on the whole row. Commits one of 2..3.
    2. From 2 on. Block 2 is done.   3. It must wait one forward: the whole row, the prompt's keys anew.
    4. From 2 on, storing block 2. The last block is done.
    """
    sampler = D3LLMSampler(
        block_size=2, block_add_threshold=1.0, entropy_threshold=0.0, cache="prefix", block_activate_threshold=1.0
    )
    outcome = run(sampler, {}, 4, prompt=2)
    assert windows(outcome) == [(0, 6), (2, 6), (0, 6), (2, 6)]
    assert kinds(outcome) == ["denoise", "denoise", "refresh", "denoise"]
    often = run(replace(sampler, cache_delay=0, cache_refresh_interval=2), {}, 6, prompt=2)
    assert windows(often) == [(0, 8), (0, 8), (2, 8), (0, 8), (4, 8), (0, 8)]
    assert kinds(often)[1] == "refresh"


def test_a_window_behind_stored_keys_starts_where_its_first_slot_is_read() -> None:
    """Where slot i is read at row i - 1 one slot more is run; the authors' code reads the first slot at its own row."""
    facts = replace(FULL, shift=1)
    sampler = D3LLMSampler(
        block_size=2, block_add_threshold=1.0, entropy_threshold=0.0, cache="prefix", always_surest=False
    )
    words = {slot: row(0.5, slot) for slot in range(1, 7)}
    right = run(sampler, words, 2, prompt=2, facts=facts)
    assert right.state is not None and right.state.tokens == [5, 5, 2, 3] and windows(right) == [(0, 4), (1, 4)]
    swapped = {**words, 3: row(0.6, 3)}  # 3 goes first, in the forward that stores the prompt
    theirs = run(replace(sampler, compat="d3llm"), swapped, 2, prompt=2, facts=facts)
    assert theirs.state is not None and theirs.state.tokens == [5, 5, 3, 3] and windows(theirs) == [(0, 4), (2, 4)]


EVERY: list[tuple[MultiBlockSampler, ModelFacts]] = [
    (D2FSampler(block_size=4, threshold=0.5), FULL),
    (D2FSampler(block_size=5, threshold=0.5, cache="none", order="entropy"), FULL),
    (D2FSampler(block_size=4, threshold=0.5, temperature=0.8, top_p=0.9), replace(FULL, shift=1)),
    (D2FSampler(block_size=4, threshold=0.5, early_stop=True), FROM_ZERO),
    (MultiBDSampler(block_size=4, threshold=0.5), FROM_ZERO),
    (MultiBDSampler(block_size=3, threshold=0.5, buffer_blocks=1), replace(FROM_ZERO, shift=1)),
    (MultiBDSampler(block_size=4, threshold=0.5, buffer_blocks=2), FULL),
    (D3LLMSampler(block_size=4, entropy_threshold=1.2), FULL),
    (D3LLMSampler(block_size=4, entropy_threshold=1.2, always_surest=False, early_stop=True), replace(FULL, shift=1)),
    (D3LLMSampler(block_size=5, entropy_threshold=1.2, cache="prefix", cache_refresh_interval=3), FULL),
    (D3LLMSampler(block_size=4, entropy_threshold=1.2, cache="prefix", compat="d3llm"), replace(FULL, shift=1)),
    (D3LLMSampler(block_size=4, entropy_threshold=1.2, cache="prefix", temperature=0.7, early_stop=True), FULL),
]


@pytest.mark.parametrize(("sampler", "facts"), EVERY)
def test_every_multi_block_method_ends_fills_its_canvas_and_depends_on_no_neighbour(
    sampler: MultiBlockSampler, facts: ModelFacts
) -> None:
    prompts = [[5] * n for n in (1, 2, 4, 7, 9)]
    tasks = [Task(i, prompt, 14, stream=i) for i, prompt in enumerate(prompts)]
    decoded = []
    for max_rows in (1, 4):
        outcomes = list(Engine(TableAdapter(facts, mixed), sampler, max_rows).decode(tasks, 32))
        decoded.append({o.task.index: o for o in outcomes})
    for index, prompt in enumerate(prompts):
        one, four = decoded[0][index], decoded[1][index]
        assert one.state is not None and four.state is not None and one.failure is None, one.error
        assert one.state.tokens == four.state.tokens and one.log == four.log
        answer = one.state.tokens[len(prompt) :]
        assert one.state.tokens[: len(prompt)] == prompt
        assert MASK not in answer[: answer.index(END) if END in answer else None]
        extra = len(answer) // sampler.block_size + 2  # forwards that store or refresh only
        assert one.counts()["nfe"] <= len(answer) + extra


def test_settings_out_of_range_and_unfit_models_are_refused_in_words() -> None:
    for wrong in ({"block_size": 0}, {"block_add_threshold": 1.1}, {"block_activate_threshold": -1}, {"eos": "last"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            D2FSampler(**wrong)  # type: ignore[arg-type]
    for sampler, wrong in (
        (D2FSampler, {"order": "random"}),
        (D2FSampler, {"cache": "dual"}),
        (MultiBDSampler, {"buffer_blocks": 0}),
        (D3LLMSampler, {"entropy_threshold": -1.0}),
        (D3LLMSampler, {"cache_delay": -1}),
        (D3LLMSampler, {"cache_refresh_interval": 0}),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampler(**wrong)  # type: ignore[operator]
    with pytest.raises(ValueError, match="needs full attention"):
        D3LLMSampler.check(BLOCKS)
    with pytest.raises(ValueError, match="fills mask tokens"):
        D2FSampler.check(replace(FULL, mask_id=None))
    assert D2FSampler.suited(replace(FULL, trained_block=16)) == {"block_size": 16}
