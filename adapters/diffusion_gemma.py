"""DiffusionGemma on its native class: an encoder stores committed tokens, a decoder denoises a canvas against them.

Both passes share their weights. A window that is stored runs through the encoder, which is causal; one that is only
read runs through the decoder, whose slots see one another and what is stored. Text only.

Shapes: B rows of a group, N wanted slots, W slots of the longest window, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DiffusionGemmaForBlockDiffusion

from adapters.attention import Visibility, attention
from adapters.base import DeviceAdapter, Group, Request
from adapters.cache import KeyValueStore
from adapters.readout import Head
from adapters.sliding import within
from adapters.text import TextCodec
from adapters.visibility import Lines, kernel_serves, visibility
from samplers import ModelFacts, Prediction

PATTERN = "canvas"  # its attention, which no other model has
BY_LAYER = "blockdiff_by_layer"
SLIDING, FULL = "sliding_attention", "full_attention"
NO_MASKS = {SLIDING: None, FULL: None}  # the network builds none of its own


def by_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    visibility: Mapping[str, Visibility] | None = None,
    **unused: Any,  # transformers hands every attention function all it has
) -> tuple[torch.Tensor, None]:
    """`adapters.attention.attention` for layers of several kinds, each of which has a visibility of its own."""
    assert visibility is not None
    kind: Any = module.layer_type
    return attention(module, query, key, value, attention_mask, scaling, visibility[kind])


class DiffusionGemmaAdapter(DeviceAdapter):
    """Runs each window through the pass that fits it.

    The decoder is conditioned on its previous logits for the row, where that forward had `carry`; a commit or a new
    sequence ends that. They take 2 bytes (bfloat16) times W times V for every row in flight.
    """

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, facts: ModelFacts, codec: TextCodec, logits_mib: int = 256
    ) -> None:
        if facts.attention != PATTERN:
            raise ValueError(f"model.attention={facts.attention} is not to be had of DiffusionGemma: leave it null")
        super().__init__(facts, codec, model.device, logits_mib)
        AttentionInterface.register(BY_LAYER, by_layer)
        self.model = model.eval()
        self.encoder, self.decoder = model.model.encoder.language_model, model.model.decoder
        text: Any = model.config.text_config
        text._attn_implementation = BY_LAYER
        self.window, self.cap = text.sliding_window, text.final_logit_softcapping
        self.packs = kernel_serves(model)
        for number, layer in enumerate(self.decoder.layers):
            layer.self_attn.append_to_cache = _into_the_store(number)
        self.store = KeyValueStore(0, 0)
        self.carried: dict[int, torch.Tensor] = {}

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.store, self.carried = KeyValueStore(rows, slots), {}

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.store.forget(row)
        self.carried.pop(row, None)

    def carry(self, row: int, logits: torch.Tensor) -> None:
        """Condition the row's next denoising pass on logits (W, V) of its canvas, tempered as they were drawn from."""
        self.carried[row] = logits

    def head_for(self, group: Group) -> Head:
        """A head that leaves a group's tempered logits with its rows, where they are to carry them."""
        head, first = super().head_for(group), group.forwards[0]
        if not first.carry:
            return head
        heard = 0
        kept = self._room(group)

        def keeping(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal heard
            logits = head(hidden)
            part = kept[heard : heard + len(hidden)]
            part.copy_(logits / (first.law.temperature or 1))
            part[:, list(first.law.banned)] = -torch.inf
            heard += len(hidden)
            return logits

        return keeping

    def _room(self, group: Group) -> torch.Tensor:
        """(N, V) to be filled, of which every row carries its part."""
        embedding = self.decoder.embed_tokens.weight
        counts = [len(forward.want) for forward in group.forwards]
        kept = embedding.new_empty(sum(counts), self.facts.vocab_size)
        for row, part in zip(group.lines, kept.split(counts), strict=True):
            self.carry(row, part)
        return kept

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        """Requests may be of both passes; each pass is one run."""
        said: dict[int, Prediction] = {}
        for stored in (True, False):
            part = [request for request in requests if (len(request.forward.store) > 0) == stored]
            if part:
                said.update(zip((request.row for request in part), super().forward(part), strict=True))
        return [said[request.row] for request in requests]

    def hidden(self, group: Group) -> torch.Tensor:
        self.store.aim(group)
        run = self._encode if group.forwards[0].store else self._decode
        hidden = run(group)
        self.store.settle()
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """In float32, softly capped."""
        logits: torch.Tensor = self.model.lm_head(hidden).float()
        return torch.tanh(logits / self.cap) * self.cap

    def _encode(self, group: Group) -> torch.Tensor:
        for row in group.lines:
            self.carried.pop(row, None)
        full = visibility(group, "causal", self._lines(group), self.packs)
        longest = max(
            forward.window.stop - min(forward.context.start, forward.window.start) for forward in group.forwards
        )
        near = full if longest <= self.window else within(self.window, True, group)
        output = self.encoder(
            input_ids=group.ids,
            position_ids=group.positions,
            attention_mask=NO_MASKS,
            cache=self.store,
            visibility={FULL: full, SLIDING: near},
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _decode(self, group: Group) -> torch.Tensor:
        full = visibility(group, "full", self._lines(group), self.packs)
        near = _nearest(group, self.window - 1)
        logits, known = self._conditioning(group)
        output = self.decoder(
            decoder_input_ids=group.ids,
            decoder_position_ids=group.positions,
            decoder_attention_mask=NO_MASKS,
            cache=self.store,
            self_conditioning_logits=logits,
            self_conditioning_mask=known,
            visibility={
                FULL: full,
                SLIDING: full if near is group else visibility(near, "full", self._lines(group), self.packs),
            },
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _conditioning(self, group: Group) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, W, V) logits and (B,) which rows have any."""
        known = [row in self.carried for row in group.lines]
        if not any(known):
            return None, None
        like = next(iter(self.carried.values()))
        logits = like.new_zeros(*group.ids.shape, like.shape[-1])
        for member, row in enumerate(group.lines):
            if known[member]:
                logits[member, : len(self.carried[row])] = self.carried[row]
        return logits, torch.tensor(known, device=self.device)

    def _lines(self, group: Group) -> Lines:
        if group.cached:
            return Lines(group.lines, self.store.rows, self.store.slots + 1)
        rows, width = group.ids.shape
        return Lines(range(rows), rows, width)


def _nearest(group: Group, count: int) -> Group:
    """The group with at most the last ``count`` slots of each context: the canvas's sliding layers see no more."""
    if all(len(forward.context) <= count for forward in group.forwards):
        return group
    last = [range(max(f.context.start, f.context.stop - count), f.context.stop) for f in group.forwards]
    forwards = [replace(forward, context=context) for forward, context in zip(group.forwards, last, strict=True)]
    begins = torch.maximum(group.contexts[:, 0], group.contexts[:, 1] - count)
    return replace(group, forwards=forwards, contexts=torch.stack((begins, group.contexts[:, 1]), 1))


def _into_the_store(layer: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """In place of the decoder's own way, which copies all cached keys in every pass."""

    def append(
        cache: KeyValueStore, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.update(key_states, value_states, layer)

    return append
