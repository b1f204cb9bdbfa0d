"""Training a network to predict tokens of answers: masked ones (diffusion) or the next one.

Shapes: B rows, T tokens of a sequence, D hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from pipeline.batches import IGNORE, Batches
from pipeline.data.arithmetic import words
from pipeline.network import build_model, noisy_sees_clean, published_config, take_over
from pipeline.objective import Batch, Objective
from pipeline.recipe import Recipe
from pipeline.runs import RunFolder
from pipeline.tokenizer import build_tokenizer


class Prediction(Objective):
    """Cross-entropy on the wanted tokens.

    Raises:
        UserError: if the weights to start from do not fit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer: PreTrainedTokenizerFast = build_tokenizer(words())
        self.model = build_model(recipe, self.tokenizer)
        if recipe.start is not None:
            take_over(self.model, recipe.start)

    def batches(self, seed: int, epoch: int) -> Batches:
        return Batches(self.recipe, self.tokenizer, seed, epoch)

    def loss(self, batch: Batch) -> torch.Tensor | None:
        inputs, targets = batch
        wanted = targets != IGNORE
        if not wanted.any():  # few rows may have no masked token, and the mean would be no number
            return None
        return nn.functional.cross_entropy(self.model.lm_head(self.hidden(inputs)[wanted]), targets[wanted])

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """Last hidden states of a step's inputs, (B, T, D), or (B, 2 T, D): both halves have positions 0 to T - 1."""
        if self.recipe.block_size is None:
            return self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        mask = noisy_sees_clean(inputs.shape[1] // 2, self.recipe.block_size)[None, None].to(inputs.device)
        positions = torch.arange(inputs.shape[1] // 2, device=inputs.device).repeat(2)[None]
        return self.model.model(inputs, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.model.model.layers.parameters() if p.ndim == 2]

    def describe(self, folder: Path) -> None:
        """Configuration and tokenizer, so that ``model.path=…/last.ckpt`` decodes while the training goes on."""
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self._publish(folder)

    def save(self, folder: Path) -> None:
        """An ordinary model folder: safetensors, configuration, tokenizer."""
        logging.disable_progress_bar()  # of transformers, for writing a single file
        self.model.save_pretrained(folder)
        self._publish(folder)

    def _publish(self, folder: Path) -> None:
        """Put the family's own configuration in the native one's place; the tensors' names are the same."""
        if (config := published_config(self.recipe, self.model.config)) is not None:
            RunFolder(folder).write_json("config.json", config)
