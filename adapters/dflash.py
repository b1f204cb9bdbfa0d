"""DFlash's drafter: one forward drafts a block of tokens from what a target model's layers hold (arXiv 2602.06036).

The features, hidden states of some layers of the target, are fused into one vector a position that enters every layer
of the drafter as a key and a value. The block's own keys are never kept, so after a rejection nothing is to be undone.

Shapes: B rows of a group, C context positions, W slots of the block (slot 0 holds the last token known), K keys,
F tapped layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from adapters import attention
from adapters.attention import Visibility
from adapters.base import DeviceAdapter, Group, Request
from adapters.cache import KeyValueStore
from adapters.checkpoints.filling import fill, plan
from adapters.checkpoints.reading import stored_tensors
from adapters.checks import CheckedStore
from adapters.draft_config import DraftConfig, facts_of_drafter, read_draft_config, refuse_foreign_target
from adapters.sliding import within
from adapters.tensors import Piece
from adapters.transformer import TransformerAdapter
from adapters.visibility import Lines, visibility
from samplers import Forward


class DFlashNetwork(nn.Module):
    """The layers of a drafter. Their names are the published ones, so its tensors need no rules."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        native = config.native
        native._attn_implementation = attention.NAME
        self.fc = nn.Linear(len(config.target_layers) * native.hidden_size, native.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(native.hidden_size, native.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(native, i) for i in range(native.num_hidden_layers))
        for layer in self.layers:
            own: Any = layer.self_attn
            own.sliding_window = None  # what a layer sees is said by its visibility
        self.norm = Qwen3RMSNorm(native.hidden_size, native.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(native)

    def remember(self, features: torch.Tensor, positions: torch.Tensor, store: KeyValueStore) -> None:
        """Put the keys and values of features (B, C, F·D) at ``positions`` (B, C) into the store, which is aimed."""
        fused = self.hidden_norm(self.fc(features))
        cosine, sine = self.rotary_emb(fused, positions)
        for number, layer in enumerate(self.layers):
            own: Any = layer.self_attn
            shape = (*fused.shape[:-1], -1, own.head_dim)
            keys = own.k_norm(own.k_proj(fused).view(shape)).transpose(1, 2)  # not through the layer's input norm
            keys, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
            store.update(keys, own.v_proj(fused).view(shape).transpose(1, 2), number)

    def forward(
        self, block: torch.Tensor, positions: torch.Tensor, store: KeyValueStore, visibilities: Sequence[Visibility]
    ) -> torch.Tensor:
        """Last hidden states of embedded slots (B, W, D), which see the cached context and one another."""
        hidden, rotary = block, self.rotary_emb(block, positions)
        for layer, seen in zip(self.layers, visibilities, strict=True):
            hidden = layer(hidden, position_embeddings=rotary, cache=store, visibility=seen)
        return self.norm(hidden)


class DFlashDrafter(DeviceAdapter):
    """A drafter beside its target, which lends embedding and head; holds the context's keys of all rows in flight.

    A block is a forward whose window starts with the last known token, masks behind it, and whose context is all before
    it, given to `remember` earlier. It stores nothing.
    """

    def __init__(self, network: DFlashNetwork, config: DraftConfig, target: TransformerAdapter) -> None:
        refuse_foreign_target(config, target.model.config, target.facts.vocab_size)
        facts = facts_of_drafter(config.stated, target.facts)
        super().__init__(facts, target.codec, target.device)
        self.network, self.config, self.target = network.eval(), config, target
        self.embedding = target.model.get_input_embeddings()
        self.store: KeyValueStore = KeyValueStore(0, 0)

    def open(self, rows: int, slots: int) -> None:
        super().open(rows, slots)
        self.store = CheckedStore(rows, slots) if self.checks else KeyValueStore(rows, slots)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        super().place(row, tokens, stream)
        self.store.forget(row)

    @torch.inference_mode()
    def remember(self, spans: Mapping[int, range], features: torch.Tensor) -> None:
        """Take in the target's features (B, C, F·D) of context slots, by ascending row; C is the longest span.

        A slot given again is overwritten.
        """
        assert list(spans) == sorted(spans)
        group = self._group([Request(row, Forward(span, store=span), [], []) for row, span in spans.items()])
        self.store.aim(group)
        self.network.remember(features, group.positions, self.store)
        self.store.settle()

    def hidden(self, group: Group) -> torch.Tensor:
        """Raises: ValueError: if a block has no context."""
        if not group.cached:
            raise ValueError("a drafter drafts from its target's features: give it a context first")
        self.store.aim(group)
        embedded = nn.functional.embedding(group.ids, self.embedding.weight) * self.config.embedding_scale
        hidden = self.network(embedded, group.positions, self.store, self._visibilities(group))
        self.store.settle()
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's head, then the drafter's own scale and cap."""
        logits = self.target.head(hidden) * self.config.logits_scale
        cap = self.config.logits_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _visibilities(self, group: Group) -> list[Visibility]:
        """One a layer; layers of a kind share theirs."""
        kinds = list(zip(self.config.causal, self.config.windows, strict=True))
        made = {kind: self._visibility(group, *kind) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def _visibility(self, group: Group, causal: bool, window: int | None) -> Visibility:
        if window is not None:
            return within(window, causal, group)
        lines = Lines(group.lines, self.store.rows, self.store.slots + 1)
        return visibility(group, "causal" if causal else "full", lines, self.target.packs)


def build_drafter(config: DraftConfig, dtype: torch.dtype, device: torch.device) -> DFlashNetwork:
    """The network with undefined weights; on ``meta`` it takes no memory."""
    attention.register()
    with no_init_weights(), local_torch_dtype(dtype), torch.device(device):
        return DFlashNetwork(config)


def check_drafter(folder: Path) -> int:
    """Hold names and shapes in the files' headers against the network; no weight is read. Returns how many there are.

    Raises:
        ValueError: as `load_drafter`.
    """
    network = build_drafter(read_draft_config(folder), torch.float32, torch.device("meta"))
    return len(plan(network, stored_tensors(folder).shapes(), lambda name: [Piece(name)], folder))


def load_drafter(folder: Path, target: TransformerAdapter) -> DFlashDrafter:
    """Read a published drafter onto the device of its target, in its dtype.

    Raises:
        ValueError: one sentence, if it is no DFlash drafter, belongs to another target, or is damaged.
    """
    config = read_draft_config(folder)
    drafter = DFlashDrafter(build_drafter(config, target.model.dtype, target.device), config, target)
    fill(drafter.network, stored_tensors(folder), lambda name: [Piece(name)], folder)
    return drafter
