"""Training a DFlash drafter beside its frozen target (arXiv 2602.06036, section 4.2).

One clean pass of the target over prompt and answer gives the features. Blocks [anchor, mask, …] at sampled places of
the answer then learn the target's own tokens, all at once, slot k the token at the anchor's position + k.

Shapes: B rows, T tokens of a sequence, A anchors of a row, W slots of a block, F tapped layers, D hidden size.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from adapters.attention import Visibility
from adapters.dflash import build_drafter
from adapters.draft_config import draft_config
from adapters.taps import features, tapped
from pipeline.batches import sequences
from pipeline.data.arithmetic import words
from pipeline.draft_target import drafter_config, read_target
from pipeline.errors import UserError
from pipeline.objective import Batch, Objective
from pipeline.recipe import GAMMAS, STEPS_AN_EPOCH, Recipe
from pipeline.runs import RunFolder
from pipeline.tokenizer import build_tokenizer

LEAST_OWN = 0.5  # share of the answers' tokens that the target's greedy decoding would say itself


class DraftBatches(Dataset[Batch]):
    """An item is (ids, learnt, anchors, drawn): sequences (B, T), the answers' tokens in them, first end tokens
    included, and slots (B, A) drawn from those, without repetition and as far as a learnt token follows them."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> None:
        self.recipe, self.tokenizer, self.seed, self.epoch = recipe, tokenizer, seed, epoch

    def __len__(self) -> int:
        return STEPS_AN_EPOCH

    def __getitem__(self, index: int) -> Batch:
        assert self.recipe.anchors is not None
        rng = random.Random(f"{self.seed}-{self.epoch}-{index}")
        ids, answered, ended = sequences(self.recipe, self.tokenizer, rng)
        learnt = answered & ~ended
        followed = learnt[:, :-1] & learnt[:, 1:]
        noise = torch.rand(followed.shape, generator=torch.Generator().manual_seed(rng.getrandbits(63)))
        drawn, anchors = (noise + followed).topk(min(self.recipe.anchors, followed.shape[1]))
        return ids, learnt, anchors, drawn >= 1


class Drafting(Objective):
    """Cross-entropy on the slots behind the anchors, weighted down with their distance.

    Raises:
        UserError: if the target does not fit, or does not say the problems' answers.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.block_size is not None
        self.recipe, self.size = recipe, recipe.block_size
        self.tokenizer: PreTrainedTokenizerFast = build_tokenizer(words())
        self.target: Any = read_target(recipe, self.tokenizer)
        self.published = drafter_config(recipe, self.target, self.tokenizer)
        self.config = draft_config(self.published)
        self.model = build_drafter(self.config, torch.float32, torch.device("cpu"))
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.published["initializer_range"])
        self.weights = slot_weights(self.size, recipe.gamma or GAMMAS[self.size])
        self._refuse_stranger()

    def batches(self, seed: int, epoch: int) -> DraftBatches:
        return DraftBatches(self.recipe, self.tokenizer, seed, epoch)

    def loss(self, batch: Batch) -> torch.Tensor | None:
        ids, learnt, anchors, drawn = batch
        caught, own = self.clean_pass(ids, learnt)
        labels, weights = self.labels(ids, own, anchors, drawn)
        wanted = weights > 0
        if not wanted.any():
            return None
        logits = self.target.get_output_embeddings()(self.hidden(ids, caught, anchors)[wanted])
        losses = nn.functional.cross_entropy(logits, labels[wanted], reduction="none")
        return (weights[wanted] * losses).sum() / weights.sum()

    @torch.no_grad()
    def clean_pass(self, ids: torch.Tensor, learnt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's features (B, T, F·D), and which learnt tokens (B, T) its greedy decoding would say itself: those
        before the first that it would not."""
        self.target.to(ids.device)
        body, head = self.target.base_model, self.target.get_output_embeddings()
        with tapped(body, self.config.target_layers) as caught:
            output = body(input_ids=ids, use_cache=False, visibility=Visibility(causal=True))
        said, asked = torch.ones_like(learnt), learnt[:, 1:]
        said[:, 1:][asked] = head(output.last_hidden_state[:, :-1][asked]).argmax(-1) == ids[:, 1:][asked]
        return features(caught, self.config.target_layers), learnt & said.cumprod(1).bool()

    def labels(
        self, ids: torch.Tensor, own: torch.Tensor, anchors: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each slot (B, A, W) is to say, and its weight: 0 for anchors and where nothing is to be learnt."""
        slots = anchors[..., None] + torch.arange(self.size, device=ids.device)
        inside = slots < ids.shape[1]
        flat = slots.clamp(max=ids.shape[1] - 1).flatten(1)
        labels, known = (held.gather(1, flat).view(slots.shape) for held in (ids, own))
        return labels, self.weights.to(ids.device) * (known & inside & drawn[..., None])

    def hidden(self, ids: torch.Tensor, caught: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Last hidden states (B, A, W, D) of the blocks behind ``anchors``, given the features of all slots."""
        rows, length = ids.shape
        blocks = ids.new_full((*anchors.shape, self.size), self.config.mask_id)
        blocks[..., 0] = ids.gather(1, anchors)
        positions = anchors[..., None] + torch.arange(self.size, device=ids.device)
        seen = Visibility(mask=blocks_see(anchors, length, self.size)[:, None])
        context: Any = Context()
        self.model.remember(caught, torch.arange(length, device=ids.device).expand(rows, -1), context)
        embedded = self.target.get_input_embeddings()(blocks.flatten(1))
        hidden = self.model(embedded, positions.flatten(1), context, [seen] * len(self.model.layers))
        return hidden.unflatten(1, (*anchors.shape[1:], self.size))

    def _refuse_stranger(self) -> None:
        """The answers must be the target's: of others it would leave nothing to learn."""
        ids, learnt, *_ = self.batches(0, 0)[0]
        share = float(self.clean_pass(ids, learnt)[1].sum() / learnt.sum())
        if share < LEAST_OWN:
            raise UserError(
                f"recipe.target={self.recipe.target} says {share:.0%} of the problems' answers itself: "
                "use a model that was trained on them, such as tiny/ar"
            )

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.ndim == 2]

    def describe(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        RunFolder(folder).write_json("config.json", self.published)

    def save(self, folder: Path) -> None:
        """A published drafter's folder: its own tensors alone, since the target lends embedding and head."""
        self.describe(folder)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Context:
    """Stands for a drafter's store while it learns: each layer sees the context's keys and values, then the blocks'."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, …, D) of the context, which come first, or of the blocks."""
        if layer not in self.layers:
            self.layers[layer] = keys, values
            return keys, values
        context = self.layers[layer]
        return torch.cat((context[0], keys), 2), torch.cat((context[1], values), 2)


def blocks_see(anchors: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """(B, A·W, T + A·W) bool for a context of T slots and then all blocks: which key (column) a query may see.

    The context strictly before the anchor, whose features are not known yet when it is drafted from; its own block.
    """
    count = anchors.shape[1]
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = torch.eye(count, dtype=torch.bool, device=anchors.device).repeat_interleave(size, 1)
    return torch.cat((before, own.expand(len(anchors), -1, -1)), 2).repeat_interleave(size, 1)


def slot_weights(size: int, gamma: float) -> torch.Tensor:
    """(W,): exp(-(k - 1) / gamma) for slot k, 0 for the anchor's."""
    weights = torch.exp(-(torch.arange(size) - 1) / gamma)
    weights[0] = 0
    return weights
