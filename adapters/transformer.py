"""Any checkpoint of the family table on its native `transformers` architecture.

Shapes: B rows of a group, W slots of the longest window, K keys, N wanted slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adapters.attention import Visibility, among_window, count_mask
from adapters.base import DeviceAdapter, Group
from adapters.cache import KeyValueStore
from adapters.text import TextCodec
from samplers import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformerAdapter(DeviceAdapter):
    """Runs a group's windows through the network's layers; the head only sees the rows that are read."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, codec: TextCodec, logits_mib: int = 256) -> None:
        super().__init__(facts, codec, model.device, logits_mib)
        self.model = model.eval()
        self.body, self.head_module = model.base_model, model.get_output_embeddings()
        self.store = KeyValueStore(0, 0)

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.store = KeyValueStore(rows, slots)

    def hidden(self, group: Group) -> torch.Tensor:
        reach = self._aim(group)
        output = self.body(
            input_ids=group.ids,
            position_ids=group.positions,
            cache=self.store if group.store or reach else None,
            use_cache=False,
            visibility=self._visibility(group, reach),
        )
        return output.last_hidden_state

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head_module(hidden)

    def _aim(self, group: Group) -> int:
        """Point the store at this group; returns how many cached slots are read."""
        forwards = group.forwards
        reach = 0
        if any(len(f.context) for f in forwards):
            reach = max(max(f.context.stop, f.window.stop if group.store else 0) for f in forwards)
        rows = group.rows.tolist() if reach else []
        self.store.aim(group.rows, group.positions, group.store, reach, rows == list(range(len(rows))))
        return reach

    def _visibility(self, group: Group, reach: int) -> Visibility:
        """The cheapest description of what the window may see: nothing to say, causal, or a dense mask."""
        pattern = group.attend.pattern if group.attend else self.facts.attention
        if not reach and (pattern == "causal" or (pattern == "full" and not group.padded)):
            return Visibility(causal=pattern == "causal")  # a causal query never sees the padding on its right
        if reach and _sees_all_cached(group, pattern, reach):
            return Visibility()
        count_mask()
        if pattern == "full" and not reach:  # only padding to hide: one row of the mask serves all queries
            steps = torch.arange(group.ids.shape[1], device=self.device)
            return Visibility((steps < group.lengths[:, None])[:, None, None])
        return Visibility(self._mask(group, pattern, reach)[:, None])

    def _mask(self, group: Group, pattern: str, reach: int) -> torch.Tensor:
        """(B, W, K) bool; keys are the cached slots, then the window unless it was stored among them."""
        edges = [(f.attend.first, f.attend.size) for f in group.forwards if f.attend]
        first, size = torch.tensor(edges, device=self.device).T[:, :, None, None] if edges else (0, 0)
        window = among_window(pattern, group.positions, first, size)
        steps = torch.arange(group.ids.shape[1], device=self.device)
        window &= (steps < group.lengths[:, None])[:, None]  # padding is nobody's to see
        if not reach:
            return window
        slots = torch.arange(reach, device=self.device)
        begins, ends = group.contexts[:, :1], group.contexts[:, 1:]
        cached = ((slots >= begins) & (slots < ends))[:, None].expand(-1, group.ids.shape[1], -1)
        if not group.store:
            return torch.cat((cached, window), 2)
        return self._stored(group, window, cached.clone())

    def _stored(self, group: Group, window: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Move the window's part of a mask to the slots where its keys were stored; padding repeats the last."""
        last = group.lengths[:, None] - 1
        steps = torch.minimum(torch.arange(group.ids.shape[1], device=self.device), last)
        shown = window.gather(2, steps[:, None].expand_as(window))
        return cached.scatter_(2, group.positions[:, None].expand_as(window), shown)


def _sees_all_cached(group: Group, pattern: str, reach: int) -> bool:
    """Whether every query sees each of the ``reach`` cached slots and all of its window, so that no mask is needed."""
    forwards = group.forwards
    if group.padded or any(f.context.start for f in forwards):
        return False
    if group.store:
        whole = all(f.context.stop == f.window.start and f.window.stop == reach for f in forwards)
    else:
        whole = all(f.context.stop == reach for f in forwards)
    return whole and (pattern == "full" or group.ids.shape[1] == 1)
