"""Any checkpoint of the family table on its native `transformers` architecture.

Shapes: B rows of a group, W slots of the longest window, N wanted slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from adapters.base import DeviceAdapter, Group
from adapters.cache import KeyValueStore, Move
from adapters.checks import CheckedStore, check_verified
from adapters.soft import embedded
from adapters.text import TextCodec
from adapters.visibility import kernel_serves, visibility
from samplers import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS = ("auto", "dense")


class TransformerAdapter(DeviceAdapter):
    """Runs a group's windows through the network's layers; the head only sees the rows that are read."""

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        codec: TextCodec,
        logits_mib: int = 256,
        attention_kernel: str = "auto",
    ) -> None:
        """``attention_kernel``: ``auto`` calls the variable-length kernel where there is one, ``dense`` never.

        Raises:
            ValueError: for another kernel.
        """
        if attention_kernel not in KERNELS:
            raise ValueError(f"model.attention_kernel={attention_kernel} is not known: use {' or '.join(KERNELS)}")
        super().__init__(facts, codec, model.device, logits_mib)
        self.model = model.eval()
        self.body, self.head_module = model.base_model, model.get_output_embeddings()
        self.store: KeyValueStore = KeyValueStore(0, 0)
        self.packs = attention_kernel == "auto" and kernel_serves(model)

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.store = CheckedStore(rows, slots) if self.checks else KeyValueStore(rows, slots)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.store.forget(row)

    def hidden(self, group: Group) -> torch.Tensor:
        self._keep(group)
        if self.checks:
            check_verified(self.store, group, self.canvas)
        used = group.cached or any(forward.store for forward in group.forwards)
        if used:
            self.store.aim(group)
        output = self.body(
            **self._inputs(group),
            position_ids=group.rotary,
            cache=self.store if used else None,
            use_cache=False,
            visibility=visibility(group, self.facts.attention, self.store.lines(group), self.packs),
        )
        if used:
            self.store.settle()
        return output.last_hidden_state.to(self.device)  # layers may lie on several devices

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head_module(hidden).to(self.device)

    def _inputs(self, group: Group) -> dict[str, torch.Tensor]:
        """What the layers are fed, by its name in the network's call."""
        if group.soft is None:
            return {"input_ids": group.ids}
        embedding = self.model.get_input_embeddings()
        return {"inputs_embeds": embedded(group.ids, group.soft, embedding, self._mask_id)}

    def _keep(self, group: Group) -> None:
        moves = [
            Move(row, forward.keep, forward.window.start)
            for row, forward in zip(group.lines, group.forwards, strict=True)
            if forward.keep is not None
        ]
        if moves:
            self.store.keep(moves)
