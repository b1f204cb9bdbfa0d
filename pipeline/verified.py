"""What became of the drafts that a forward put up for verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samplers import DecodeState, Forward

STEPWISE = ("causal", "tree")  # patterns under which a draft is judged behind those before it


class Verified(NamedTuple):
    """One forward that verified drafts.

    Attributes:
        forward: its number among all of the sequence, from 1.
        drafts: put up; every node of a tree is one.
        kept: slots decided by it whose tokens were drafts.
        decided: all slots decided by it, that of the model's own token (the bonus) included.
    """

    forward: int
    drafts: int
    kept: tuple[int, ...]
    decided: tuple[int, ...]

    def counts(self) -> dict[str, int]:
        """Numbers of drafts ``proposed`` and ``accepted``, and of tokens ``emitted``."""
        return {"proposed": self.drafts, "accepted": len(self.kept), "emitted": len(self.decided)}


def verified(forward: Forward, state: DecodeState) -> Verified:
    """Follow a forward's drafts in what the sampler has just decided by it.

    In a chain or a tree a token is an accepted draft if the drafts led to it from the anchor on, each behind the one
    before: not the model's own token, though another branch may hold the same. Several future states of one canvas are
    accepted whole: the farthest one that all of its drafts are decided of. The model's own step from there always adds
    to it; of a first step that decides all of a state and more, that state is counted too.
    """
    decided = tuple(sorted({slot for slot in state.changes if state.committed_at[slot] == state.forwards}))
    pattern = forward.attend.pattern if forward.attend else state.model.attention
    kept = (_along_path if pattern in STEPWISE else _in_states)(forward, state, decided)
    return Verified(state.forwards, len(forward.proposed), kept, decided)


def _along_path(forward: Forward, state: DecodeState, decided: tuple[int, ...]) -> tuple[int, ...]:
    """From the root, the window's first place, along drafts that are what was decided one after the other."""
    start, content = forward.window.start, forward.variants[-1] if forward.variants else {}
    tree = forward.attend.parents if forward.attend else ()
    parents = tree or tuple(max(0, place - 1) for place in range(len(forward.window)))
    drafts = [slot - start for slot in forward.proposed if slot > start]
    at = 0
    for count, slot in enumerate(decided):
        fitting = (p for p in drafts if parents[p] == at and content.get(start + p) == state.tokens[slot])
        if (child := next(fitting, None)) is None:
            return decided[:count]
        at = child
    return decided


def _in_states(forward: Forward, state: DecodeState, decided: tuple[int, ...]) -> tuple[int, ...]:
    held = {slot: state.tokens[slot] for slot in decided}
    states = [{slot: content[slot] for slot in forward.proposed if slot in content} for content in forward.variants]
    reached = [tuple(sorted(drafts)) for drafts in states if drafts.items() < held.items()]
    return max(reached, key=len, default=())


def clipped(log: Sequence[Verified], state: DecodeState) -> list[Verified]:
    """What of it is part of the answer, once that is there: up to its end token, which counts, or the length limit."""
    stop = min(state.prompt_length + state.asked, len(state.tokens))
    for slot in range(state.prompt_length, stop):
        if state.mask[slot]:
            stop = slot
            break
        if state.tokens[slot] in state.model.end_ids:
            stop = slot + 1
            break
    return [
        entry._replace(
            kept=tuple(slot for slot in entry.kept if slot < stop),
            decided=tuple(slot for slot in entry.decided if slot < stop),
        )
        for entry in log
    ]


def by_position(log: Sequence[Verified]) -> list[int]:
    """At n: how many forwards accepted more than n drafts."""
    accepted = [len(entry.kept) for entry in log]
    return [sum(count > n for count in accepted) for n in range(max(accepted, default=0))]
