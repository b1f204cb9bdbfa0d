"""The training itself: what a step sees, the network, the optimisers, and the folder of the finished model."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from pipeline.data.arithmetic import LEVELS, Problem, make_problem, words
from pipeline.errors import UserError
from pipeline.recipe import STEPS_AN_EPOCH, Recipe
from pipeline.runs import RunFolder
from pipeline.tokenizer import build_tokenizer

SHORTEST_CANVAS, LONGEST_CANVAS = 26, 38  # the longest answer (four operations) takes 25 tokens and its end token
IGNORE = -100  # cross-entropy skips targets of this value


class Batches(Dataset):
    """Fresh problems for every step. Item ``i`` depends only on (seed, epoch, i), so resuming changes nothing.

    An item is (inputs, targets), both (B, T): the chat prompt, the answer, and end tokens up to a common length;
    targets are ``IGNORE`` wherever nothing is to be learnt.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> None:
        self.recipe, self.tokenizer, self.seed, self.epoch = recipe, tokenizer, seed, epoch

    def __len__(self) -> int:
        return STEPS_AN_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}-{self.epoch}-{index}")
        problems = [self._problem(rng) for _ in range(self.recipe.batch_size)]
        chats = [[{"role": "user", "content": p.question}] for p in problems]
        prompts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        answers = self.tokenizer([p.answer for p in problems]).input_ids
        canvas = rng.randint(SHORTEST_CANVAS, LONGEST_CANVAS)
        ids = torch.full((len(problems), max(map(len, prompts)) + canvas), self.tokenizer.eos_token_id)
        answered = torch.zeros_like(ids, dtype=torch.bool)
        ended = torch.zeros_like(answered)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            answered[row, len(prompt) :] = True
            ended[row, end + 1 :] = True
        if self.recipe.objective == "causal":
            return self._causal(ids, answered & ~ended)
        return self._masked(ids, answered, torch.Generator().manual_seed(rng.getrandbits(63)))

    def _problem(self, rng: random.Random) -> Problem:
        while True:
            problem = make_problem(rng.choices(LEVELS, self.recipe.level_weights)[0], rng)
            if problem.split == "train":
                return problem

    def _causal(self, ids: torch.Tensor, learnt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row predicts the next token of the answer, its first end token included."""
        return ids[:, :-1], ids.masked_fill(~learnt, IGNORE)[:, 1:]

    def _masked(
        self, ids: torch.Tensor, answered: torch.Tensor, noise: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each answer token (filler end tokens too, as LLaDA does) is masked with its row's probability t ~ U(0, 1)."""
        t = torch.rand(ids.shape[0], 1, generator=noise)
        masked = answered & (torch.rand(ids.shape, generator=noise) < t)
        inputs = ids.masked_fill(masked, self.tokenizer.mask_token_id)
        return inputs, ids.masked_fill(~masked, IGNORE)


class Training(lightning.LightningModule):
    """Cross-entropy on the wanted tokens; Muon for the layers' matrices, AdamW for the rest, one schedule for both."""

    def __init__(self, recipe: Recipe, seed: int, tokenizer: PreTrainedTokenizerFast, curve: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.began, self.seconds_before = monotonic(), 0.0
        self.recipe, self.seed, self.tokenizer, self.curve = recipe, seed, tokenizer, curve
        self.model = build_model(recipe, tokenizer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.recipe, self.tokenizer, self.seed, self.current_epoch), batch_size=None)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        taken = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in taken]
        return [
            torch.optim.Muon(matrices, lr=self.recipe.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=self.recipe.lr, weight_decay=0.01, betas=(0.9, 0.98)),
        ]

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        wanted = targets != IGNORE
        if not wanted.any():  # few rows may have no masked token: nothing to learn, and the mean would be no number
            return
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        loss = nn.functional.cross_entropy(self.model.lm_head(hidden[wanted]), targets[wanted])
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = learning_rate_scale(self.current_epoch * STEPS_AN_EPOCH + batch_idx, self.recipe)
        for optimizer, rate in zip(optimizers, (self.recipe.matrix_lr, self.recipe.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(inputs))

    def on_train_epoch_end(self) -> None:
        step, loss = (self.current_epoch + 1) * STEPS_AN_EPOCH, float(self.trainer.callback_metrics["loss_epoch"])
        if not math.isfinite(loss):
            rates = f"recipe.matrix_lr={self.recipe.matrix_lr} and recipe.lr={self.recipe.lr}"
            raise UserError(f"{rates}: the loss is {loss} at step {step}, use smaller ones and another run=")
        with self.curve.open("a") as file:
            file.write(json.dumps({"step": step, "loss": round(loss, 5)}) + "\n")

    @property
    def seconds(self) -> float:
        """Spent so far, stretches before an interruption included, but not what was lost after their checkpoints."""
        return self.seconds_before + monotonic() - self.began

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over its time, and cut off the curve what was written after it."""
        self.seconds_before = checkpoint["seconds"]
        lines = self.curve.read_text().splitlines(keepends=True) if self.curve.exists() else []
        self.curve.write_text("".join(lines[: checkpoint["epoch"] + 1]))

    def on_train_start(self) -> None:
        recipe, start = self.recipe, self.current_epoch * STEPS_AN_EPOCH
        print(
            f"recipe {recipe.name}: {self.parameter_count:,} parameters, {recipe.steps} steps of {recipe.batch_size} "
            f"problems{f', from step {start} on' if start else ''} → {self.curve.parent}",
            flush=True,
        )

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def learning_rate_scale(step: int, recipe: Recipe) -> float:
    """Linear warm-up, a plateau, then a linear fall to zero over the last ``decay`` share of the steps."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    return min(warm, (recipe.steps - step) / (recipe.steps * recipe.decay))


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A native Llama network; ``is_causal=False`` in its configuration makes the attention full."""
    masked = recipe.objective == "masked"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    config.is_causal = not masked
    if masked:
        config.mask_token_id = tokenizer.mask_token_id
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = not masked
    return model


class WholeFiles(TorchCheckpointIO):
    """Replaces a checkpoint at one stroke, wherever temporary files are: it may be read or the run killed meanwhile."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        draft = Path(path).with_name(f".{Path(path).name}")
        super().save_checkpoint(checkpoint, draft, storage_options)
        os.replace(draft, path)


def fit(recipe: Recipe, seed: int, folder: Path) -> Training:
    """Train from the start, or from the folder's checkpoint, to the last step."""
    logging.disable_progress_bar()  # of transformers, for writing a single file
    lightning.seed_everything(seed, verbose=False)
    training = Training(recipe, seed, build_tokenizer(words()), folder / "loss.jsonl")
    last = folder / "last.ckpt"
    bars = [RichProgressBar()] if sys.stdout.isatty() else []
    trainer = lightning.Trainer(
        default_root_dir=folder,
        devices=1,  # a step's problems are the recipe's, not as many times that as there are GPUs
        max_epochs=recipe.steps // STEPS_AN_EPOCH,
        callbacks=[ModelCheckpoint(folder, filename="last", enable_version_counter=False), *bars],
        plugins=[WholeFiles()],
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=STEPS_AN_EPOCH,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=bool(bars),
    )
    save_description(training, folder / "model")
    if not last.exists():
        training.curve.unlink(missing_ok=True)  # of a try that ended before its first checkpoint
    trainer.fit(training, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    return training


def save_description(training: Training, folder: Path) -> None:
    """Configuration and tokenizer, so that ``model.path=…/last.ckpt`` decodes while the training goes on."""
    training.model.config.save_pretrained(folder)
    training.model.generation_config.save_pretrained(folder)
    training.tokenizer.save_pretrained(folder)


def export(training: Training, folder: Path, settings: dict[str, Any]) -> None:
    """Write an ordinary model folder (safetensors, configuration, tokenizer) and what made it."""
    training.model.save_pretrained(folder)
    record = {"seconds": round(training.seconds), "config": settings, "parameters": training.parameter_count}
    RunFolder(folder).write_json("training.json", record)
