"""The engine keeps sequences in flight, batches their forwards, and is the one place that counts and times them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from adapters.base import MaskedLMAdapter, Request, group_key
from pipeline.broken import not_a_forward, told
from pipeline.possible import unplaced, unprompted, unserved, unwanted
from pipeline.verified import Verified, by_position, clipped, verified
from samplers import DecodeState, Decoding, Forward, Kind, Prediction, Role, Sampler
from samplers.ngram import NGram

DRAFT_FIGURES = ("proposed_draft_tokens", "accepted_draft_tokens", "verified_tokens", "accepted_by_position")
WASTE = 0.25  # largest share of padding in a group


@dataclass(slots=True)
class Task:
    """One sequence to decode.

    Attributes:
        index: the caller's name for it.
        prompt: ids.
        length: tokens asked for; the sampler may take a longer canvas.
        stream: key of its random numbers, see `samplers.stream_key`.
        traced: keep every forward with what it changed.
    """

    index: int
    prompt: list[int]
    length: int
    stream: int = 0
    traced: bool = False


class Run(NamedTuple):
    """One forward of one row, as billed."""

    kind: Kind
    role: Role
    window: int  # slots run, those of copies too
    cached: int  # slots of context


@dataclass(slots=True)
class Outcome:
    """What became of a task.

    Attributes:
        state: the decoded sequence; None if it never started.
        log: every forward it took part in, in order.
        seconds: wall time from its first forward to its last.
        failure: ``too_long`` or ``failed``, else None; `error` says why in a sentence.
        trace: one record a forward, if the task was traced.
        verified: what the drafts of each forward that verified some came to, in order; nothing behind the answer.
    """

    task: Task
    state: DecodeState | None = None
    log: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None
    error: str | None = None
    trace: list[dict] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Forwards of the target by kind, of the draft model, and the target's slots run (``token_forwards``)."""
        target = [run for run in self.log if run.role is Role.TARGET]
        by_kind = Counter(run.kind for run in target)
        return {
            "nfe": len(target),
            **{f"nfe_{kind}": by_kind[kind] for kind in Kind},
            "nfe_draft": len(self.log) - len(target),  # whatever their kind
            "token_forwards": sum(run.window for run in target),
        }

    def drafts(self) -> dict[str, Any]:
        """Drafts proposed and accepted, tokens emitted by the forwards that verified them; None where none did."""
        if not self.verified:
            return dict.fromkeys(DRAFT_FIGURES)
        counts = [entry.counts() for entry in self.verified]
        sums = (sum(count[name] for count in counts) for name in ("proposed", "accepted", "emitted"))
        return dict(zip(DRAFT_FIGURES, (*sums, by_position(self.verified)), strict=True))


@dataclass(slots=True)
class _Live:
    """A row in flight."""

    outcome: Outcome
    decoding: Decoding
    pending: Forward
    began: float

    @property
    def state(self) -> DecodeState:
        assert self.outcome.state is not None
        return self.outcome.state


@dataclass
class Engine:
    """Decodes tasks with one sampler on one model.

    A sequence's tokens and counts never depend on its neighbours, their order or `max_rows`.

    Attributes:
        max_rows: sequences in flight.
        ticked: called after every round of forwards, for progress and heartbeats.
        forward_seconds: time spent in the model so far.
        ngrams: from a row's prompt to the n-gram table that the sampler finds in its state.
    """

    adapter: MaskedLMAdapter
    sampler: Sampler
    max_rows: int = 8
    ticked: Callable[[], None] | None = None
    forward_seconds: float = 0.0
    ngrams: Callable[[Sequence[int]], NGram] | None = None

    @property
    def spare_slots(self) -> int:
        """Behind every row, see `Sampler.spare_slots`."""
        return self.sampler.spare_slots(self.adapter.facts)

    def decode(self, tasks: Iterable[Task], slots: int) -> Iterator[Outcome]:
        """Yield outcomes as sequences finish; a freed row takes the next task at once.

        Args:
            tasks: read lazily, one whenever a row is free.
            slots: length of the longest row (prompt and canvas) to expect.
        """
        self.adapter.open(self.max_rows, slots + self.spare_slots)
        waiting = iter(tasks)
        live: dict[int, _Live] = {}
        while True:
            yield from self._refill(live, waiting)
            if not live:
                return
            yield from self._tick(live)

    def warm_up(self, tasks: Iterable[Task], slots: int) -> None:
        """Run one round of forwards and forget it: kernels get chosen and memory reserved outside the clock."""
        self.adapter.open(self.max_rows, slots + self.spare_slots)
        first = list(islice(tasks, self.max_rows))
        live: dict[int, _Live] = {}
        for _ in self._refill(live, iter(first)):
            pass
        if live:
            for _ in self._tick(live):
                pass
        self.forward_seconds = 0.0

    def _refill(self, live: dict[int, _Live], waiting: Iterator[Task]) -> Iterator[Outcome]:
        for row in range(self.max_rows):
            while row not in live and (task := next(waiting, None)) is not None:
                outcome = Outcome(task)
                if started := self._start(outcome, row):
                    live[row] = started
                else:
                    yield outcome

    def _start(self, outcome: Outcome, row: int) -> _Live | None:
        task, facts = outcome.task, self.adapter.facts
        length = self.sampler.canvas_length(len(task.prompt), task.length, facts)
        total = len(task.prompt) + length
        if facts.max_positions is not None and total > facts.max_positions:
            outcome.failure = "too_long"
            outcome.error = (
                f"prompt of {len(task.prompt)} and canvas of {length} tokens exceed "
                f"the model's {facts.max_positions} positions"
            )
            return None
        outcome.state = DecodeState.masked(task.prompt, task.length, facts, task.stream, length)
        outcome.state.ngram = self.ngrams(task.prompt) if self.ngrams else None
        self.adapter.place(row, outcome.state.tokens, task.stream)
        began = time.perf_counter()
        try:
            decoding = self.sampler.decode(outcome.state)
            first = next(decoding)
        except StopIteration:
            _fail(outcome, _unfinished(outcome.state))  # None: there was nothing to decode
            return None
        except Exception as error:  # a user's own sampler may raise anything: its sample fails, the others go on
            _fail(outcome, told(error, self.sampler))
            return None
        if impossible := self._impossible(first, outcome.state):
            _fail(outcome, impossible)
            return None
        return _Live(outcome, decoding, first, began)

    def _tick(self, live: dict[int, _Live]) -> Iterator[Outcome]:
        """One forward of every row in flight, in as few calls as their kinds allow."""
        finished = []
        for rows in _groups(live):
            for row, prediction in zip(rows, self._run(live, rows), strict=True):
                if self._advance(live[row], prediction):
                    finished.append(row)
        if self.ticked:
            self.ticked()
        for row in sorted(finished):
            yield live.pop(row).outcome

    def _run(self, live: dict[int, _Live], rows: list[int]) -> list[Prediction]:
        requests = [_request(row, live[row]) for row in rows]
        began = time.perf_counter()
        predictions = self.adapter.forward(requests)
        self.adapter.synchronize()
        self.forward_seconds += time.perf_counter() - began
        return predictions

    def _advance(self, row: _Live, prediction: Prediction) -> bool:
        """Bill the forward, hand the prediction over, fetch the next wish; True once the sequence is done."""
        outcome, state, forward = row.outcome, row.state, row.pending
        kind = Kind.PREFILL if forward.window.stop <= state.prompt_length else forward.kind
        outcome.log.append(Run(kind, forward.role, len(forward.window) * forward.copies, len(forward.context)))
        state.forwards += 1
        state.steps += bool(forward.want)
        held = list(zip(state.tokens, state.mask)) if outcome.task.traced else []
        done = self._proceed(row, prediction)
        if kind is Kind.VERIFY and forward.role is Role.TARGET:
            outcome.verified.append(verified(forward, state))
        if outcome.task.traced:
            outcome.trace.append(_record(forward, kind, state, held))
        if done:
            outcome.seconds = time.perf_counter() - row.began
            _settle_drafts(outcome, state)
        return done

    def _proceed(self, row: _Live, prediction: Prediction) -> bool:
        """Send a prediction into the generator; True if the sequence is decoded or has failed."""
        outcome = row.outcome
        if not prediction.finite:
            _fail(outcome, f"forward {row.state.forwards} gave logits that are not finite")
            return True
        try:
            row.pending = row.decoding.send(prediction)
        except StopIteration:
            _fail(outcome, _unfinished(row.state))
            return True
        except Exception as error:  # as in `_start`
            _fail(outcome, told(error, self.sampler))
            return True
        _fail(outcome, self._impossible(row.pending, row.state))
        return outcome.failure is not None

    def _impossible(self, forward: Forward, state: DecodeState) -> str | None:
        """Why a forward cannot be run, in words."""
        if error := not_a_forward(forward):
            return error
        model = state.model if forward.role is Role.TARGET else state.model.draft
        if model is None:
            return "the sampler asked for drafts of a model that comes without a drafter"
        slots = len(state.tokens) + self.spare_slots
        return (
            unprompted(forward, state, model)
            or unplaced(forward, slots)
            or unwanted(forward, state, model)
            or unserved(forward.attend, model)
        )


def _fail(outcome: Outcome, error: str | None) -> None:
    """Note why a sample failed, if it did."""
    if error:
        outcome.failure, outcome.error = "failed", error


def _settle_drafts(outcome: Outcome, state: DecodeState) -> None:
    """Leave out what lies behind the answer, and tell the trace."""
    outcome.verified = clipped(outcome.verified, state)
    for entry in outcome.verified if outcome.trace else ():
        outcome.trace[entry.forward - 1] |= entry.counts()


def _groups(live: dict[int, _Live]) -> list[list[int]]:
    """Rows whose forwards may share a call: of one kind, and of window lengths within the allowed waste."""
    kinds: dict[tuple, list[int]] = {}
    for row, sequence in live.items():
        kinds.setdefault(group_key(sequence.pending), []).append(row)
    groups = []
    for rows in kinds.values():
        lengths = {row: len(live[row].pending.window) for row in rows}
        if min(lengths.values()) == max(lengths.values()):
            groups.append(sorted(rows))
            continue
        group: list[int] = []
        for row in sorted(rows, key=lambda row: -lengths[row]):  # longest first: it sets the width
            if group and lengths[row] < (1 - WASTE) * lengths[group[0]]:
                groups.append(sorted(group))
                group = []
            group.append(row)
        groups.append(sorted(group))
    return groups


def _request(row: int, sequence: _Live) -> Request:
    state = sequence.state
    changed, state.changes = state.changes, []
    return Request(row, sequence.pending, changed, [state.tokens[slot] for slot in changed])


def _unfinished(state: DecodeState) -> str | None:
    """Why a sequence is not done although its sampler is: a slot is open that no end token makes superfluous."""
    for slot in state.canvas:
        if state.mask[slot]:
            return f"the sampler ended and left slot {slot} undecided"
        if state.tokens[slot] in state.model.end_ids:
            return None
    return None


def _record(forward: Forward, kind: Kind, state: DecodeState, held: list[tuple[int, bool]]) -> dict:
    """A forward and what it changed, as plain JSON.

    A slot that changed and is in none of the three lists kept its token (or stayed undecided): only its confidence is
    new.

    Args:
        held: token of each slot before the forward, and whether it was undecided.
    """
    changed = list(dict.fromkeys(state.changes))
    decided = [slot for slot in changed if not held[slot][1]]
    return {
        "forward": state.forwards,
        "kind": kind.value,
        "role": forward.role.value,
        "window": [forward.window.start, forward.window.stop],
        "cached": [forward.context.start, forward.context.stop],
        "changed": [[slot, state.tokens[slot], round(state.confidences[slot], 6)] for slot in changed],
        "committed": [slot for slot in changed if held[slot][1] and not state.mask[slot]],
        "revised": [slot for slot in decided if held[slot][0] != state.tokens[slot] and not state.mask[slot]],
        "remasked": [slot for slot in decided if state.mask[slot]],
    }
