"""A causal model with its drafter: each forward goes to the one whose role it names.

Shapes: B rows of a group, C context slots, W slots of the longest window, F tapped layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from adapters.base import Request
from adapters.checks import check_drafter
from adapters.dflash import DFlashDrafter
from adapters.taps import features, tapped
from adapters.transformer import TransformerAdapter
from samplers import Prediction, Role


class Heard(NamedTuple):
    """What the target's tapped layers held for a row's last window, which began at slot ``start``: (W, F·D)."""

    start: int
    features: torch.Tensor


class DraftedAdapter(TransformerAdapter):
    """The target, as any causal model is run, and a drafter beside it.

    DFlash's drafter lives on the target's features: those of each stored window are kept until the row's next draft,
    whose `Forward.keep` names the slots that were accepted; they become the drafter's context, closing up before the
    draft's window. A masked diffusion model drafts from the tokens alone.
    """

    drafter: DFlashDrafter | TransformerAdapter

    def attach(self, drafter: DFlashDrafter | TransformerAdapter) -> None:
        """Give the target its drafter, which may have been built on it."""
        self.drafter = drafter
        self.facts = replace(self.facts, draft=drafter.facts)
        self._heard: dict[int, Heard] = {}

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Of the target, by the drafter's configuration; none if it takes no features."""
        return self.drafter.config.target_layers if isinstance(self.drafter, DFlashDrafter) else ()

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.drafter.read_out.bytes = self.read_out.bytes  # the memory for logits is the engine's option
        self.drafter.checks = self.checks
        self.drafter.open(rows, slots)
        self.drafter.laws = self.laws  # those that drafts were drawn from are held against the target's
        self._heard = {}

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.drafter.place(row, tokens, stream)
        self._heard.pop(row, None)

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        if requests[0].forward.role is Role.DRAFT:  # alike in this
            self.update_canvas(requests)
            self._pass_on(requests)
            return self.drafter.forward(requests)
        self.drafter.update_canvas(requests)
        layers = self.tapped_layers
        with tapped(self.body, layers) as caught:
            said = super().forward(requests)
            if layers:
                self._hear(requests, features(caught, layers))
        if self.checks and layers:
            check_drafter(self.drafter.store, requests)
        return said

    def _hear(self, requests: Sequence[Request], caught: torch.Tensor) -> None:
        """Keep what was caught, (B, W, F·D) by ascending row, of windows that are stored."""
        for request, window in zip(sorted(requests, key=lambda request: request.row), caught):
            forward = request.forward
            if forward.store:
                self._heard[request.row] = Heard(forward.window.start, window[: len(forward.window)])

    @torch.inference_mode()
    def _pass_on(self, requests: Sequence[Request]) -> None:
        """Make the features of accepted slots the drafter's context, in one run for all rows that have some."""
        spans, parts = {}, []
        for request in sorted(requests, key=lambda request: request.row):
            heard, forward = self._heard.pop(request.row, None), request.forward
            if heard is None or not isinstance(self.drafter, DFlashDrafter):
                continue
            path = range(heard.start, heard.start + len(heard.features)) if forward.keep is None else forward.keep
            spans[request.row] = range(forward.window.start - len(path), forward.window.start)
            parts.append(heard.features[[slot - heard.start for slot in path]])
        if spans:
            assert isinstance(self.drafter, DFlashDrafter)
            self.drafter.remember(spans, torch.nn.utils.rnn.pad_sequence(parts, batch_first=True))
