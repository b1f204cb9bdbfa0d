"""Any checkpoint of the family table on its native `transformers` architecture.

Shapes: B rows of a group, W slots of the longest window, K keys, N wanted slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from adapters.attention import Visibility, count_mask, may_see
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

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.store.forget(row)

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
        places = group.positions
        if group.store and group.padded:  # padding sees more than the slot it repeats, so its keys differ
            places = places.where(self._inside(group), self.store.slots)
        self.store.aim(group.rows, places, group.store, reach, group.leading)
        return reach

    def _inside(self, group: Group) -> torch.Tensor:
        """(B, W) bool: False for padding."""
        return torch.arange(group.ids.shape[1], device=self.device) < group.lengths[:, None]

    def _visibility(self, group: Group, reach: int) -> Visibility:
        """The cheapest description of what the window may see: nothing to say, causal, or a dense mask."""
        pattern = group.attend.pattern if group.attend else self.facts.attention
        if not reach and (pattern == "causal" or (pattern == "full" and not group.padded)):
            return Visibility(causal=pattern == "causal")  # a causal query never sees the padding on its right
        if reach and _sees_all_cached(group, pattern, reach):
            return Visibility()
        count_mask()
        if pattern == "full" and not reach:  # only padding to hide: one row of the mask serves all queries
            return Visibility(self._inside(group)[:, None, None])
        return Visibility(self._mask(group, pattern, reach)[:, None])

    def _mask(self, group: Group, pattern: str, reach: int) -> torch.Tensor:
        """(B, W, K) bool; keys are the cached slots, then the window unless it was stored among them."""
        slots = torch.arange(reach, device=self.device)[None, None]
        first, size = group.edges.T[:, :, None, None]
        begin, end = group.contexts.T[:, :, None, None]
        cached = (slots >= begin) & (slots < end)  # (B, 1, reach)
        start, stop = group.starts[:, None, None], (group.starts + group.lengths)[:, None, None]
        own = (slots >= start) & (slots < stop)
        queries = group.positions[:, :, None]
        if reach and group.store:  # the window's keys are read where they were stored
            return (cached & ~own) | (own & may_see(pattern, queries, slots, first, size))
        window = may_see(pattern, queries, group.positions[:, None], first, size)
        window &= self._inside(group)[:, None]  # padding is nobody's to see
        return torch.cat(((cached & ~own).expand(-1, window.shape[1], -1), window), 2)


def _sees_all_cached(group: Group, pattern: str, reach: int) -> bool:
    """Whether every query sees each of the ``reach`` cached slots and all of its window, so that no mask is needed."""
    forwards = group.forwards
    if group.padded or any(f.context.start for f in forwards):
        return False
    if any(f.context.stop < f.window.start if group.store else f.context.stop > f.window.start for f in forwards):
        return False  # a gap before the window, or its own outdated keys
    ends = {max(f.context.stop, f.window.stop) if group.store else f.context.stop for f in forwards}
    return ends == {reach} and (pattern == "full" or group.ids.shape[1] == 1)
