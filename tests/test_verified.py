"""What drafts came to, on forwards and decisions made by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.verified import Verified, by_position, clipped, verified
from samplers import CAUSAL, Attend, DecodeState, Forward, Kind, ModelFacts

END, MASK, PROMPT = 9, 19, 3
CAUSAL_MODEL = ModelFacts(20, None, frozenset({END}), shift=1, attention="causal", attentions=frozenset({"causal"}))
MASKED_MODEL = ModelFacts(20, MASK, frozenset({END}))


def decoding(model: ModelFacts, tokens: Sequence[int] = (), asked: int = 16, length: int | None = None) -> DecodeState:
    """A row with these tokens decided behind its prompt, one a forward; the next forward has just come back."""
    state = DecodeState.masked([1] * PROMPT, asked, model, length=length)
    for slot, token in enumerate(tokens, PROMPT):
        state.forwards += 1
        state.commit(slot, token)
    state.changes, state.forwards = [], state.forwards + 1
    return state


def decide(state: DecodeState, tokens: Mapping[int, int]) -> DecodeState:
    for slot, token in tokens.items():
        state.commit(slot, token)
    return state


def chain(start: int, drafts: Sequence[int], attend: Attend | None = CAUSAL) -> Forward:
    """Drafts behind the anchor at ``start``."""
    window = range(start, start + len(drafts) + 1)
    content = [dict(zip(window[1:], drafts, strict=True))]
    return Forward(window, window[1:], variants=content, proposed=window[1:], attend=attend, kind=Kind.VERIFY)


def tree(start: int, nodes: Sequence[tuple[int, int]]) -> Forward:
    """Nodes behind the anchor as (place of the parent, token)."""
    parents = (0, *(parent for parent, _ in nodes))
    return chain(start, [token for _, token in nodes], Attend("tree", parents=parents))


def states(*drafts: Mapping[int, int]) -> Forward:
    """The present state of a window of 8 slots and these future ones."""
    window = range(PROMPT, PROMPT + 8)
    return Forward(window, window, variants=[{}, *drafts], proposed=list(drafts[-1]), kind=Kind.VERIFY)


def told(entry: Verified) -> tuple[int, int, int]:
    counts = entry.counts()
    return counts["proposed"], counts["accepted"], counts["emitted"]


@pytest.mark.parametrize("attend", [CAUSAL, None])  # said, or the model's own
@pytest.mark.parametrize(
    ("decided", "accepted"),
    [
        ([5, 6, 7, 8], 3),  # all of them, and the bonus
        ([5, 6, 4], 2),
        ([4], 0),
        ([4, 6, 7], 0),  # what follows a rejected draft is not by drafts, whatever it is
        ([5, 6], 2),  # the sampler stops with a draft, as before the limit
        ([], 0),
    ],
)
def test_a_chain_counts_the_drafts_up_to_the_first_rejected(
    attend: Attend | None, decided: list[int], accepted: int
) -> None:
    state = decoding(CAUSAL_MODEL, [2])
    entry = verified(chain(PROMPT, [5, 6, 7], attend), decide(state, dict(enumerate(decided, PROMPT + 1))))
    assert told(entry) == (3, accepted, len(decided)) and entry.forward == 2
    assert entry.kept == tuple(range(PROMPT + 1, PROMPT + 1 + accepted))


BRANCHES = [(0, 5), (0, 6), (1, 7), (2, 7), (3, 8)]  # 5-7-8 and 6-7


@pytest.mark.parametrize(
    ("decided", "accepted"),
    [
        ([5, 7, 8, 4], 3),
        ([6, 7, 4], 2),
        ([6, 7, 8], 2),  # 8 hangs below 5-7: as the bonus of 6-7 it is the model's own
        ([7, 8], 0),  # 7 is no child of the anchor
        ([5, 6], 1),  # a sibling's token as the bonus
        ([4], 0),
    ],
)
def test_a_tree_counts_the_nodes_of_one_branch(decided: list[int], accepted: int) -> None:
    state = decide(decoding(CAUSAL_MODEL, [2]), dict(enumerate(decided, PROMPT + 1)))
    assert told(verified(tree(PROMPT, BRANCHES), state)) == (5, accepted, len(decided))


def test_nodes_may_lie_behind_the_row_and_in_any_order_below_their_parents() -> None:
    state = decoding(CAUSAL_MODEL, [2], asked=4)
    nodes = [(0, 4), (0, 5), (2, 6), (1, 8), (3, 7), (5, 8)]
    entry = verified(tree(PROMPT, nodes), decide(state, {4: 5, 5: 6, 6: 7}))
    assert told(entry) == (6, 3, 3)


STATES = ({3: 5}, {3: 5, 6: 7}, {3: 5, 6: 7, 4: 8})


@pytest.mark.parametrize(
    ("decided", "accepted"),
    [
        ({3: 5, 6: 7, 4: 8, 9: 2}, 3),
        ({3: 5, 6: 7, 9: 2}, 2),
        ({3: 5, 4: 8}, 1),  # the step from the first state decides a later one's slot, which is not that state
        ({3: 5, 6: 8}, 1),
        ({6: 7, 4: 8}, 0),
        ({3: 5}, 0),  # the present state's own step
    ],
)
def test_of_several_states_the_farthest_that_was_reached_counts(decided: dict[int, int], accepted: int) -> None:
    entry = verified(states(*STATES), decide(decoding(MASKED_MODEL), decided))
    assert told(entry) == (3, accepted, len(decided))


def test_only_what_this_forward_decided_counts() -> None:
    """Slots decided before, decided anew as they are, or decided and taken back."""
    state = decoding(MASKED_MODEL, [5])
    state.commit(3, 5)
    state.commit(4, 6)
    state.commit(5, 7)
    state.remask(5)
    assert told(verified(states({4: 6}, {4: 6, 5: 7}), state)) == (2, 0, 1)


def test_what_is_shown_and_not_proposed_is_no_draft() -> None:
    forward = replace(chain(PROMPT, [5, 6, 7]), proposed=[4])
    assert told(verified(forward, decide(decoding(CAUSAL_MODEL, [2]), {4: 5, 5: 6, 6: 7}))) == (1, 1, 3)


def test_a_forward_without_drafts_emits_its_own_token() -> None:
    assert told(verified(chain(PROMPT, []), decide(decoding(CAUSAL_MODEL, [2]), {4: 6}))) == (0, 0, 1)


@pytest.mark.parametrize(
    ("decided", "asked", "expected"),
    [
        ({4: 5, 5: 6, 6: 7, 7: 8}, 16, (3, 3, 4)),
        ({4: 5, 5: END, 6: 7, 7: 8}, 16, (3, 2, 2)),  # an end token as a draft, which counts
        ({4: 5, 5: 6, 6: 7, 7: END}, 16, (3, 3, 4)),  # as the bonus
        ({4: 5, 5: 6, 6: 7, 7: 8}, 3, (3, 2, 2)),  # three tokens were asked for, one was there
        ({4: 5, 6: 7, 7: 8}, 16, (3, 1, 1)),  # behind a slot left open
    ],
)
def test_nothing_behind_the_end_token_or_the_limit_counts(
    decided: dict[int, int], asked: int, expected: tuple[int, int, int]
) -> None:
    state = decide(decoding(CAUSAL_MODEL, [2], asked, 16), decided)
    drafts = [decided.get(slot, 0) for slot in range(4, 7)]
    entry = Verified(2, 3, tuple(s for s in decided if s < 7 and state.tokens[s] == drafts[s - 4]), tuple(decided))
    (kept,) = clipped([entry], state)
    assert told(kept) == expected


def test_an_end_token_cuts_what_was_decided_behind_it_while_slots_before_it_were_open() -> None:
    """A canvas that fills in any order: what stands behind its end is no part of the answer."""
    state = decide(decoding(MASKED_MODEL), {10: 7, 9: 6, 8: END})
    first = verified(states({8: END}, {8: END, 9: 6}), state)
    assert told(first) == (2, 2, 3)
    state.forwards, state.changes = state.forwards + 1, []
    decide(state, dict.fromkeys(range(PROMPT, PROMPT + 5), 2))
    last = verified(states({3: 2}, {3: 2, 4: 2}), state)
    assert [told(entry) for entry in clipped([first, last], state)] == [(2, 1, 1), (2, 2, 5)]


def test_the_histogram_says_how_many_forwards_accepted_more_than_n() -> None:
    log = [
        Verified(n, 3, tuple(range(accepted)), tuple(range(accepted + 1))) for n, accepted in enumerate([2, 0, 3, 2])
    ]
    assert by_position(log) == [3, 3, 1] and sum(by_position(log)) == 7
    assert by_position(log[1:2]) == [] and by_position([]) == []


@pytest.mark.parametrize("seed", range(60))
def test_never_more_is_accepted_than_proposed_or_emitted(seed: int) -> None:
    draw = random.Random(seed)
    worded: Any = [lambda: chain(PROMPT, tokens(draw)), lambda: tree(PROMPT, grown(draw)), lambda: future(draw)]
    log, state = [], decoding(CAUSAL_MODEL if seed % 3 < 2 else MASKED_MODEL, [2] * (seed % 3 < 2))
    forward = worded[seed % 3]()
    slots = range(PROMPT + (seed % 3 < 2), PROMPT + 9)
    decide(state, {slot: draw.choice([5, 6, END]) for slot in slots[: draw.randint(0, 8)]})
    log = [verified(forward, state)]
    for entry in (*log, *clipped(log, state)):
        proposed, accepted, emitted = told(entry)
        assert accepted <= proposed and accepted <= emitted and set(entry.kept) <= set(entry.decided)


def tokens(draw: random.Random) -> list[int]:
    return [draw.choice([5, 6, END]) for _ in range(draw.randint(0, 7))]


def grown(draw: random.Random) -> list[tuple[int, int]]:
    return [(draw.randrange(place + 1), token) for place, token in enumerate(tokens(draw))]


def future(draw: random.Random) -> Forward:
    slots = draw.sample(range(PROMPT, PROMPT + 8), draw.randint(1, 6))
    content = {slot: draw.choice([5, 6, END]) for slot in slots}
    return states(*({slot: content[slot] for slot in slots[:count]} for count in range(1, len(slots) + 1)))
