"""The protocol every model is put behind, and what all adapters share: the canvas on the device and the read-out.

Shapes: R rows in flight, S slots of a row, B rows of a group, W slots of the longest window, N wanted slots,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from adapters.readout import ReadOut
from adapters.text import TextCodec
from samplers import Attend, Forward, ModelFacts, Prediction


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
        """One batched run of the model. All requests are alike in `group_key`.

        Raises:
            ValueError: for an attention pattern that the model does not serve.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished."""


def group_key(forward: Forward) -> tuple:
    """Forwards of equal key may share one call."""
    attend = forward.attend.pattern if forward.attend else None
    return (forward.role, attend, len(forward.context) > 0, forward.store, forward.law, forward.ask)


@dataclass(slots=True)
class Group:
    """Requests as tensors. Windows are padded on the right to W; padding repeats the row's last slot."""

    rows: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B,)
    lengths: torch.Tensor  # (B,) window lengths
    positions: torch.Tensor  # (B, W) slots, clamped to the row
    ids: torch.Tensor  # (B, W)
    contexts: torch.Tensor  # (B, 2) first and last + 1 of the cached slots visible
    forwards: list[Forward]
    attend: Attend | None
    padded: bool  # whether any window is shorter than W

    @property
    def store(self) -> bool:
        return self.forwards[0].store


class DeviceAdapter(ABC):
    """Keeps tokens on the device, gathers windows, and reads the wanted slots out; a subclass runs the network.

    Only changed slots go up (one packed copy) and one packed result comes down per call.
    """

    def __init__(self, facts: ModelFacts, codec: TextCodec, device: torch.device, logits_mib: int = 256) -> None:
        self.facts, self.codec, self.device = facts, codec, device
        self.read_out = ReadOut(facts.mask_id, logits_mib)

    @abstractmethod
    def hidden(self, group: Group) -> torch.Tensor:
        """Last hidden states, (B, W, D)."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of (N, D) hidden states, (N, V)."""

    def open(self, rows: int, slots: int) -> None:
        self.canvas = torch.zeros(rows, slots, dtype=torch.long, device=self.device)
        self.streams = torch.zeros(rows, dtype=torch.long, device=self.device)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        self.canvas[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
        self.streams[row] = stream - (1 << 64) if stream >= 1 << 63 else stream

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        self._update_canvas(requests)
        group = self._group(requests)
        hidden = self.hidden(group)
        forwards = group.forwards
        counts = [len(f.want) for f in forwards]
        if not sum(counts):
            return [Prediction((), {}, {}) for _ in forwards]
        member = [b for b, count in enumerate(counts) for _ in range(count)]
        slots = [slot for f in forwards for slot in f.want]
        draws = [f.draw for f, count in zip(forwards, counts, strict=True) for _ in range(count)]
        where = torch.tensor([member, slots, draws], device=self.device)
        offsets = where[1] - self.facts.shift - group.starts[where[0]]
        columns = self.read_out(
            hidden[where[0], offsets], self.head, forwards[0], self.streams[group.rows[where[0]]], where[1], where[2]
        )
        return _split(columns, forwards, counts)

    def _update_canvas(self, requests: Sequence[Request]) -> None:
        rows = [r.row for r in requests for _ in r.changed]
        if rows:
            slots = [slot for r in requests for slot in r.changed]
            tokens = [token for r in requests for token in r.tokens]
            packed = torch.tensor([rows, slots, tokens], device=self.device)
            self.canvas[packed[0], packed[1]] = packed[2]

    def _group(self, requests: Sequence[Request]) -> Group:
        forwards = [r.forward for r in requests]
        self._refuse_unserved(forwards[0].attend)
        lengths = [len(f.window) for f in forwards]
        packed = torch.tensor(
            [
                [r.row for r in requests],
                [f.window.start for f in forwards],
                lengths,
                [f.context.start for f in forwards],
                [f.context.stop for f in forwards],
            ],
            device=self.device,
        )
        rows, starts, sizes = packed[:3]
        steps = torch.arange(max(lengths), device=self.device)
        positions = starts[:, None] + torch.minimum(steps, sizes[:, None] - 1)
        ids = self.canvas[rows[:, None], positions]
        padded = min(lengths) < max(lengths)
        return Group(rows, starts, sizes, positions, ids, packed[3:].T, forwards, forwards[0].attend, padded)

    def _refuse_unserved(self, attend: Attend | None) -> None:
        if attend is not None and attend.pattern not in self.facts.attentions:
            served = ", ".join(sorted(self.facts.attentions))
            raise ValueError(f"{attend.pattern} attention was asked of a model that serves {served}")


def _split(columns: list[list[float]], forwards: Sequence[Forward], counts: Sequence[int]) -> list[Prediction]:
    """Columns of all wanted slots (token, confidence, finite, then what was asked) to one prediction a request."""
    ask = forwards[0].ask
    predictions, start = [], 0
    for forward, count in zip(forwards, counts, strict=True):
        part = [column[start : start + count] for column in columns]
        start += count
        slots = forward.want
        prediction = Prediction(slots, dict(zip(slots, map(int, part[0]))), dict(zip(slots, part[1])))
        prediction.finite = all(part[2])
        if "margin" in ask:
            prediction.margin = dict(zip(slots, part[3]))
        if "entropy" in ask:
            prediction.entropy = dict(zip(slots, part[-1]))
        predictions.append(prediction)
    return predictions
