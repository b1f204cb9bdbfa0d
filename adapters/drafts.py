"""Speculative sampling on the device: the laws that drafts were drawn from, and what the target makes of them.

Shapes: R rows in flight, K slots of a draft, N wanted slots of a group, n slots of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adapters.drawing import drawn, uniforms
from adapters.grouping import Group

# Added to a stream, so that drafts, verdicts and what is drawn in place of drafts have random numbers of their own:
DRAFTING, ACCEPTING = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
NO_DRAFT = -1.0


class Laws:
    """The law of each slot of a row's last forward with `carry`, (R, K, V): rows times K times V floats."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.table: torch.Tensor | None = None
        self.columns: dict[int, dict[int, int]] = {}  # by row and slot

    def forget(self, row: int) -> None:
        self.columns.pop(row, None)

    def make_room(self, width: int, like: torch.Tensor) -> torch.Tensor:
        """The table, of at least that many slots a row, for laws like (n, V)."""
        if self.table is None or self.table.shape[1] < width:
            grown = like.new_zeros(self.rows, width, like.shape[1])
            if self.table is not None:
                grown[:, : self.table.shape[1]] = self.table
            self.table = grown
        return self.table


@dataclass(slots=True)
class Drafts:
    """What the read-out of a group does with laws, for its N wanted slots or a chunk of them: keep them, or judge.

    Attributes:
        width: most slots a row keeps; 0 if laws are judged by those that were kept.
        rows, columns: (n,) where the laws lie in the table.
        tokens: (n,) what the slots hold.
        held: (n,) bool: whether that is a draft whose law was kept.
    """

    laws: Laws
    width: int
    rows: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor
    held: torch.Tensor

    def part(self, start: int, count: int) -> Drafts:
        """Of the chunk that begins at slot ``start`` of N."""
        chosen = slice(start, start + count)
        columns = (self.rows[chosen], self.columns[chosen], self.tokens[chosen], self.held[chosen])
        return Drafts(self.laws, self.width, *columns)

    def draw(self, law: torch.Tensor, counters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From a law (n, V), a token a slot (n,), then, if drafts are judged, the verdict on each (n,).

        The verdict is 1 or 0, or `NO_DRAFT`; the token of a slot with a draft is what is drawn if that is rejected.
        """
        streams, slots, draws = counters
        if self.width:
            self.laws.make_room(self.width, law)[self.rows, self.columns] = law
            return [drawn(law, uniforms(streams + DRAFTING, slots, draws))]
        uniform = uniforms(streams, slots, draws)
        if self.laws.table is None:
            return [drawn(law, uniform), torch.full_like(uniform, NO_DRAFT)]
        drafted = _fitted(self.laws.table[self.rows, self.columns], law.shape[1])
        drafted.masked_fill_(~self.held[:, None], 0)
        accepted, token = judge(law, drafted, self.tokens, uniforms(streams + ACCEPTING, slots, draws), uniform)
        return [token, accepted.double().masked_fill_(~self.held, NO_DRAFT)]


def judge(
    law: torch.Tensor, drafted: torch.Tensor, tokens: torch.Tensor, accepting: torch.Tensor, drawing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023): whether drafts are accepted, and what is drawn if not.

    A draft x of law q is accepted with probability p(x) / q(x); the replacement is drawn from what p has above q. So
    the token that is emitted has law p, whatever q.

    Args:
        law, drafted: p and q, (n, V).
        tokens: (n,) drafts.
        accepting, drawing: (n,) uniforms.
    """
    probability, drafted_with = (part.gather(1, tokens[:, None])[:, 0].double() for part in (law, drafted))
    accepted = accepting * drafted_with < probability
    rest = (law - drafted).clamp_(min=0)
    rest += law * (rest.sum(-1, keepdim=True) == 0)  # p nowhere above q: they are equal
    return accepted, drawn(rest, drawing)


def keeping(laws: Laws, group: Group) -> Drafts:
    """The laws of a group's wanted slots are to be kept; those kept for its rows before are let go."""
    for row, forward in zip(group.lines, group.forwards, strict=True):
        laws.columns[row] = {slot: column for column, slot in enumerate(forward.want)}
    return _drafts(laws, group, max(len(forward.want) for forward in group.forwards))


def judging(laws: Laws, group: Group) -> Drafts:
    """The drafts among a group's wanted slots are to be judged."""
    return _drafts(laws, group, 0)


def _drafts(laws: Laws, group: Group, width: int) -> Drafts:
    rows, columns, members, places, held = [], [], [], [], []
    for member, (row, forward) in enumerate(zip(group.lines, group.forwards, strict=True)):
        kept, proposed = laws.columns.get(row, {}), set(forward.proposed) & set(forward.window)
        for slot in forward.want:
            rows.append(row)
            columns.append(kept.get(slot, 0))
            members.append(member)
            places.append(slot - forward.window.start if slot in forward.window else 0)
            held.append(slot in proposed and slot in kept)
    packed = torch.tensor([rows, columns, members, places, held], device=group.ids.device)
    return Drafts(laws, width, packed[0], packed[1], group.ids[packed[2], packed[3]], packed[4].bool())


def _fitted(drafted: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Laws over as many ids as the target's: heads of one tokenizer are padded to unlike lengths."""
    missing = vocabulary - drafted.shape[1]
    return torch.nn.functional.pad(drafted, (0, missing)) if missing else drafted
