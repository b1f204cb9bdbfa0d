"""The figures of a run, from its rows: every definition stands here once (design: "Counting, exactly").

Means are per sample, fractions 0..1, a figure that does not exist is None. Rows that could not be decoded
(``too_long``, ``failed``) are wrong answers and take no part in the figures of decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pipeline.as_counted import tokens_per_forward
from pipeline.statistics import ratio_interval, wilson

Row = dict[str, Any]
Figure = float | int | str | bool | list[int] | None

TOKENS_RULE = "ids before the first end token or stop string"
UNDECODED = ("too_long", "failed")
KINDS = ("prefill", "denoise", "refresh", "commit", "verify")
HARDWARE = ("device", "dtype", "max_rows", "versions")
P99_SAMPLES = 500  # fewer say nothing about the slowest of a hundred
CHUNK, COPIES, STRETCH = 400, 4, 40  # a repetition: at least 4 copies of up to 400 characters over at least 40


@dataclass(frozen=True)
class Timing:
    """Seconds of this process, so that a continued run never divides old tokens by new seconds.

    ``latencies`` and ``latency_tokens`` come from the separate timed pass (one row in flight, no trace), else None.
    """

    decode_seconds: float | None = None  # wall time of decoding, device-synchronised, after warm-up
    forward_seconds: float | None = None  # of these, inside the model
    end_to_end_seconds: float | None = None  # with tokenising, scoring and writing
    decoded_tokens: int = 0  # visible tokens of the rows decoded in those seconds
    devices: int = 1
    memory_peak_gib: float | None = None
    latencies: list[float] | None = None  # seconds of each sample of the timed pass
    latency_tokens: int | None = None  # visible tokens of the timed pass


def count_visible(ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, bool]:
    """Visible tokens of a canvas and whether it ended: the ids before the first end token, whichever of them it is."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return position, True
    return len(ids), False


def repeats(text: str) -> bool:
    """Whether the text ends in a loop: four or more copies of one chunk, 40 characters or more in all.

    The last copy need not be whole, and blanks behind the loop don't hide it.
    """
    return _loops(text) or _loops(text.rstrip())


def _loops(text: str) -> bool:
    """A tail of period p equals itself moved by p."""
    for period in range(1, min(CHUNK, len(text) // COPIES) + 1):
        length = max(COPIES * period, STRETCH)
        tail = text[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def failure_class(failure: str | None, ended: bool, stopped: bool, text: str) -> str | None:
    """A scorer's failure made more precise: a wrong answer that loops, or that ran to the end of its canvas."""
    if failure is None:
        return None
    if repeats(text):
        return "repetition"
    return failure if ended or stopped else "truncated"


def summarise(rows: Sequence[Row], expected: int, timing: Timing) -> dict[str, Figure]:
    """All figures of a run over its rows (one a sample; a later row of the same sample must have replaced the earlier).

    ``expected`` is the number of rows of a finished run. The names are those of the design, in its order.
    """
    decoded = [row for row in rows if row["failure"] not in UNDECODED]
    mixed = len({tuple(row.get(name) for name in HARDWARE) for row in rows}) > 1
    return {
        **_quality(rows if decoded else []),  # what was not decoded at all was not evaluated
        "samples": len(rows),
        "samples_expected": expected,
        "complete": len(rows) == expected,
        **_forwards(decoded),
        **_tokens(decoded),
        **_drafts(decoded),
        **_speed(timing, mixed),
        **_latency(timing),
        **_rates(rows, decoded),
        "order_kendall_tau": _mean(decoded, "order_kendall_tau"),
        "order_tie_rate": _mean(decoded, "order_tie_rate"),
        "outputs_sha256": outputs_sha256(rows),
        "mixed_hardware": mixed,
        "tokens_rule": TOKENS_RULE,
        **tokens_per_forward(decoded),
    }


def outputs_sha256(rows: Sequence[Row]) -> str:
    """Hash of every sample's output ids, sorted by sample id, so that neither arrival nor shuffling shows in it."""
    digest = hashlib.sha256()
    for row in sorted(rows, key=lambda row: (row["id"], row.get("sample", 0))):
        digest.update(json.dumps([row["id"], row.get("sample", 0), row.get("output_ids")]).encode() + b"\n")
    return digest.hexdigest()


def _quality(rows: Sequence[Row]) -> dict[str, Figure]:
    verdicts = [row["correct"] for row in rows if row["correct"] is not None]
    low, high = wilson(sum(verdicts), len(verdicts)) or (None, None)
    return {"accuracy": _ratio(sum(verdicts), len(verdicts)), "accuracy_low": low, "accuracy_high": high}


def _forwards(decoded: Sequence[Row]) -> dict[str, Figure]:
    names = ["nfe", *(f"nfe_{kind}" for kind in KINDS), "nfe_post_eos", "nfe_draft"]
    return {f"{name}_mean": _mean(decoded, name) for name in names}


def _tokens(decoded: Sequence[Row]) -> dict[str, Figure]:
    """Tokens per forward, four ways; sums of integers, divided once."""
    counted = [row for row in decoded if row["nfe"]]
    tokens, nfe = [row["tokens"] for row in counted], [row["nfe"] for row in counted]
    ends = sum(bool(row["ended"]) and not row["stopped"] for row in counted)  # the end token right behind the answer
    low, high = ratio_interval(tokens, nfe) or (None, None)
    return {
        "tokens_mean": _mean(decoded, "tokens"),
        "tokens_per_forward": _ratio(sum(tokens), sum(nfe)),
        "tokens_per_forward_low": low,
        "tokens_per_forward_high": high,
        "tokens_per_forward_macro": _ratio(sum(t / n for t, n in zip(tokens, nfe, strict=True)), len(counted)),
        "tokens_per_forward_decode": _ratio(sum(tokens) + ends, sum(nfe) - _sum(counted, "nfe_prefill")),
        "tokens_per_forward_allocated": _ratio(_sum(counted, "canvas"), sum(nfe)),
        "token_forwards_mean": _mean(decoded, "token_forwards"),
    }


def _drafts(decoded: Sequence[Row]) -> dict[str, Figure]:
    """Over the samples that had drafts verified; a sample that ended before its first draft has none to accept."""
    drafting = [row for row in decoded if row.get("accepted_draft_tokens") is not None]
    return {
        "accepted_draft_tokens_mean": _mean(drafting, "accepted_draft_tokens"),
        "acceptance_length": _ratio_of(drafting, "verified_tokens", "nfe_verify"),
        "draft_acceptance_rate": _ratio_of(drafting, "accepted_draft_tokens", "proposed_draft_tokens"),
        "accepted_by_position": _summed([row["accepted_by_position"] for row in drafting]) if drafting else None,
        "revised_tokens_mean": _mean(decoded, "revised_tokens"),
    }


def _speed(timing: Timing, mixed: bool) -> dict[str, Figure]:
    """Throughput of this process; none at all for a run whose rows come from unlike hardware."""
    speed = None if mixed else _ratio(timing.decoded_tokens, timing.decode_seconds)
    return {
        "tokens_per_second": speed,
        "tokens_per_second_per_device": _ratio(speed, timing.devices),
        "tokens_per_second_e2e": None if mixed else _ratio(timing.decoded_tokens, timing.end_to_end_seconds),
        "overhead": _ratio(timing.decode_seconds, timing.forward_seconds),
        "memory_peak_gib": timing.memory_peak_gib,
    }


def _latency(timing: Timing) -> dict[str, Figure]:
    import numpy as np

    seconds = timing.latencies or []
    p50, p90, p99 = np.quantile(seconds, [0.5, 0.9, 0.99]).tolist() if seconds else (None, None, None)
    return {
        "tokens_per_second_batch1": _ratio(timing.latency_tokens, sum(seconds)),
        "latency_p50_seconds": p50,
        "latency_p90_seconds": p90,
        "latency_p99_seconds": p99 if len(seconds) >= P99_SAMPLES else None,
    }


def _rates(rows: Sequence[Row], decoded: Sequence[Row]) -> dict[str, Figure]:
    """Shares of all samples. ``truncated``: neither an end token nor a stop string; ``no_eos``: no end token."""
    total = len(rows)
    return {
        "no_answer_rate": _ratio(sum(row["extracted"] is None for row in decoded), total),
        "truncated_rate": _ratio(sum(not row["ended"] and not row["stopped"] for row in decoded), total),
        "no_eos_rate": _ratio(sum(not row["ended"] for row in decoded), total),
        "repetition_rate": _ratio(sum(repeats(row["text"] or "") for row in decoded), total),
        "exec_timeout_rate": None,
        "too_long_rate": _ratio(sum(row["failure"] == "too_long" for row in rows), total),
        "failed_rate": _ratio(sum(row["failure"] == "failed" for row in rows), total),
    }


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Place by place; a shorter one has none there."""
    return [sum(places) for places in zip_longest(*histograms, fillvalue=0)]


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return _ratio(sum(values), len(values))


def _ratio_of(rows: Sequence[Row], top: str, bottom: str) -> float | None:
    known = [row for row in rows if row.get(top) is not None and row.get(bottom) is not None]
    return _ratio(_sum(known, top), _sum(known, bottom))


def _ratio(top: float | None, bottom: float | None) -> float | None:
    """None where a part is missing or nothing was there to divide by."""
    return None if top is None or not bottom else top / bottom
