"""What a sampler may not ask for: one sentence each, before the model is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.toy import TableAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import CAUSAL, Attend, DecodeState, Decoding, Forward, Guidance, Kind, ModelFacts, Role, Sampler, Soft

VOCABULARY, MASK = 20, 19
DRAFTER = ModelFacts(VOCABULARY, MASK, frozenset(), max_positions=64)
MODEL = ModelFacts(
    VOCABULARY, None, frozenset(), shift=1, attention="causal", attentions=frozenset({"causal"}), draft=DRAFTER
)
MASKED = ModelFacts(VOCABULARY, MASK, frozenset())
WINDOW = range(3, 7)  # behind a prompt of 4, in a row of 8 slots and 2 spare ones
DRAFTS = {4: 5, 5: 6, 6: 7}


class Scripted(Sampler):
    """Yields one forward, then fills the canvas."""

    method_name = "scripted"
    attentions = frozenset({"full", "causal"})

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        object.__setattr__(self, "asked", forward)

    def spare_slots(self, model: ModelFacts) -> int:
        return 2

    def decode(self, state: DecodeState) -> Decoding:
        yield self.asked  # type: ignore[attr-defined]
        for slot in state.canvas:
            state.commit(slot, 1)


def run(forward: Forward, model: ModelFacts = MODEL, prompt: int = 4) -> Outcome:
    adapter = TableAdapter(model, lambda seen, slot: [0.0] * VOCABULARY)
    (outcome,) = Engine(adapter, Scripted(forward)).decode([Task(0, [1] * prompt, 4)], 4 + prompt)
    assert adapter.calls == (outcome.failure is None)
    return outcome


def verify(**changes: Any) -> Forward:
    """Three drafts behind the anchor, the last token of the prompt."""
    chain = Forward(WINDOW, range(4, 8), variants=[DRAFTS], proposed=list(DRAFTS), attend=CAUSAL, kind=Kind.VERIFY)
    return replace(chain, **changes)


FINE = [
    verify(),
    verify(window=range(3, 10), want=range(4, 11), variants=[dict.fromkeys(range(4, 10), 5)], proposed=[4, 9]),
    verify(attend=Attend("tree", parents=(0, 0, 0, 1)), positions=[3, 4, 4, 5]),
    verify(variants=[{}, {4: 5}, DRAFTS]),
    Forward(range(3, 5), [4, 5], keep=[1, 2]),
]


@pytest.mark.parametrize("forward", FINE)
def test_what_can_be_run_is(forward: Forward) -> None:
    outcome = run(forward)
    assert outcome.failure is None, outcome.error


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (verify(window=range(3, 11)), "asked for range(3, 11) in a row of 10 slots"),
        (verify(context=range(-1, 3)), "asked for range(-1, 3) in a row of 10 slots"),
        (verify(window=range(3, 3)), "an empty window"),
        (verify(store=range(2, 5)), "wants to store range(2, 5), which lies outside range(3, 7)"),
        (verify(keep=[1, 1]), "wants to keep slots [1, 1], which do not close up before range(3, 7)"),
        (verify(keep=[0, 1]), "wants to keep slots [0, 1]"),  # 1 and 2 would be overwritten by what lies before them
        (verify(keep=[2, 10]), "wants to keep slots [2, 10]"),
        (verify(keep=[0, 1, 2, 4]), "wants to keep slots [0, 1, 2, 4]"),  # more than there is room for
        (verify(want=[3]), "wants slots 3..3, whose rows lie outside range(3, 7)"),
        (verify(want=[8]), "wants slots 8..8, whose rows lie outside range(3, 7)"),
        (verify(variants=[{7: 1}]), "shows other tokens at slots [7], which lie outside range(3, 7)"),
        (verify(variants=[{4: VOCABULARY}]), "shows the token 20, which is no id of the model"),
        (verify(variants=[{4: -1}]), "shows the token -1, which is no id of the model"),
        (verify(window=range(3, 9), proposed=[4]), "shows nothing at slots [8] behind the row"),
        (verify(variants=[{}, DRAFTS], store=WINDOW), "several variants of a window can't be stored"),
        (verify(variants=[{}, DRAFTS], carry=True), "several variants of a window can't carry"),
        (verify(variants=[{}, DRAFTS], judged_drafts=True), "several variants of a window can't carry or judge"),
        (verify(positions=[3, 4]), "gave 2 positions for range(3, 7)"),
        (verify(positions=[-1, 4, 5, 6]), "gave the position -1"),
        (verify(attend=Attend("tree", parents=(0, 0))), "gave [0, 0] as a tree over range(3, 7)"),
        (verify(attend=Attend("tree", parents=(0, 2, 1, 0))), "as a tree"),
        (verify(attend=Attend("tree", parents=(1, 0, 0, 0))), "as a tree"),
        (verify(attend=Attend("full")), "full attention of a model that serves causal"),
        (verify(inputs={2: Soft((1,), (1.0,))}), "mixed the inputs of slots [2]"),
        (verify(guidance=Guidance(1.0, range(2))), "guidance needs a model with a mask token"),
        (verify(kind=Kind.DENOISE), "proposes drafts in a forward of kind denoise: use verify"),
        (verify(variants=[]), "proposes drafts at slots [4, 5, 6], but shows none there"),
        (verify(variants=[DRAFTS, {4: 5}]), "proposes drafts at slots [5, 6], but shows none there"),
        (verify(proposed=[4, 4]), "proposes drafts at slots [4, 4], some of them twice"),
        (verify(kind=Kind.DRAFT, proposed=()), "a forward of kind draft is of the drafter"),
        (Forward(WINDOW, [2], role=Role.DRAFT, kind=Kind.DRAFT), "wants slots 2..2"),
        (Forward(WINDOW, attend=CAUSAL, role=Role.DRAFT), "causal attention of a model that serves full"),
    ],
)
def test_what_cannot_be_run_fails_its_sample_in_words(forward: Forward, said: str) -> None:
    outcome = run(forward)
    assert outcome.failure == "failed" and said in (outcome.error or "")


def test_drafts_need_a_drafter_and_trees_a_causal_model() -> None:
    drafting = Forward(WINDOW, WINDOW, role=Role.DRAFT, kind=Kind.DRAFT)
    assert "of a model that comes without a drafter" in (run(drafting, replace(MODEL, draft=None)).error or "")
    tree = verify(attend=Attend("tree", parents=(0, 0, 0, 0)), want=range(3, 7))
    assert "asked for tree attention of a model that serves full" in (run(tree, MASKED).error or "")


def test_the_first_token_needs_one_before_it() -> None:
    first = Forward(range(4), range(4))
    assert run(first, MASKED, prompt=0).failure is None
    assert "an empty prompt" in (run(first, MODEL, prompt=0).error or "")
