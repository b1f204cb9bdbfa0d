"""From the columns of a read-out to one prediction a request, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from adapters.grouping import Request
from adapters.readouts import BUILT_IN, named
from samplers import Forward, Prediction


@dataclass(frozen=True, slots=True)
class Columns:
    """How many of each kind a read-out has, behind token, confidence, finite and the statistics asked for."""

    rivals: int
    best: int  # ids, and as many log-probabilities


def rivals_asked(forwards: Sequence[Forward]) -> list[list[int]]:
    """Ids asked besides the token, (N, k): as many a slot as the one with most has, filled up with id 0."""
    asked = [list(forward.rivals.get(slot, ())) for forward in forwards for slot in forward.want]
    most = max(map(len, asked), default=0)
    return [ids + [0] * (most - len(ids)) for ids in asked]


def split(columns: list[list[float]], forwards: Sequence[Forward], kinds: Columns) -> list[Prediction]:
    """Columns of all wanted slots to one prediction a member."""
    predictions, start = [], 0
    for forward in forwards:
        part = [column[start : start + len(forward.want)] for column in columns]
        start += len(forward.want)
        predictions.append(_prediction(part, forward, kinds))
    return predictions


def by_request(said: Sequence[Prediction], requests: Sequence[Request]) -> list[Prediction]:
    """Predictions of the members of requests to one a request, which holds those of its copies."""
    members = iter(said)
    return [_joined(list(islice(members, max(1, len(request.forward.variants))))) for request in requests]


def silent(forward: Forward) -> Prediction:
    """What is said where no slot is wanted."""
    return Prediction(forward.want, {}, {})


def _joined(copies: list[Prediction]) -> Prediction:
    if len(copies) == 1:
        return copies[0]
    return replace(copies[0], copies=copies, finite=all(copy.finite for copy in copies))


def _prediction(columns: list[list[float]], forward: Forward, kinds: Columns) -> Prediction:
    """One member's columns; the read-outs of a sampler's own are what is left at the end."""
    slots, rest = forward.want, iter(columns)
    prediction = Prediction(slots, dict(zip(slots, map(int, next(rest)))), dict(zip(slots, next(rest))))
    prediction.finite = all(next(rest))
    if "margin" in forward.ask & BUILT_IN:
        prediction.margin = dict(zip(slots, next(rest)))
    if "entropy" in forward.ask & BUILT_IN:
        prediction.entropy = dict(zip(slots, next(rest)))
    rivals = list(islice(rest, kinds.rivals))
    for slot, *values in zip(slots, *rivals) if forward.rivals else ():
        prediction.rivals[slot] = dict(zip(forward.rivals.get(slot, ()), values))
    best = list(islice(rest, 2 * kinds.best))
    for slot, *values in zip(slots, *best) if best else ():
        prediction.best[slot] = list(zip(map(int, values[: kinds.best]), values[kinds.best :]))
    if forward.judged_drafts:
        prediction.accepted = {slot: verdict > 0 for slot, verdict in zip(slots, next(rest)) if verdict >= 0}
    if named(forward.ask):
        prediction.read = {slot: tuple(values) for slot, *values in zip(slots, *rest)}
    return prediction
