"""The figures of a run on hand-worked rows."""

from __future__ import annotations

import pytest

from pipeline.metrics import Timing, count_visible, failure_class, repeats, summarise
from pipeline.statistics import mcnemar_p, order, paired_interval, ratio_interval, wilson

END, TURN = 1, 2


def row(id: str, **changes) -> dict:
    """A right answer of 11 tokens in a canvas of 32, at 16 forwards."""
    kinds = {"prefill": 1, "denoise": 15, "refresh": 0, "commit": 0, "verify": 0, "draft": None, "post_eos": 4}
    answer = {"extracted": "7", "gold": "7", "correct": True, "failure": None, "text": "so 7", "ended": True}
    counts = {"tokens": 11, "canvas": 32, "nfe": 16, "token_forwards": 512, "revised_tokens": 0, "stopped": False}
    drafts = {"accepted_draft_tokens": None, "order_kendall_tau": 0.5, "order_tie_rate": 0.0}
    base = {"id": id, "index": int(id), "sample": 0, "output_ids": [5] * 11 + [END] * 21, "device": "cpu"}
    return {**base, **answer, **counts, **drafts, **{f"nfe_{kind}": n for kind, n in kinds.items()}, **changes}


def undecoded(id: str, failure: str) -> dict:
    empty = dict.fromkeys([name for name in row(id) if name not in ("id", "index", "sample", "device")])
    return {**row(id), **empty, "correct": False, "failure": failure}


@pytest.mark.parametrize("ends", [[END] * 21, [TURN] + [END] * 20])
def test_speed_counts_answer_tokens_and_neither_end_tokens_nor_the_prompt(ends: list[int]) -> None:
    tokens, ended = count_visible([5] * 11 + ends, {END, TURN})  # DEC-07
    assert (tokens, ended) == (11, True)
    timing = Timing(decode_seconds=4.0, decoded_tokens=tokens)
    summary = summarise([row("0", tokens=tokens, prompt_tokens=200)], 1, timing)
    assert summary["tokens_per_forward"] == 0.6875
    assert summary["tokens_per_second"] == 2.75
    assert summary["tokens_rule"] == "ids before the first end token or stop string"


def test_an_empty_answer_is_zero_tokens_and_no_error() -> None:
    tokens, _ = count_visible([END] * 32, {END})
    summary = summarise([row("0", tokens=tokens)], 1, Timing(decode_seconds=4.0, decoded_tokens=0))
    assert (summary["tokens_per_forward"], summary["tokens_per_second"]) == (0.0, 0.0)
    assert count_visible([], {END}) == (0, False)


def test_tokens_per_forward_is_a_ratio_of_sums_with_its_variants_beside_it() -> None:
    summary = summarise([row("0"), row("1", tokens=32, nfe=4, ended=False, nfe_prefill=0)], 2, Timing())
    assert summary["tokens_per_forward"] == 43 / 20
    assert summary["tokens_per_forward_macro"] == (11 / 16 + 32 / 4) / 2
    assert summary["tokens_per_forward_decode"] == (43 + 1) / (20 - 1)
    assert summary["tokens_per_forward_allocated"] == 64 / 20
    assert summary["tokens_per_forward_low"] <= 43 / 20 <= summary["tokens_per_forward_high"]
    assert (summary["nfe_mean"], summary["nfe_post_eos_mean"], summary["token_forwards_mean"]) == (10, 4, 512)


def test_other_projects_figures_stand_beside_ours_and_are_none_if_a_decoded_row_lacks_them() -> None:
    told = {"nfe_as_dmax": 15, "tokens_as_dmax": 30, "nfe_as_d3llm": 20, "tokens_as_d3llm": None}
    summary = summarise([row("0", **told), undecoded("1", "failed")], 2, Timing())
    assert (summary["tokens_per_forward_as_dmax"], summary["tokens_per_forward_as_d3llm"]) == (2.0, None)
    assert summary["tokens_per_forward"] == 11 / 16, "ours knows nothing of them"
    assert summarise([row("0", **told), row("1")], 2, Timing())["tokens_per_forward_as_dmax"] is None


def test_averages_are_weighted_by_samples() -> None:
    rows = [row(str(i), correct=i < 4) for i in range(5)]  # LIT-03: 0.8, where a mean of batches gives 0.5
    assert summarise(rows, 5, Timing())["accuracy"] == 0.8


def test_failed_samples_are_wrong_and_stay_out_of_the_decode_figures() -> None:
    rows = [
        row("0"),
        undecoded("1", "too_long"),
        undecoded("2", "failed"),
        row("3", failure="no_answer", correct=False),
    ]
    summary = summarise(rows, 5, Timing())
    assert (summary["accuracy"], summary["nfe_mean"], summary["tokens_per_forward"]) == (0.25, 16, 0.6875)
    assert (summary["too_long_rate"], summary["failed_rate"], summary["no_eos_rate"]) == (0.25, 0.25, 0.0)
    assert (summary["samples"], summary["samples_expected"], summary["complete"]) == (4, 5, False)


def test_a_figure_that_does_not_exist_is_none_and_never_zero() -> None:
    summary = summarise([undecoded("0", "failed")], 1, Timing())
    absent = {name for name, value in summary.items() if value is None}
    assert {
        "nfe_mean",
        "tokens_mean",
        "tokens_per_forward",
        "tokens_per_second",
        "overhead",
        "acceptance_length",
    } <= absent
    assert {"latency_p50_seconds", "tokens_per_second_batch1", "memory_peak_gib", "exec_timeout_rate"} <= absent
    assert summary["accuracy"] is None, "an evaluation that did not happen has no accuracy"
    empty = summarise([], 3, Timing())
    assert (empty["accuracy"], empty["accuracy_low"], empty["samples"], empty["complete"]) == (None, None, 0, False)


def test_answers_without_a_reference_are_not_scored() -> None:
    summary = summarise([row("0", correct=None, gold=None), row("1")], 2, Timing())
    assert summary["accuracy"] == 1.0
    assert summarise([row("0", correct=None, gold=None)], 1, Timing())["accuracy"] is None


def test_rates_are_shares_of_all_samples() -> None:
    rows = [
        row("0", ended=False),
        row("1", ended=False, stopped=True),
        row("2", extracted=None),
        row("3", text="ab " * 20),
    ]
    summary = summarise(rows, 4, Timing())
    names = ("truncated_rate", "no_eos_rate", "no_answer_rate", "repetition_rate")
    assert [summary[name] for name in names] == [0.25, 0.5, 0.25, 0.25]


def test_draft_figures_are_sums_over_drafting_samples() -> None:
    counts = {"nfe_verify": 4, "nfe_draft": 4, "accepted_draft_tokens": 6, "proposed_draft_tokens": 12}
    drafts = {**counts, "verified_tokens": 10, "accepted_by_position": [3, 2, 1]}
    fewer = {"nfe_verify": 1, "nfe_draft": 1, "accepted_draft_tokens": 0, "proposed_draft_tokens": 4}
    others = [row("1", **fewer, verified_tokens=1, accepted_by_position=[]), row("2")]  # the last had none verified
    summary = summarise([row("0", **drafts), *others], 3, Timing())
    assert (summary["accepted_draft_tokens_mean"], summary["acceptance_length"]) == (3, 11 / 5)
    assert (summary["draft_acceptance_rate"], summary["nfe_draft_mean"]) == (6 / 16, 5 / 2)
    assert summary["accepted_by_position"] == [3, 2, 1]
    assert sum(summary["accepted_by_position"]) == summary["accepted_draft_tokens_mean"] * 2
    deeper = row("1", **{**drafts, "accepted_by_position": [4, 1, 0, 1]})
    assert summarise([row("0", **drafts), deeper], 2, Timing())["accepted_by_position"] == [7, 3, 1, 1]


def test_without_drafts_there_are_no_figures_of_drafts() -> None:
    summary = summarise([row("0"), row("1")], 2, Timing())
    names = ("accepted_draft_tokens_mean", "acceptance_length", "draft_acceptance_rate", "accepted_by_position")
    assert [summary[name] for name in (*names, "nfe_draft_mean")] == [None] * 5


def test_speed_divides_this_process_tokens_by_this_process_seconds() -> None:
    timing = Timing(decode_seconds=2.0, forward_seconds=1.6, end_to_end_seconds=4.0, decoded_tokens=11, devices=2)
    summary = summarise([row("0"), row("1")], 2, timing)  # row 0 was decoded by an earlier process
    names = ("tokens_per_second", "tokens_per_second_per_device", "tokens_per_second_e2e", "overhead")
    assert [summary[name] for name in names] == [5.5, 2.75, 2.75, 1.25]


def test_rows_from_unlike_hardware_give_no_tokens_per_second() -> None:
    summary = summarise([row("0"), row("1", device="cuda")], 2, Timing(decode_seconds=2.0, decoded_tokens=22))
    assert summary["mixed_hardware"] is True
    assert summary["tokens_per_second"] is None and summary["tokens_per_second_per_device"] is None


def test_latency_needs_the_timed_pass_and_its_99th_percentile_500_samples() -> None:
    few = summarise([row("0")], 1, Timing(latencies=[1.0, 2.0, 3.0], latency_tokens=33))
    assert (few["latency_p50_seconds"], few["tokens_per_second_batch1"], few["latency_p99_seconds"]) == (2.0, 5.5, None)
    many = summarise([row("0")], 1, Timing(latencies=[1.0] * 500, latency_tokens=500))
    assert many["latency_p99_seconds"] == 1.0


def test_the_outputs_hash_sees_tokens_and_not_the_order_of_arrival() -> None:
    def digest(*rows: dict) -> object:
        return summarise(rows, len(rows), Timing())["outputs_sha256"]

    assert digest(row("0"), row("1")) == digest(row("1", index=0), row("0", index=1))
    assert digest(row("0"), row("1")) != digest(row("0"), row("1", output_ids=[5]))


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        ("", False),
        ("so it is 7.\n#### 7", False),
        ("#### 1000000", False),
        ("the the the the", False),  # 15 characters are no stretch
        ("x = 7 " * 3, False),
        ("He has 7 left. " * 4, True),
        ("First: " + "so 7 and so " * 5 + "so 7 a", True),  # the last copy is cut by the end of the canvas
        ("0" * 40, True),
        ("so" + "\n" * 60, True),
        ("so 7 " * 10 + "\n\n", True),
        ("ab " * 20 + "\n#### 7", False),  # it left the loop
    ],
)
def test_a_repetition_is_a_loop_at_the_end(text: str, looping: bool) -> None:
    assert repeats(text) is looping


def test_only_wrong_answers_get_a_more_precise_failure() -> None:
    assert failure_class(None, ended=False, stopped=False, text="a " * 40) is None
    assert failure_class("wrong", ended=True, stopped=False, text="a " * 40) == "repetition"
    assert failure_class("no_answer", ended=False, stopped=False, text="so") == "truncated"
    assert failure_class("wrong", ended=False, stopped=True, text="so") == "wrong"


def test_wilson_gives_the_known_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 0) is None


def test_bootstrap_intervals_repeat_and_shrink_with_samples() -> None:
    tokens, nfe = [10, 20, 30, 40] * 25, [10, 10, 10, 10] * 25
    low, high = ratio_interval(tokens, nfe)
    assert ratio_interval(tokens, nfe) == (low, high)
    assert low == pytest.approx(2.5 - 1.96 * 0.1118, abs=0.02) and high == pytest.approx(2.5 + 1.96 * 0.1118, abs=0.02)
    assert ratio_interval([3], [4]) is None
    assert paired_interval([0, 0, 0]) == (0.0, 0.0)


def test_mcnemar_is_the_exact_test_of_the_discordant_pairs() -> None:
    assert mcnemar_p(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar_p(0, 0) == 1.0


@pytest.mark.parametrize(
    ("steps", "tau", "ties"),
    [([0, 1, 2, 3], 1.0, 0.0), ([3, 2, 1, 0], -1.0, 0.0), ([0, 0, 0], None, 1.0), ([4], None, None), ([], None, None)],
)
def test_order_tells_left_to_right(steps: list[int], tau: float | None, ties: float | None) -> None:
    assert order(steps) == (tau if tau is None else pytest.approx(tau), ties)


def test_ties_are_counted_in_pairs() -> None:
    tau, ties = order([0, 0, 1, 1])
    assert tau == pytest.approx(4 / (6 * 4) ** 0.5) and ties == 2 / 6
