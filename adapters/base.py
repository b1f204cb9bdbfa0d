"""The protocol every model is put behind, and what all adapters share: the canvas on the device and the read-out.

Shapes: R rows in flight, S slots of a row, B members of a group, W slots of the longest window, N wanted slots,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from adapters.drafts import Drafts, Laws, judging, keeping
from adapters.grouping import Group, Request, group_key, grouped
from adapters.predictions import Columns, by_request, rivals_asked, silent, split
from adapters.readout import Head, OwnReadOuts, ReadOut
from adapters.readouts import Memory, named
from adapters.text import TextCodec
from samplers import Attend, Forward, Guidance, ModelFacts, Prediction

__all__ = ["DeviceAdapter", "Group", "MaskedLMAdapter", "Request", "group_key"]


class MaskedLMAdapter(Protocol):
    """A model, as the engine sees it."""

    facts: ModelFacts
    codec: TextCodec

    def open(self, rows: int, slots: int) -> None:
        """Make room for ``rows`` sequences of up to ``slots`` slots, spare ones included; forgets all rows."""

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        """Put a new sequence into a row; ``stream`` keys its random numbers."""

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        """One batched run of the model. All requests are alike in `group_key`, and in line with `facts`."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""


class DeviceAdapter(ABC):
    """Keeps tokens on the device, gathers windows, and reads the wanted slots out; a subclass runs the network.

    Three small packed copies go up per call (changed slots, windows, wanted slots), and one each of what is seldom said
    (contents and positions of a window's own, trees, mixtures, rivals); one packed result comes down.

    Attributes:
        laws: those that drafts were drawn from; a target shares its drafter's.
        checks: hold the cache to what it must store when drafts are verified; for tests, to be set before `open`.
    """

    def __init__(self, facts: ModelFacts, codec: TextCodec, device: torch.device, logits_mib: int = 256) -> None:
        self.facts, self.codec, self.device = facts, codec, device
        self.read_out = ReadOut(facts.mask_id, facts.vocab_size, logits_mib)
        self.laws = Laws(0)
        self.checks = False

    @abstractmethod
    def hidden(self, group: Group) -> torch.Tensor:
        """Last hidden states, (B, W, D)."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of (N, D) hidden states, (N, V)."""

    def head_for(self, group: Group) -> Head:
        """The head of a group's read-out: it is run on the wanted slots chunk by chunk, in their order."""
        return _guided(self.head, group.forwards[0].guidance)

    def open(self, rows: int, slots: int) -> None:
        self.canvas = torch.zeros(rows, slots, dtype=torch.long, device=self.device)
        self.streams = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.memory = Memory(rows, slots + self.facts.shift, self.device)
        self.laws = Laws(rows)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        self.canvas[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
        self.streams[row] = stream - (1 << 64) if stream >= 1 << 63 else stream
        self.memory.forget(row)
        self.laws.forget(row)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        ordered = sorted(requests, key=lambda request: request.row)
        self.update_canvas(ordered)
        group = self._group(ordered)
        hidden = self.hidden(group)
        if group.forwards[0].guidance:
            hidden = torch.cat((hidden, self.hidden(self._unconditional(group))), -1)
        rivals = rivals_asked(group.forwards)
        if not rivals:
            said = [silent(forward) for forward in group.forwards]
        else:
            kinds = Columns(max(map(len, rivals)), min(group.forwards[0].best, self.facts.vocab_size))
            said = split(self._read(group, hidden, rivals), group.forwards, kinds)
        answers = dict(zip((request.row for request in ordered), by_request(said, ordered), strict=True))
        return [answers[request.row] for request in requests]

    def _read(self, group: Group, hidden: torch.Tensor, rivals: list[list[int]]) -> list[list[float]]:
        """Columns over the N wanted slots of all members, member after member; only these see the head."""
        forwards = group.forwards
        members = [b for b, f in enumerate(forwards) for _ in f.want]
        slots = [slot for f in forwards for slot in f.want]
        draws = [f.draw for f in forwards for _ in f.want]
        member, slot, draw = torch.tensor([members, slots, draws], device=self.device)
        wanted = hidden[member, slot - self.facts.shift - group.starts[member]]
        own = None
        if named(forwards[0].ask):
            places = [(line, slot) for line, f in zip(group.lines, forwards, strict=True) for slot in f.want]
            own = OwnReadOuts(forwards[0].ask, self.memory, places)
        return self.read_out(
            wanted,
            self.head_for(group),
            forwards[0],
            self.streams[group.rows[member]],
            slot,
            draw,
            rivals=torch.tensor(rivals, dtype=torch.long, device=self.device),
            own=own,
            drafts=self._drafts(group),
        )

    def _drafts(self, group: Group) -> Drafts | None:
        """What is to be done with the laws of the group; a model of canvases carries logits in a way of its own."""
        first = group.forwards[0]
        if first.judged_drafts:
            return judging(self.laws, group)
        return keeping(self.laws, group) if first.carry and self.facts.attention != "canvas" else None

    def _unconditional(self, group: Group) -> Group:
        """The group's copy for guidance: some slots show the mask, nothing is stored."""
        hidden = [(f.guidance.hidden.start, f.guidance.hidden.stop) for f in group.forwards if f.guidance]
        starts, stops = torch.tensor(hidden, device=self.device).T[:, :, None]
        blank = (group.positions >= starts) & (group.positions < stops)
        forwards = [replace(forward, store=range(0), keep=None) for forward in group.forwards]
        return replace(
            group, forwards=forwards, stores=group.stores * 0, ids=group.ids.masked_fill(blank, self._mask_id)
        )

    @property
    def _mask_id(self) -> int:
        assert self.facts.mask_id is not None
        return self.facts.mask_id

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], rows: Sequence[int], attend: Attend | None = None) -> torch.Tensor:
        """Raw logits (N, V) in float32 at ``rows`` of one sequence; forgets all rows in flight."""
        self.open(1, len(tokens))
        self.place(0, tokens, 0)
        group = self._group([Request(0, Forward(range(len(tokens)), attend=attend), [], [])])
        return self.head(self.hidden(group)[0, list(rows)]).float()

    def update_canvas(self, requests: Sequence[Request]) -> None:
        """Take in what changed in the rows, as `forward` does first."""
        rows = [r.row for r in requests for _ in r.changed]
        if rows:
            slots = [slot for r in requests for slot in r.changed]
            tokens = [token for r in requests for token in r.tokens]
            packed = torch.tensor([rows, slots, tokens], device=self.device)
            self.canvas[packed[0], packed[1]] = packed[2]

    def _group(self, requests: Sequence[Request]) -> Group:
        return grouped(requests, self.canvas)


def _guided(head: Head, guidance: Guidance | None) -> Head:
    """A head for pairs of hidden states, with and without the condition, side by side."""
    if guidance is None:
        return head

    def pair(hidden: torch.Tensor) -> torch.Tensor:
        with_condition, without = (head(part) for part in hidden.chunk(2, -1))
        return without + (guidance.scale + 1) * (with_condition - without)

    return pair
