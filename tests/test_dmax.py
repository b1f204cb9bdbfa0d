"""DMax: the worked traces of its specification, its rule's limits, and what holds of every run."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from adapters.toy import TableAdapter
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import DMaxSampler, ModelFacts
from samplers.dmax import sure_from_the_left
from tests.models import END, MASK, random_llama
from tests.shared import shared
from tests.test_samplers import log_probabilities

M = 9
FULL = ModelFacts(vocab_size=10, mask_id=M, end_ids=frozenset({4}), attentions=frozenset({"full"}))
BLOCKS = replace(FULL, attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")

Row = tuple[Sequence[int], Sequence[float]]  # argmax and its probability, slot by slot
CHANGING: list[Row] = [
    ((5, 6, 7, 8), (0.9, 0.6, 0.3, 0.8)),
    ((5, 3, 7, 8), (0.95, 0.7, 0.6, 0.85)),
    ((5, 3, 7, 8), (0.97, 0.8, 0.7, 0.9)),
]
SURE: list[Row] = [((5, 6, 7, 8), (0.95, 0.92, 0.91, 0.99))]


class Script(TableAdapter):
    """Says at its n-th forward what the n-th row of a script has; the last row holds from then on."""

    def __init__(self, rows: Sequence[Row], facts: ModelFacts = FULL) -> None:
        super().__init__(facts, self._row)
        self.rows, self.shown = rows, []  # type: ignore[var-annotated]

    def _row(self, seen: Mapping[int, int], slot: int) -> Sequence[float]:
        tokens, probabilities = self.rows[min(self.calls, len(self.rows)) - 1]
        return log_probabilities(**{f"p{tokens[slot % len(tokens)]}": probabilities[slot % len(tokens)]})

    def hidden(self, group: Any) -> Any:
        self.shown.append({slot: (s.ids, s.weights) for slot, s in group.forwards[0].inputs.items()})
        return super().hidden(group)


def decode(adapter: Any, sampler: DMaxSampler, length: int = 4, prompt: tuple[int, ...] = ()) -> Outcome:
    slots = len(prompt) + sampler.canvas_length(len(prompt), length, adapter.facts)
    (outcome,) = Engine(adapter, sampler, max_rows=1).decode([Task(0, list(prompt), length, traced=True)], slots)
    assert outcome.state is not None
    return outcome


def states(outcome: Outcome) -> list[list[int]]:
    """The canvas after each forward."""
    assert outcome.state is not None
    canvas, seen = [M] * len(outcome.state.tokens), []
    for record in outcome.trace:
        for slot, token, _ in record["changed"]:
            canvas[slot] = token
        seen.append(list(canvas))
    return seen


def sampler(threshold: float = 0.5, **options: Any) -> DMaxSampler:
    return DMaxSampler(**{"block_size": 4, "steps": 4, "threshold": threshold, **options})


# ---- worked traces ---------------------------------------------------------------------------------------------------


def test_masks_are_filled_from_the_left_and_filled_slots_rewritten_until_nothing_changes() -> None:
    outcome = decode(Script(CHANGING), sampler())
    assert states(outcome) == [[5, 6, M, M], [5, 3, 7, 8], [5, 3, 7, 8]]
    assert outcome.counts()["nfe"] == 3 and outcome.state is not None and outcome.state.revised == 1


def test_at_threshold_0_the_first_step_fills_the_block() -> None:
    outcome = decode(Script(CHANGING), sampler(0.0))
    assert states(outcome) == [[5, 6, 7, 8], [5, 3, 7, 8], [5, 3, 7, 8]]


def test_a_block_of_which_all_is_sure_takes_one_forward() -> None:
    assert states(decode(Script(SURE), sampler())) == [[5, 6, 7, 8]]


def test_a_sure_block_with_masks_left_goes_on_but_for_the_authors_code() -> None:
    """At thresholds above the end test's 0.9 their code leaves masks: a fault that `compat` keeps."""
    outcome = decode(Script(SURE), sampler(0.95))
    assert states(outcome) == [[5, M, M, M], [5, 6, M, M], [5, 6, 7, M], [5, 6, 7, 8]]
    theirs = decode(Script(SURE), sampler(0.95, compat="dmax"))
    assert states(theirs) == [[5, M, M, M]]
    assert theirs.error == "the sampler ended and left slot 1 undecided"


def test_filled_slots_are_shown_as_they_were_predicted_last_and_masks_as_they_are() -> None:
    adapter = Script(CHANGING)
    decode(adapter, sampler())
    assert [sorted(shown) for shown in adapter.shown] == [[], [0, 1], [0, 1, 2, 3]]
    assert adapter.shown[1][1] == ((6,), (pytest.approx(0.6),))
    assert adapter.shown[2][1] == ((3,), (pytest.approx(0.7),))


def test_prompt_tails_and_decided_blocks_are_shown_as_they_are() -> None:
    adapter = Script(CHANGING, BLOCKS)
    decode(adapter, sampler(steps=8), length=7, prompt=(1,))
    assert {slot for shown in adapter.shown[:3] for slot in shown} == {1, 2, 3}
    assert {slot for shown in adapter.shown[3:] for slot in shown} <= {4, 5, 6, 7}


def test_the_promoted_masks_are_the_authors() -> None:
    vectors = json.loads(shared("golden", "units", "units.json").read_text())["dmax_transfer_uniform"]
    assert len(vectors) >= 32
    for vector in vectors:
        masked = [slot for slot, is_mask in enumerate(vector["mask"]) if is_mask]
        confidence = dict(enumerate(vector["max_probs"]))
        count = max(1, sure_from_the_left(masked, confidence, vector["threshold"]))
        assert masked[:count] == [slot for slot, is_selected in enumerate(vector["selected"]) if is_selected]


def test_filled_slots_in_between_neither_help_nor_break_the_run() -> None:
    assert sure_from_the_left([0, 3], {0: 0.6, 1: 0.1, 2: 0.1, 3: 0.7}, 0.5) == 2
    assert sure_from_the_left([0, 3], {0: 0.6, 1: 0.9, 2: 0.9, 3: 0.4}, 0.5) == 1


def test_a_mask_as_sure_as_the_threshold_is_sure_enough() -> None:
    assert sure_from_the_left([0, 1], {0: 0.5, 1: 0.5 - 1e-9}, 0.5) == 1


# ---- forwards --------------------------------------------------------------------------------------------------------


def windows(outcome: Outcome) -> list[tuple[str, list[int], int]]:
    return [(record["kind"], record["window"], record["cached"][1]) for record in outcome.trace]


def test_a_block_is_stored_by_the_first_forward_of_the_next() -> None:
    """Prompt of 6 in blocks of 4: a prefill, the block with the prompt's tail, then one forward over two blocks."""
    prompt = (1, 2, 3, 1, 2, 3)
    assert windows(decode(Script(SURE, BLOCKS), sampler(cache="block", steps=8), 8, prompt)) == [
        ("prefill", [0, 4], 0),
        ("denoise", [4, 8], 4),
        ("denoise", [4, 12], 4),
        ("denoise", [8, 16], 8),
    ]


def test_a_prompt_shorter_than_a_block_costs_the_authors_a_forward() -> None:
    ours = decode(Script(SURE, BLOCKS), sampler(cache="block"), 3, (1,))
    theirs = decode(Script(SURE, BLOCKS), sampler(cache="block", compat="dmax"), 3, (1,))
    assert [run.window for run in ours.log] == [4] and [run.window for run in theirs.log] == [4, 4]
    assert theirs.counts()["nfe_commit"] == 1 and ours.counts()["nfe_commit"] == 0
    assert ours.state is not None and theirs.state is not None and ours.state.tokens == theirs.state.tokens


def test_an_end_token_ends_the_sequence_after_its_block() -> None:
    adapter = Script([((5, 4, 7, 8), (0.95,) * 4)])
    stopped, whole = decode(adapter, sampler(steps=8), 8), decode(adapter, sampler(steps=8, early_stop=False), 8)
    assert (stopped.counts()["nfe"], whole.counts()["nfe"]) == (1, 2)
    assert states(stopped)[-1] == [5, 4, 7, 8, M, M, M, M]


def test_an_end_token_in_the_prompts_tail_ends_only_the_authors_code() -> None:
    """Theirs fills the block, then all that is behind it with the end token: one forward for the tail, one for it."""
    ours = decode(Script(SURE, BLOCKS), sampler(cache="block", steps=8), 7, (4,))
    theirs = decode(Script(SURE, BLOCKS), sampler(cache="block", steps=8, compat="dmax"), 7, (4,))
    assert states(ours)[-1][1:] == [6, 7, 8, 5, 6, 7, 8] and states(theirs)[-1][1:] == [6, 7, 8, 4, 4, 4, 4]
    assert (ours.failure, theirs.failure) == (None, None)
    assert (ours.counts()["nfe"], theirs.counts()["nfe"]) == (2, 2) and theirs.counts()["nfe_commit"] == 1


@pytest.mark.parametrize("compat", [None, "dmax"])
def test_with_an_end_token_in_the_prompts_tail_no_mask_is_left_or_the_sample_has_failed(compat: str | None) -> None:
    """Above the end test's 0.9 their code leaves the block's masks: that is no answer, whatever ends the sequence."""
    rule = sampler(0.95, cache="block", steps=8, compat=compat)
    outcome = decode(Script([((5, 6, 7, 8), (0.92,) * 4)], BLOCKS), rule, 7, (1, 4))
    left = [slot for slot, token in enumerate(states(outcome)[-1]) if slot > 1 and token == M]
    assert left == ([3] if compat else [])
    assert outcome.error == ("the sampler ended and left slot 3 undecided" if compat else None)


def test_fewer_steps_fill_more_at_once() -> None:
    """Two steps for a block of four, of which nothing is sure: two masks at each."""
    unsure: list[Row] = [((5, 6, 7, 8), (0.3, 0.3, 0.3, 0.3))]
    assert states(decode(Script(unsure), sampler(steps=2))) == [[5, 6, M, M], [5, 6, 7, 8]]
    assert decode(Script(unsure), sampler()).counts()["nfe"] == 4


# ---- on networks -----------------------------------------------------------------------------------------------------


def block_causal() -> TransformerAdapter:
    adapter = random_llama()
    adapter.facts = replace(adapter.facts, attention="blocks", block_origin="zero")
    return adapter


def run(adapter: TransformerAdapter, sampler: DMaxSampler, max_rows: int) -> list[Outcome]:
    draw = random.Random(5)
    prompts = [[draw.randrange(END) for _ in range(length)] for length in (3, 8, 13, 21, 4)]
    outcomes = Engine(adapter, sampler, max_rows).decode([Task(i, p, 24) for i, p in enumerate(prompts)], 64)
    return sorted(outcomes, key=lambda outcome: outcome.task.index)


CACHED = [("blocks", "block"), ("blocks", "none"), ("full", "none"), ("full", "prefix"), ("full", "dual")]


@pytest.mark.parametrize(("attention", "cache"), CACHED)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.6, 1.0])
def test_every_run_ends_within_its_steps_leaves_no_mask_and_is_the_same_in_a_batch(
    attention: str, cache: str, threshold: float
) -> None:
    adapter = block_causal() if attention == "blocks" else random_llama()
    rule = DMaxSampler(block_size=8, steps=24, threshold=threshold, cache=cache, early_stop=False)
    alone, batched = run(adapter, rule, 1), run(adapter, rule, 4)
    for one, other in zip(alone, batched):
        assert one.failure is None and one.state is not None and other.state is not None
        assert one.state.tokens[: one.state.prompt_length] == one.task.prompt
        assert MASK not in one.state.tokens[one.state.prompt_length :]
        blocks = len(list(one.state.blocks(8)))
        assert one.counts()["nfe"] - one.counts()["nfe_prefill"] <= 8 * blocks
        assert [one.log, one.state.tokens] == [other.log, other.state.tokens]


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.6, 1.0])
def test_keeping_the_keys_of_decided_blocks_changes_no_token_and_no_order(threshold: float) -> None:
    adapter, rule = block_causal(), DMaxSampler(block_size=8, steps=24, threshold=threshold, early_stop=False)
    kept, whole = (run(adapter, replace(rule, cache=cache), 1) for cache in ("block", "none"))
    for one, other in zip(kept, whole):
        assert one.state is not None and other.state is not None
        assert one.state.tokens == other.state.tokens
        changed = [[record["changed"] for record in outcome.trace] for outcome in (one, other)]
        assert changed[0] == changed[1]
        prefilled = one.counts()["nfe_prefill"]
        assert one.counts()["nfe"] == other.counts()["nfe"] + prefilled
        assert one.counts()["token_forwards"] < other.counts()["token_forwards"]


def test_blocks_are_sealed_in_order() -> None:
    for outcome in run(block_causal(), DMaxSampler(block_size=8, steps=24, threshold=0.1, cache="block"), 3):
        assert outcome.state is not None
        sealed = [max(outcome.state.committed_at[slot] for slot in block) for block in outcome.state.blocks(8)]
        assert all(before < after for before, after in pairwise(at for at in sealed if at >= 0))


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_are_refused_out_of_their_range() -> None:
    for wrong, said in (({"threshold": 1.5}, "threshold=1.5"), ({"compat": "fastdllm_a"}, "compat=fastdllm_a")):
        with pytest.raises(ValueError, match=f"sampler.{said} is out of range"):
            sampler(**wrong)


def test_the_cache_that_suits_depends_on_the_attention() -> None:
    assert DMaxSampler.suited(FULL) == {"cache": "none"} and DMaxSampler.suited(BLOCKS) == {"cache": "block"}
    assert not {"order", "cfg_scale"} & DMaxSampler.options()
