"""The protocol every model is put behind, and what all adapters share: the canvas on the device and the read-out.

Shapes: R rows in flight, S slots of a row, B rows of a group, W slots of the longest window, N wanted slots,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from adapters.readout import Head, OwnReadOuts, ReadOut
from adapters.readouts import BUILT_IN, Memory, named
from adapters.soft import SoftInputs, pack
from adapters.text import TextCodec
from samplers import FULL, Attend, Forward, Guidance, ModelFacts, Prediction


@dataclass(slots=True)
class Request:
    """A forward of one row, with the slots of that row that changed since its last one."""

    row: int
    forward: Forward
    changed: list[int]
    tokens: list[int]  # what the changed slots hold now


class MaskedLMAdapter(Protocol):
    """A model, as the engine sees it."""

    facts: ModelFacts
    codec: TextCodec

    def open(self, rows: int, slots: int) -> None:
        """Make room for ``rows`` sequences of up to ``slots`` slots; forgets all rows."""

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        """Put a new sequence into a row; ``stream`` keys its random numbers."""

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        """One batched run of the model. All requests are alike in `group_key`, and in line with `facts`."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""


def group_key(forward: Forward) -> tuple:
    """Forwards of equal key may share one call."""
    attend = forward.attend.pattern if forward.attend else None
    scale = forward.guidance.scale if forward.guidance else None
    return (forward.role, attend, len(forward.context) > 0, scale, bool(forward.inputs), forward.law, forward.ask)


@dataclass(slots=True)
class Group:
    """Requests as tensors, by ascending row. Windows are padded on the right to W by repeating their last slot."""

    forwards: list[Forward]
    lines: list[int]  # rows, on the host
    rows: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B,)
    lengths: torch.Tensor  # (B,) window lengths
    contexts: torch.Tensor  # (B, 2) first and last + 1 of the cached slots visible
    stores: torch.Tensor  # (B, 2) first and last + 1 of the slots stored
    edges: torch.Tensor  # (B, 2) first edge and size of the blocks, for a pattern of blocks
    positions: torch.Tensor  # (B, W) slots
    ids: torch.Tensor  # (B, W)
    padded: bool  # whether any window is shorter than W
    soft: SoftInputs | None = None

    @property
    def cached(self) -> bool:
        return len(self.forwards[0].context) > 0  # alike in this

    @property
    def attend(self) -> Attend | None:
        return self.forwards[0].attend  # alike in pattern, not in edges

    def inside(self) -> torch.Tensor:
        """(B, W) bool: False for padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def is_stored(self) -> torch.Tensor:
        """(B, W) bool: whether a window's slot is to be stored."""
        return (self.positions >= self.stores[:, :1]) & (self.positions < self.stores[:, 1:])


class DeviceAdapter(ABC):
    """Keeps tokens on the device, gathers windows, and reads the wanted slots out; a subclass runs the network.

    Three small packed copies go up per call (changed slots, windows, wanted slots), one packed result comes down.
    """

    def __init__(self, facts: ModelFacts, codec: TextCodec, device: torch.device, logits_mib: int = 256) -> None:
        self.facts, self.codec, self.device = facts, codec, device
        self.read_out = ReadOut(facts.mask_id, facts.vocab_size, logits_mib)

    @abstractmethod
    def hidden(self, group: Group) -> torch.Tensor:
        """Last hidden states, (B, W, D)."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of (N, D) hidden states, (N, V)."""

    def open(self, rows: int, slots: int) -> None:
        self.canvas = torch.zeros(rows, slots, dtype=torch.long, device=self.device)
        self.streams = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.memory = Memory(rows, slots, self.device)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        self.canvas[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
        self.streams[row] = stream - (1 << 64) if stream >= 1 << 63 else stream
        self.memory.forget(row)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        ordered = sorted(requests, key=lambda request: request.row)
        self._update_canvas(ordered)
        group = self._group(ordered)
        hidden = self.hidden(group)
        if group.forwards[0].guidance:
            hidden = torch.cat((hidden, self.hidden(self._unconditional(group))), -1)
        if not any(len(f.want) for f in group.forwards):
            return [Prediction((), {}, {}) for _ in requests]
        said = dict(zip(group.lines, _split(self._read(group, hidden), group.forwards), strict=True))
        return [said[request.row] for request in requests]

    def _read(self, group: Group, hidden: torch.Tensor) -> list[list[float]]:
        """Columns over the N wanted slots of all requests, request after request; only these see the head."""
        forwards = group.forwards
        members = [b for b, f in enumerate(forwards) for _ in f.want]
        slots = [slot for f in forwards for slot in f.want]
        draws = [f.draw for f in forwards for _ in f.want]
        member, slot, draw = torch.tensor([members, slots, draws], device=self.device)
        wanted = hidden[member, slot - self.facts.shift - group.starts[member]]
        head = _guided(self.head, forwards[0].guidance)
        rivals = torch.tensor(_rivals(forwards), dtype=torch.long, device=self.device)
        own = None
        if named(forwards[0].ask):
            places = [(line, slot) for line, f in zip(group.lines, forwards, strict=True) for slot in f.want]
            own = OwnReadOuts(forwards[0].ask, self.memory, places)
        return self.read_out(wanted, head, forwards[0], self.streams[group.rows[member]], slot, draw, rivals, own)

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

    def _update_canvas(self, requests: Sequence[Request]) -> None:
        rows = [r.row for r in requests for _ in r.changed]
        if rows:
            slots = [slot for r in requests for slot in r.changed]
            tokens = [token for r in requests for token in r.tokens]
            packed = torch.tensor([rows, slots, tokens], device=self.device)
            self.canvas[packed[0], packed[1]] = packed[2]

    def _group(self, requests: Sequence[Request]) -> Group:
        forwards = [r.forward for r in requests]
        packed = torch.tensor([_numbers(r.row, r.forward) for r in requests], device=self.device)
        rows, starts, lengths = packed[:, :3].T
        widths = [len(f.window) for f in forwards]
        steps = torch.arange(max(widths), device=self.device)
        positions = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
        return Group(
            forwards,
            [r.row for r in requests],
            rows,
            starts,
            lengths,
            contexts=packed[:, 3:5],
            stores=packed[:, 5:7],
            edges=packed[:, 7:],
            positions=positions,
            ids=self.canvas[rows[:, None], positions],
            padded=min(widths) < max(widths),
            soft=pack(forwards, self.device),
        )


def _guided(head: Head, guidance: Guidance | None) -> Head:
    """A head for pairs of hidden states, with and without the condition, side by side."""
    if guidance is None:
        return head

    def pair(hidden: torch.Tensor) -> torch.Tensor:
        with_condition, without = (head(part) for part in hidden.chunk(2, -1))
        return without + (guidance.scale + 1) * (with_condition - without)

    return pair


def _numbers(row: int, forward: Forward) -> tuple[int, ...]:
    window, context, store, attend = forward.window, forward.context, forward.store, forward.attend or FULL
    spans = (window.start, len(window), context.start, context.stop, store.start, store.stop)
    return row, *spans, attend.first, attend.size


def _rivals(forwards: Sequence[Forward]) -> list[list[int]]:
    """Ids asked besides the token, (N, k): as many a slot as the one with most has, filled up with id 0."""
    asked = [list(forward.rivals.get(slot, ())) for forward in forwards for slot in forward.want]
    most = max(map(len, asked))
    return [ids + [0] * (most - len(ids)) for ids in asked]


def _split(columns: list[list[float]], forwards: Sequence[Forward]) -> list[Prediction]:
    """Columns of all wanted slots (token, confidence, finite, what was asked) to one prediction a request."""
    predictions, start = [], 0
    rivals = max(len(forward.rivals.get(slot, ())) for forward in forwards for slot in forward.want)
    for forward in forwards:
        part = [column[start : start + len(forward.want)] for column in columns]
        start += len(forward.want)
        predictions.append(_prediction(part, forward, rivals))
    return predictions


def _prediction(columns: list[list[float]], forward: Forward, rivals: int) -> Prediction:
    """One request's columns; after three and the statistics asked for there are ``rivals``, then read-outs."""
    slots, asked = forward.want, forward.ask & BUILT_IN
    before = 3 + len(asked)
    prediction = Prediction(slots, dict(zip(slots, map(int, columns[0]))), dict(zip(slots, columns[1])))
    prediction.finite = all(columns[2])
    if "margin" in asked:
        prediction.margin = dict(zip(slots, columns[3]))
    if "entropy" in asked:
        prediction.entropy = dict(zip(slots, columns[before - 1]))
    for slot, *values in zip(slots, *columns[before : before + rivals]) if forward.rivals else ():
        prediction.rivals[slot] = dict(zip(forward.rivals.get(slot, ()), values))
    if named(forward.ask):
        prediction.read = {slot: tuple(values) for slot, *values in zip(slots, *columns[before + rivals :])}
    return prediction
