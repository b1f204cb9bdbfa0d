"""A decoded sample as a row: visible tokens only, counted in ids, and no number that does not exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.compose import compose
from pipeline.engine import DRAFT_FIGURES, Engine, Outcome, Run, Task
from pipeline.job import Job, prepare
from pipeline.metrics import Timing, summarise
from pipeline.rows import DECODE_FIGURES, Place, make_row, visible
from pipeline.verified import Verified, clipped
from samplers import DecodeState, Kind, ModelFacts, Role, ThresholdSampler

EOS, EOT, MASK = 0, 2, 1
PLACE = Place("cpu", "float32", 8, "torch 2", None)
FACTS = ModelFacts(466, MASK, frozenset({EOS, EOT}))


@pytest.fixture(scope="module")
def job() -> Job:
    """The autoregressive twin's tokenizer with two end tokens; its weights are not read."""
    shape = ["model=tiny_ar", "sampler=autoregressive", "dataset.limit=1", f"model.end_ids=[{EOS},{EOT}]"]
    return replace(prepare(compose(shape)), prompts=[[40] * 200])


def outcome(canvas: list[int], nfe: int = 16, last: int | None = None, seconds: float = 4.0) -> Outcome:
    """A sample of ``nfe`` forwards that decided slot i in forward i + 1, at the latest in ``last``."""
    state = DecodeState.masked([40] * 200, len(canvas), FACTS)
    for i, token in enumerate(canvas):
        state.forwards = min(i + 1, last or nfe)
        if token != MASK:
            state.commit(200 + i, token)
    state.forwards = nfe
    log = [Run(Kind.DENOISE, Role.TARGET, 232, 0)] * nfe
    return Outcome(Task(0, [40] * 200, len(canvas)), state, log, seconds)


def ids(job: Job, text: str) -> list[int]:
    return job.description.codec.tokenizer(text).input_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [[EOS] * 21, [EOT] + [EOS] * 20])
def test_a_row_counts_answer_tokens_only(job: Job, ends: list[int]) -> None:
    """DEC-07: prompt 200, canvas 32 = 11 answer tokens and 21 ends, 16 forwards, 4 seconds."""
    row = make_row(job, outcome([50] * 11 + ends), PLACE)
    assert (row["prompt_tokens"], row["tokens"], row["canvas"], row["nfe"], row["seconds"]) == (200, 11, 32, 16, 4.0)
    assert row["ended"] and not row["stopped"] and row["output_ids"] == [50] * 11 + ends[:1]
    assert row["token_forwards"] == 16 * 232
    figures = summarise([row], 1, Timing(decode_seconds=4.0, decoded_tokens=row["tokens"]))
    assert figures["tokens_per_forward"] == 11 / 16 and figures["tokens_per_second"] == 2.75
    assert figures["tokens_per_forward_decode"] == 12 / 16 and figures["tokens_per_forward_allocated"] == 2.0
    assert figures["tokens_rule"] == "ids before the first end token or stop string"


def test_a_row_tells_what_became_of_drafts(job: Job) -> None:
    """A prefill, then three rounds of a draft of 4 and its verification; the drafter's forwards are not the model's."""
    state = DecodeState.masked([40] * 200, 12, FACTS)
    for number, token in enumerate([50] * 5 + [51] * 3 + [EOS] + [52] * 3):
        state.forwards = (1, 3, 3, 3, 3, 5, 5, 7, 7, 7, 7, 7)[number]
        state.commit(200 + number, token)
    state.forwards = 7
    drafts = [Run(Kind.DRAFT, Role.DRAFT, 5, 200), Run(Kind.VERIFY, Role.TARGET, 5, 200)]
    log = [Run(Kind.PREFILL, Role.TARGET, 200, 0), *drafts * 3]
    rounds = [(3, 3, range(201, 205)), (5, 1, range(205, 207)), (7, 4, range(207, 212))]
    counted = [Verified(number, 4, tuple(slots[:kept]), tuple(slots)) for number, kept, slots in rounds]
    row = make_row(job, Outcome(Task(0, [40] * 200, 12), state, log, 4.0, verified=clipped(counted, state)), PLACE)
    assert (row["nfe"], row["nfe_prefill"], row["nfe_verify"], row["nfe_draft"]) == (4, 1, 3, 3)
    assert (row["tokens"], row["token_forwards"], row["nfe_post_eos"]) == (8, 200 + 3 * 5, 0)
    assert (row["proposed_draft_tokens"], row["accepted_draft_tokens"], row["verified_tokens"]) == (12, 6, 8)
    assert row["accepted_by_position"] == [3, 2, 1], "behind the end token, the last slot but 3, nothing counts"


def test_a_row_without_drafts_has_no_figures_of_them(job: Job) -> None:
    row = make_row(job, outcome([50] * 11 + [EOS] * 21), PLACE)
    assert [row[name] for name in (*DRAFT_FIGURES, "nfe_draft")] == [None] * 5 and row["nfe_verify"] == 0


def test_drafts_that_cost_no_forward_cost_none(job: Job) -> None:
    """A model that drafts for itself, or a table; a drafter that was run in vain."""
    own = outcome([50] * 4, nfe=4)
    own.verified = [Verified(2, 3, (201,), (201, 202))]
    vain = outcome([50] * 4, nfe=4)
    vain.log.append(Run(Kind.DRAFT, Role.DRAFT, 5, 200))
    rows = [make_row(job, each, PLACE) for each in (own, vain)]
    assert [row["nfe_draft"] for row in rows] == [0, 1] and [row["nfe"] for row in rows] == [4, 4]
    assert [row["accepted_draft_tokens"] for row in rows] == [1, None]


def test_a_drafters_forwards_behind_the_end_are_not_the_models(job: Job) -> None:
    late = outcome([50, EOS], nfe=6, last=2)
    late.log[3:5] = [Run(Kind.DRAFT, Role.DRAFT, 5, 200)] * 2
    assert make_row(job, late, PLACE)["nfe_post_eos"] == 2


def test_a_row_also_counts_as_other_projects_do(job: Job) -> None:
    """7 words, an end token, 2 words behind it, ends: two forwards of prefill among 16."""
    decoded = outcome([50] * 7 + [EOS] + [51] * 2 + [EOS] * 22)
    decoded.log[:2] = [Run(Kind.PREFILL, Role.TARGET, 100, 0)] * 2
    row = make_row(job, decoded, PLACE)
    assert (row["tokens"], row["nfe"]) == (7, 16)
    assert (row["tokens_as_d3llm"], row["nfe_as_d3llm"]) == (9, 16)
    assert (row["tokens_as_dmax"], row["nfe_as_dmax"]) == (9, 15)
    assert (row["tokens_as_diffulex"], row["nfe_as_diffulex"]) == (32, 16)
    assert (row["tokens_as_llada2"], row["nfe_as_llada2"]) == (8, 14)
    assert row["tokens_as_fastdllm"] == len(ids(job, job.description.codec.decode([50] * 7))) + len(
        ids(job, job.description.codec.decode([51] * 2))
    )


def test_the_text_tokenized_again_ends_at_a_stop_string(job: Job) -> None:
    job = replace(job, dataset=replace(job.dataset, stop=["\n\n"]))
    canvas = [*ids(job, "9 pens"), *ids(job, "\n\nQuestion"), EOS]
    row = make_row(job, outcome(canvas), PLACE)
    assert row["tokens_as_fastdllm"] == len(ids(job, "9 pens")) and row["tokens_as_d3llm"] == len(canvas) - 1


def test_an_empty_answer_has_no_tokens_and_breaks_nothing(job: Job) -> None:
    row = make_row(job, outcome([EOS] * 32), PLACE)
    assert (row["tokens"], row["text"], row["ended"], row["extracted"], row["correct"]) == (0, "", True, None, False)
    assert row["order_kendall_tau"] is None and row["order_tie_rate"] is None
    assert summarise([row], 1, Timing())["tokens_per_forward"] == 0.0


@pytest.mark.parametrize(("last", "after"), [(16, 4), (12, 4), (3, 13)])
def test_forwards_after_the_end_are_those_after_all_up_to_it_was_final(job: Job, last: int, after: int) -> None:
    """The end token, slot 11, was decided in forward 12, or with everything behind forward 3."""
    assert make_row(job, outcome([50] * 11 + [EOS] * 21, last=last), PLACE)["nfe_post_eos"] == after


def test_no_end_token_means_no_forward_after_it(job: Job) -> None:
    assert make_row(job, outcome([50] * 32), PLACE)["nfe_post_eos"] == 0
    late = outcome([EOS] + [50] * 31)
    assert late.state is not None
    late.state.remask(200)  # an end token taken back is not final
    assert make_row(job, late, PLACE)["nfe_post_eos"] == 0


def test_an_undecided_slot_never_shows_in_a_row(job: Job) -> None:
    """Early stop leaves the rest of the canvas masked; a sampler that leaves a hole ends its answer there."""
    stopped = make_row(job, outcome([50, 51, EOS, 52] + [MASK] * 28), PLACE)
    assert stopped["output_ids"] == [50, 51, EOS] and stopped["canvas"] == 32 and stopped["tokens"] == 2
    holed = make_row(job, outcome([50, MASK, 51, EOS]), PLACE)
    assert holed["output_ids"] == [50] and not holed["ended"]


def test_early_stop_on_a_real_run_leaves_no_mask_in_the_row(job: Job) -> None:
    from tests.models import random_llama

    adapter = random_llama(vocab_size=466)
    adapter.facts = replace(FACTS, end_ids=frozenset(range(100, 300)))
    adapter.read_out.mask_id = MASK
    sampler = ThresholdSampler(block_size=4, steps=32, threshold=0.9, early_stop=True)
    (decoded,) = Engine(adapter, sampler).decode([Task(0, [40] * 20, 32)], 52)
    assert decoded.state is not None and any(decoded.state.mask), "it did stop early"
    row = make_row(job, decoded, PLACE)
    assert MASK not in row["output_ids"] and row["output_ids"][-1] in range(100, 300)
    assert not {*row["output_ids"][:-1]} & {*range(100, 300)}


def test_what_stands_behind_the_end_is_no_part_of_an_answer(job: Job) -> None:
    """Two methods that differ there alone give the same answers, and the same hash of them."""
    one, other = (
        make_row(job, outcome([50, 51, EOS, *behind]), PLACE) for behind in ([EOS] * 5, [52, EOS, 53, 54, 55])
    )
    assert one["output_ids"] == other["output_ids"] == [50, 51, EOS]
    assert one["raw_text"] == other["raw_text"] == job.description.codec.decode([50, 51, EOS], raw=True)
    hashes = {summarise([row], 1, Timing())["outputs_sha256"] for row in (one, other)}
    assert len(hashes) == 1
    assert one["tokens_as_d3llm"] < other["tokens_as_d3llm"]  # as their code counts


STOPS: list[tuple[str, list[str], str]] = [
    ("9 pens and\n\nQuestion: 5", ["\n\nQ"], "9 pens and"),
    ("9 pens and\n\nQuestion: 5", ["5", "pens", "Question"], "9 "),
    ("9 pens", ["never"], "9 pens"),
    ("9 pens", ["9"], ""),
    ("größe 🎈 stop", [" stop"], "größe 🎈"),
]


@pytest.mark.parametrize(("text", "stops", "shown"), STOPS)
def test_stop_strings_cut_the_text_and_the_ids_that_spell_it(job: Job, text: str, stops: list[str], shown: str) -> None:
    job = replace(job, dataset=replace(job.dataset, stop=stops))
    canvas = [*ids(job, text), EOS, 50]
    row = make_row(job, outcome(canvas), PLACE)
    assert row["text"] == shown and row["stopped"] == (shown != text)
    spelled = job.description.codec.decode(canvas[: row["tokens"]])
    assert spelled.startswith(shown) and row["output_ids"] == canvas[:-1]
    assert not row["tokens"] or not job.description.codec.decode(canvas[: row["tokens"] - 1]).startswith(shown)
    assert visible(job, canvas).ids == canvas[: row["tokens"]]


def test_a_stop_string_of_several_tokens_is_not_counted_in_part(job: Job) -> None:
    job = replace(job, dataset=replace(job.dataset, stop=["\n\n"]))
    canvas = [*ids(job, "9 pens"), *ids(job, "\n"), *ids(job, "\n")]
    assert visible(job, canvas).ids == ids(job, "9 pens")


@pytest.mark.parametrize("failure", ["too_long", "failed"])
def test_what_was_not_decoded_has_no_figures(job: Job, failure: str) -> None:
    bad = Outcome(Task(0, [40] * 200, 32), failure=failure, error="why")
    row = make_row(job, bad, PLACE)
    assert all(row[name] is None for name in DECODE_FIGURES)
    assert (row["correct"], row["failure"], row["error"], row["output_ids"]) == (False, failure, "why", [])


def test_every_row_has_the_same_fields(job: Job) -> None:
    rows: list[dict[str, Any]] = [make_row(job, outcome([50, EOS]), PLACE)]
    rows.append(make_row(job, Outcome(Task(0, [40], 2), failure="failed", error="why"), PLACE))
    assert rows[0].keys() == rows[1].keys() >= {"id", "key", "device", "max_rows", "commit", *DECODE_FIGURES}


def test_order_figures_come_from_the_forwards_that_decided(job: Job) -> None:
    assert make_row(job, outcome([50, 51, 52, 53, EOS]), PLACE)["order_kendall_tau"] == pytest.approx(1.0)
    at_once = make_row(job, outcome([50, 51, 52, EOS], last=1), PLACE)
    assert at_once["order_kendall_tau"] is None and at_once["order_tie_rate"] == 1.0
