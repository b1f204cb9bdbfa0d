"""Answers of ours beside those of the authors' code: the first differing token, whether it was a tie, the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapters.base import DeviceAdapter
from pipeline.agreement import Finding, token_in_words
from pipeline.engine import Engine, Outcome, Task
from pipeline.errors import UserError
from pipeline.ngrams import corpus_of, tables_of
from pipeline.reference import Reference
from samplers import Attend

if TYPE_CHECKING:
    from pipeline.settings import Settings


def compare_answers(adapter: DeviceAdapter, reference: Reference, settings: Settings, slack: float) -> list[Finding]:
    """Decode every prompt as the reference was; the first differing token of each answer, or its other end.

    Args:
        slack: see `ForwardResult.slack`.
    """
    numbers = sorted(reference.answers)
    tasks = [Task(n, reference.prompts[n], settings.gen_length, traced=True) for n in numbers]
    longest = settings.slots(reference.prompts, adapter.facts)
    found = []
    tables = tables_of(settings, corpus_of(settings, adapter))
    for outcome in Engine(adapter, settings.sampler, max_rows=1, ngrams=tables).decode(tasks, longest):
        if outcome.failure or outcome.state is None:
            raise UserError(f"prompt {outcome.task.index} of the reference: {outcome.error}")
        found.append((outcome, _Theirs(reference.answers[outcome.task.index], reference.end_ids)))
    # only now: asking for logits reopens the adapter
    replayed = [_Answer(adapter, outcome, theirs, slack).finding() for outcome, theirs in found]
    return [finding for finding in replayed if finding]


@dataclass(frozen=True)
class _Theirs:
    """An answer of the reference, and what ends it."""

    ids: list[int]
    end_ids: frozenset[int]


class _Answer:
    """An answer of ours beside theirs; both count up to and with their first end id."""

    def __init__(self, adapter: DeviceAdapter, outcome: Outcome, theirs: _Theirs, slack: float) -> None:
        assert outcome.state is not None
        self.adapter, self.outcome, self.slack = adapter, outcome, slack
        self.state, self.first = outcome.state, outcome.state.prompt_length
        self.theirs = theirs.ids[: _stop(theirs.ids, theirs.end_ids)]
        asked = self.state.tokens[self.first : self.first + self.state.asked]
        self.ours = asked[: _stop(asked, adapter.facts.end_ids)]
        shared = min(len(self.ours), len(self.theirs))
        self.differing = [n for n in range(shared) if self.ours[n] != self.theirs[n]]

    def finding(self) -> Finding | None:
        """Name the first token that differs, and, where another was decided before it, that one too; else the end."""
        if not self.differing:
            return self._other_end()
        lowest, earliest = self.differing[0], min(self.differing, key=lambda n: (self._forward_of(n), n))
        count = f"{len(self.differing)} of {len(self.theirs)} tokens differ"
        text = f"answer {self.outcome.task.index}: {count}; token {lowest} {self._pair(lowest)}"
        ours, theirs, gap = self._probabilities(earliest)
        which = "" if earliest == lowest else f", token {earliest} {self._pair(earliest)}"
        tie = gap <= self.slack
        verdict = "a tie" if tie else "no tie"
        said = f"decided first of these{which}: our probabilities {ours:.6f} and {theirs:.6f}, {verdict}"
        return Finding(f"{text}; {said}", tie)

    def _other_end(self) -> Finding | None:
        if len(self.ours) == len(self.theirs):
            return None
        return Finding(
            f"answer {self.outcome.task.index}: all {min(len(self.ours), len(self.theirs))} tokens of the shorter one "
            f"are equal, but ours is over after {len(self.ours)}, the reference's after {len(self.theirs)}"
        )

    def _pair(self, place: int) -> str:
        ours, theirs = self.state.tokens[self.first + place], self.theirs[place]
        codec = self.adapter.codec
        return f"is {token_in_words(codec, ours)}, the reference has {token_in_words(codec, theirs)}"

    def _forward_of(self, place: int) -> int:
        """Forwards made before the slot got its token."""
        return self.state.committed_at[self.first + place]

    def _probabilities(self, place: int) -> tuple[float, float, float]:
        """Of our token and theirs where ours was decided, and how far apart their logits are; without a cache."""
        slot = self.first + place
        tokens, window = self._before(slot)
        row = slot - self.adapter.facts.shift
        logits = self.adapter.logits(tokens[:window], [row], self._attend())[0]
        ours, theirs = self.state.tokens[slot], self.theirs[place]
        said = logits.softmax(-1)
        return float(said[ours]), float(said[theirs]), abs(float(logits[ours] - logits[theirs]))

    def _before(self, slot: int) -> tuple[list[int], int]:
        """The row as it stood when the slot was decided, and where the window of that forward ended."""
        mask = self.adapter.facts.mask_id
        tokens = [*self.outcome.task.prompt, *[mask or 0] * len(self.state.canvas)]
        for record in self.outcome.trace:
            if any(changed == slot and token == self.state.tokens[slot] for changed, token, _ in record["changed"]):
                return tokens, record["window"][1]
            for changed, token, _ in record["changed"]:
                tokens[changed] = token
        raise AssertionError("no forward decided the slot")

    def _attend(self) -> Attend:
        facts = self.adapter.facts
        first = 0 if facts.block_origin == "zero" else self.first
        return Attend(facts.attention, first, facts.trained_block or 1)


def _stop(ids: Sequence[int], end_ids: Collection[int]) -> int:
    """How many ids there are up to and with the first that ends the answer."""
    return next((n + 1 for n, token in enumerate(ids) if token in end_ids), len(ids))
