"""One decoded sample as one row of ``samples.jsonl``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.as_counted import FIELDS, Decoded, as_counted, respelled
from pipeline.engine import DRAFT_FIGURES, Outcome, Run
from pipeline.job import Job
from pipeline.metrics import count_visible, failure_class
from pipeline.statistics import order
from samplers import DecodeState, Role

DECODE_FIGURES = (
    *("tokens", "canvas", "ended", "stopped", "nfe", "nfe_prefill", "nfe_denoise", "nfe_refresh", "nfe_commit"),
    *("nfe_verify", "nfe_draft", "nfe_post_eos", "token_forwards", *DRAFT_FIGURES, "revised_tokens"),
    *("order_kendall_tau", "order_tie_rate", *FIELDS),
)


@dataclass(frozen=True)
class Place:
    """Where a row was decoded; part of the row, not of its key."""

    device: str
    dtype: str
    max_rows: int
    versions: str
    commit: str | None


@dataclass(frozen=True)
class Answer:
    """The visible part of a canvas: what stands before the first end token or stop string."""

    ids: list[int]
    text: str
    ended: bool
    stopped: bool


def make_row(job: Job, outcome: Outcome, place: Place) -> dict[str, Any]:
    """The row of a finished sample; one that was not decoded has null for every figure of decoding and is wrong."""
    index = outcome.task.index
    row = {**_identity(job, index), **dict.fromkeys(DECODE_FIGURES)}
    row |= {"output_ids": [], "raw_text": None, "text": None, "extracted": None, "correct": False}
    row |= {"failure": outcome.failure, "error": outcome.error, "seconds": round(outcome.seconds, 6)}
    if outcome.failure is None:
        assert outcome.state is not None
        row |= _decoded(job, outcome, outcome.state)
    return {**row, "key": job.key(index), "scorer": job.dataset.scorer, **vars(place)}


def visible(job: Job, ids: list[int]) -> Answer:
    """Cut a canvas at its first end token, then at the first stop string; tokens are counted in ids.

    Before a stop string they are the fewest ids that spell the visible text.
    """
    codec, stops = job.description.codec, job.dataset.stop
    count, ended = count_visible(ids, job.description.facts.end_ids)
    ids, text = ids[:count], codec.decode(ids[:count])
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return Answer(ids, text, ended, False)
    text = text[: min(found)]
    kept = next(count for count in range(len(ids) + 1) if codec.decode(ids[:count]).startswith(text))
    return Answer(ids[:kept], text, ended, True)


def _identity(job: Job, index: int) -> dict[str, Any]:
    sample, prompt = job.samples[index], job.prompts[index]
    prompt_hash = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:10]
    identity = {"id": sample.id, "index": index, "sample": 0, "gold": sample.gold}
    return {**identity, "prompt_hash": prompt_hash, "prompt_tokens": len(prompt)}


def _decoded(job: Job, outcome: Outcome, state: DecodeState) -> dict[str, Any]:
    canvas, ids = decided_canvas(state), decided(state)
    answer = visible(job, ids)
    verdict = job.dataset.score(job.samples[outcome.task.index], answer.text)
    again = respelled(job.description.codec, canvas, state.model.end_ids, job.dataset.stop)
    first = state.prompt_length
    tau, ties = order(state.committed_at[first : first + len(answer.ids)])
    return {
        "output_ids": ids,
        "raw_text": job.description.codec.decode(ids, raw=True),
        "text": answer.text,
        "extracted": verdict.extracted,
        "correct": verdict.correct,
        "failure": failure_class(verdict.failure, answer.ended, answer.stopped, answer.text),
        "tokens": len(answer.ids),
        "canvas": len(state.canvas),
        "ended": answer.ended,
        "stopped": answer.stopped,
        **outcome.counts(),
        "nfe_draft": _drafting(outcome),
        "nfe_post_eos": _after_end(state, outcome.log),
        **outcome.drafts(),
        "revised_tokens": state.revised,
        "order_kendall_tau": tau,
        "order_tie_rate": ties,
        **as_counted(Decoded(outcome.log, state, canvas, again)),
    }


def decided(state: DecodeState) -> list[int]:
    """The answer's ids: of the decided ones those up to the first end token, and that too; nothing stands behind it."""
    ids = decided_canvas(state)
    count, ended = count_visible(ids, state.model.end_ids)
    return ids[: count + ended]


def decided_canvas(state: DecodeState) -> list[int]:
    """Of the ids asked for, those up to the first undecided slot (early stop), so that no mask id is among them.

    What a sampler wrote behind the end token is there still: other projects count it.
    """
    first = state.prompt_length
    last = first + state.asked
    undecided = next((slot for slot in range(first, last) if state.mask[slot]), last)
    return state.tokens[first:undecided]


def _drafting(outcome: Outcome) -> int | None:
    """Forwards of a draft model: none of them if drafts were verified that cost none, None if there were no drafts."""
    count = outcome.counts()["nfe_draft"]
    return count if count or outcome.verified else None


def _after_end(state: DecodeState, log: Sequence[Run]) -> int:
    """Target forwards spent after everything up to the first end token was final; 0 without an end token."""
    for slot in state.canvas:
        if state.mask[slot]:
            return 0
        if state.tokens[slot] in state.model.end_ids:
            final = max(state.committed_at[state.prompt_length : slot + 1])
            return sum(run.role is Role.TARGET for run in log[final:])
    return 0
