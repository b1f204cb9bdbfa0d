"""The training itself: the step, the optimisers, the checkpoints, and the folder of the finished model."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from pipeline.drafting import Drafting
from pipeline.errors import UserError
from pipeline.objective import Batch, Objective
from pipeline.prediction import Prediction
from pipeline.recipe import STEPS_AN_EPOCH, Recipe
from pipeline.runs import RunFolder


class Training(lightning.LightningModule):
    """The loop around an objective: Muon for its matrices, AdamW for the rest, one schedule for both."""

    def __init__(self, objective: Objective, recipe: Recipe, seed: int, curve: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.began, self.seconds_before = monotonic(), 0.0
        self.objective, self.recipe, self.seed, self.curve = objective, recipe, seed, curve
        self.model = objective.model

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.objective.batches(self.seed, self.current_epoch), batch_size=None)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = self.objective.matrices()
        taken = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in taken]
        return [
            torch.optim.Muon(matrices, lr=self.recipe.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=self.recipe.lr, weight_decay=0.01, betas=(0.9, 0.98)),
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.objective.loss(batch)
        if loss is None:
            return
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
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))

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


class WholeFiles(TorchCheckpointIO):
    """Replaces a checkpoint at one stroke, wherever temporary files are: it may be read or the run killed meanwhile."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        draft = Path(path).with_name(f".{Path(path).name}")
        super().save_checkpoint(checkpoint, draft, storage_options)
        os.replace(draft, path)


OBJECTIVES: dict[str, Callable[[Recipe], Objective]] = {"masked": Prediction, "causal": Prediction, "dflash": Drafting}


def begin(recipe: Recipe, seed: int, folder: Path) -> Training:
    """A training at its first step; writes nothing.

    Raises:
        UserError: if a model that it starts from, or trains for, does not fit.
    """
    lightning.seed_everything(seed, verbose=False)
    return Training(OBJECTIVES[recipe.objective](recipe), recipe, seed, folder / "loss.jsonl")


def fit(training: Training, folder: Path) -> None:
    """Train from the start, or from the folder's checkpoint, to the last step."""
    last = folder / "last.ckpt"
    bars = [RichProgressBar()] if sys.stdout.isatty() else []
    trainer = lightning.Trainer(
        default_root_dir=folder,
        devices=1,  # a step's problems are the recipe's, not as many times that as there are GPUs
        max_epochs=training.recipe.steps // STEPS_AN_EPOCH,
        callbacks=[ModelCheckpoint(folder, filename="last", enable_version_counter=False), *bars],
        plugins=[WholeFiles()],
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=STEPS_AN_EPOCH,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=bool(bars),
    )
    training.objective.describe(folder / "model")
    if not last.exists():
        training.curve.unlink(missing_ok=True)  # of a try that ended before its first checkpoint
    trainer.fit(training, ckpt_path=str(last) if last.exists() else None, weights_only=True)


def export(training: Training, folder: Path, settings: dict[str, Any]) -> None:
    """Write the model's folder and what made it."""
    training.objective.save(folder)
    record = {"seconds": round(training.seconds), "config": settings, "parameters": training.parameter_count}
    RunFolder(folder).write_json("training.json", record)
