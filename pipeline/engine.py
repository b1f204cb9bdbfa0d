"""The engine keeps sequences in flight, batches their forwards, and is the one place that counts and times them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from adapters.base import MaskedLMAdapter, Request, group_key
from adapters.readouts import refuse_unknown
from samplers import Attend, DecodeState, Decoding, Forward, Kind, ModelFacts, Prediction, Role, Sampler

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
    """

    task: Task
    state: DecodeState | None = None
    log: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    failure: str | None = None
    error: str | None = None
    trace: list[dict] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Forwards of the target by kind, of the draft model, and the slots run (``token_forwards``)."""
        target = [run for run in self.log if run.role is Role.TARGET]
        by_kind = Counter(run.kind for run in target)
        return {
            "nfe": len(target),
            **{f"nfe_{kind}": by_kind[kind] for kind in Kind},
            "nfe_draft": len(self.log) - len(target),
            "token_forwards": sum(run.window for run in target),
        }


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
    """

    adapter: MaskedLMAdapter
    sampler: Sampler
    max_rows: int = 8
    ticked: Callable[[], None] | None = None
    forward_seconds: float = 0.0

    def decode(self, tasks: Iterable[Task], slots: int) -> Iterator[Outcome]:
        """Yield outcomes as sequences finish; a freed row takes the next task at once.

        Args:
            tasks: read lazily, one whenever a row is free.
            slots: length of the longest row (prompt and canvas) to expect.
        """
        self.adapter.open(self.max_rows, slots)
        waiting = iter(tasks)
        live: dict[int, _Live] = {}
        while True:
            yield from self._refill(live, waiting)
            if not live:
                return
            yield from self._tick(live)

    def warm_up(self, tasks: Iterable[Task], slots: int) -> None:
        """Run one round of forwards and forget it: kernels get chosen and memory reserved outside the clock."""
        self.adapter.open(self.max_rows, slots)
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
        self.adapter.place(row, outcome.state.tokens, task.stream)
        decoding, began = self.sampler.decode(outcome.state), time.perf_counter()
        first = next(decoding, None)
        if first is None:
            return None  # nothing to decode
        if error := _impossible(first, outcome.state):
            outcome.failure, outcome.error = "failed", error
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
        if outcome.task.traced:
            outcome.trace.append(_record(forward, kind, state, held))
        if done:
            outcome.seconds = time.perf_counter() - row.began
        return done

    def _proceed(self, row: _Live, prediction: Prediction) -> bool:
        """Send a prediction into the generator; True if the sequence is decoded or has failed."""
        outcome = row.outcome
        if not prediction.finite:
            outcome.failure, outcome.error = "failed", f"forward {row.state.forwards} gave logits that are not finite"
            return True
        try:
            row.pending = row.decoding.send(prediction)
        except StopIteration:
            if error := _unfinished(row.state):
                outcome.failure, outcome.error = "failed", error
            return True
        if error := _impossible(row.pending, row.state):
            outcome.failure, outcome.error = "failed", error
        return outcome.failure is not None


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


def _impossible(forward: Forward, state: DecodeState) -> str | None:
    """Why a forward cannot be run: its slots and wanted rows must lie inside the row, its pattern must be served."""
    window, want, shift = forward.window, forward.want, state.model.shift
    low, high = (min(want) - shift, max(want) - shift) if want else (window.start, window.start)
    if shift and not state.prompt_length and (not window or low < 0):
        return "an empty prompt: this model needs at least one token to predict the next"
    for slots in (window, forward.context):
        if slots.step != 1 or slots.start < 0 or slots.stop > len(state.tokens):
            return f"the sampler asked for {slots} in a row of {len(state.tokens)} slots"
    if not window:
        return "the sampler asked for an empty window"
    if error := _unstorable(forward, len(state.tokens)):
        return error
    if forward.guidance and (forward.context or forward.store or state.model.mask_id is None):
        return "guidance needs a model with a mask token, and a window that reads and stores no keys"
    if any(slot not in window for slot in forward.inputs):
        return f"the sampler mixed the inputs of slots {sorted(forward.inputs)}, some of which lie outside {window}"
    try:
        refuse_unknown(forward.ask)
    except ValueError as error:
        return str(error)
    if not window.start <= low <= high < window.stop:
        return f"the sampler wants slots {min(want)}..{max(want)}, whose rows lie outside {window}"
    return _unserved(forward.attend, state.model)


def _unstorable(forward: Forward, slots: int) -> str | None:
    """What is stored must lie in the window, and a path that is kept must close up from where it begins."""
    window, store, keep = forward.window, forward.store, forward.keep
    if store and (store.step != 1 or store.start < window.start or store.stop > window.stop):
        return f"the sampler wants to store {store}, which lies outside {window}"
    if keep:
        first = window.start - len(keep)
        if len(set(keep)) < len(keep) or not 0 <= first <= min(keep) <= max(keep) < slots:
            return f"the sampler wants to keep slots {list(keep)}, which do not close up before {window}"
    return None


def _unfinished(state: DecodeState) -> str | None:
    """Why a sequence is not done although its sampler is: a slot is open that no end token makes superfluous."""
    for slot in state.canvas:
        if state.mask[slot]:
            return f"the sampler ended and left slot {slot} undecided"
        if state.tokens[slot] in state.model.end_ids:
            return None
    return None


def _unserved(attend: Attend | None, model: ModelFacts) -> str | None:
    if attend is None:
        told = model.attention != "blocks"
        return None if told else "the sampler did not say where the blocks of this block-causal model lie"
    if attend.pattern not in model.attentions:
        served = ", ".join(sorted(model.attentions))
        return f"the sampler asked for {attend.pattern} attention of a model that serves {served}"
    if attend.pattern == "blocks" and attend.size < 1:
        return f"the sampler asked for blocks of {attend.size} slots"
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
