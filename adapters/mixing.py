"""A small random network in whole numbers: what it says depends on all that a row sees, and repeats exactly.

Two layers of hashes in place of products: a slot's second key is a hash of the first keys of all slots it sees, so keys
that are stored go stale as a real network's do, and only what is exact in a real network is exact here. Sums of whole
numbers know no rounding: a batch, a window or a cache that should change nothing changes no bit.

Shapes: R rows in flight, S slots of a row, B rows of a group, W slots of the longest window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adapters.base import Group, Request
from adapters.text import IdCodec
from adapters.toy import CPU, LogitsAdapter
from samplers import CAUSAL, FULL, Attend, Forward, ModelFacts, Prediction, Role

FINE = 2.0**20  # a mixture's weights are whole multiples of its inverse


class MixingAdapter(LogitsAdapter):
    """The network; ``seed`` chooses it.

    Attributes:
        sharpness: largest logit; the smallest is 0. Half of the slots are predicted with a tenth of it.
        forwards: all it was asked to run, in order.
        misread: slots that were to be read from the cache and had not been stored, as (row, slot).
        drafter: the network that drafts, if the facts name one. If it attends fully and in blocks, its context are keys
            of this one's: those of the last stored window that a draft's `Forward.keep` names.
    """

    def __init__(self, facts: ModelFacts, seed: int = 0, sharpness: float = 9.0) -> None:
        super().__init__(facts, IdCodec(facts.vocab_size), CPU)
        self.seed, self.sharpness = seed, sharpness
        self.forwards: list[Forward] = []
        self.misread: list[tuple[int, int]] = []
        self.drafter = MixingAdapter(facts.draft, seed + 1, sharpness) if facts.draft else None
        if self.drafter:
            self.drafter.misread = self.misread

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.keys = torch.zeros(rows, 2, slots, dtype=torch.long)
        self.stored = torch.zeros(rows, slots, dtype=torch.bool)
        self.carried: dict[int, torch.Tensor] = {}
        self.heard: dict[int, range] = {}  # by row, the last window that was stored
        if self.drafter:
            self.drafter.open(rows, slots)
            self.drafter.laws = self.laws

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.keys[row], self.stored[row] = 0, False
        self.carried.pop(row, None)
        if self.drafter:
            self.drafter.place(row, tokens, stream)

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        self.forwards += [request.forward for request in requests]
        if self.drafter is None:
            return super().forward(requests)
        if requests[0].forward.role is Role.DRAFT:  # alike in this
            self.update_canvas(requests)
            if self.drafter.facts.attention == "full" and self.drafter.facts.trained_block:
                requests = [self._passed_on(request, self.drafter) for request in requests]
            return self.drafter.forward(requests)
        self.drafter.update_canvas(requests)
        self.heard |= {request.row: request.forward.store for request in requests if request.forward.store}
        return super().forward(requests)

    def _passed_on(self, request: Request, drafter: MixingAdapter) -> Request:
        """Make the keys of the slots that a draft keeps its drafter's context."""
        row, forward = request.row, request.forward
        path = list(self.heard[row] if forward.keep is None else forward.keep)
        context = slice(forward.window.start - len(path), forward.window.start)
        drafter.keys[row, :, context], drafter.stored[row, context] = self.keys[row, :, path], self.stored[row, path]
        return replace(request, forward=replace(forward, keep=None))

    def hidden(self, group: Group) -> torch.Tensor:
        logits = torch.zeros(*group.ids.shape, self.facts.vocab_size, dtype=torch.float64)
        first = _hash(self._embedded(group) + 1_000_003 * group.rotary + self.seed)
        for b, (row, forward) in enumerate(zip(group.lines, group.forwards, strict=True)):
            said = self._layers(row, forward, first[b, : len(forward.window)])
            logits[b, : len(forward.window)] = self._logits(said)
        return logits.float()

    def _embedded(self, group: Group) -> torch.Tensor:
        """(B, W) whole numbers: a hash of the id, or a mixture's weighted sum of such."""
        embedded = _hash(group.ids) >> 24
        if group.soft is not None:
            soft = group.soft
            weights = (soft.weights * FINE).long()
            rest = int(FINE) - weights.sum(1)
            mask = _hash(torch.tensor(self._mask_id)) >> 24
            embedded[soft.member, soft.column] = ((_hash(soft.ids) >> 24) * weights).sum(1) // 7 + rest * mask
        return embedded

    def _layers(self, row: int, forward: Forward, first: torch.Tensor) -> torch.Tensor:
        """Run one row's window: (W,) to (W,); its keys are stored where the forward says so."""
        window, context, store = forward.window, forward.context, forward.store
        self._move(row, forward)
        outside = [slot for slot in context if slot not in window]
        self.misread += [(row, slot) for slot in outside if not self.stored[row, slot]]
        seen = self._visible(forward)
        first = first + (0 if store else self.carried.get(row, 0))
        second = _hash(first + _seen(first, seen) + self.keys[row, 0, outside].sum())
        said = _hash(second + _seen(second, seen) + self.keys[row, 1, outside].sum())
        kept = slice(store.start - window.start, store.stop - window.start) if store else slice(0)
        self.keys[row, 0, store.start : store.stop] = first[kept]
        self.keys[row, 1, store.start : store.stop] = second[kept]
        self.stored[row, store.start : store.stop] = True
        self._carry(row, forward, said)
        return said

    def _carry(self, row: int, forward: Forward, said: torch.Tensor) -> None:
        """What was said (W,) of a canvas conditions the row's next run; a stored one ends that."""
        if forward.carry and self.facts.attention == "canvas":
            self.carried[row] = said
        elif forward.store:
            self.carried.pop(row, None)

    def _visible(self, forward: Forward) -> torch.Tensor:
        """(W, W) bool: which slots of the window each of them sees."""
        slots, attend = torch.tensor(forward.window), forward.attend or Attend(self.facts.attention)
        if attend.pattern == "canvas":
            attend = CAUSAL if forward.store else FULL
        if attend.pattern == "full":
            return torch.ones(len(slots), len(slots), dtype=torch.bool)
        if attend.pattern == "causal":
            return slots[:, None] >= slots
        if attend.pattern == "tree":
            return _ancestors(attend.parents)
        block = torch.div(slots - attend.first, attend.size, rounding_mode="floor").clamp(min=-1)
        return block[:, None] >= block

    def _move(self, row: int, forward: Forward) -> None:
        if forward.keep is None:
            return
        first = forward.window.start - len(forward.keep)
        kept, were = self.keys[row, :, list(forward.keep)], self.stored[row, list(forward.keep)]
        self.stored[row, first:] = False
        self.keys[row, :, first : forward.window.start], self.stored[row, first : forward.window.start] = kept, were

    def _logits(self, said: torch.Tensor) -> torch.Tensor:
        """(W,) to (W, V): cubes of even numbers in 0..1, so that one id stands out more often than not."""
        bits = _hash(said[:, None] + 7919 * torch.arange(self.facts.vocab_size))
        even = (bits & 0xFFFFFF).double() / 0x1000000
        scale = torch.where(said[:, None] & 0x100 > 0, self.sharpness, self.sharpness / 10)
        return even**3 * scale


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """(W, W) bool: each place's own and its parent's, which come first."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for place, parent in enumerate(parents):
        seen[place] |= seen[parent]
    return seen


def _seen(keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(W,) and (W, W) to (W,): what each slot sees, summed."""
    return torch.where(visible, keys, 0).sum(1)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Scrambles int64, wrapping; the last step makes it a sum's part that can't be told from noise."""
    x = (x + 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    x = (x ^ (x >> 29)) * 0x14D049BB133111EB
    return x ^ (x >> 32)
