"""What a training needs to know of what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

Batch = tuple[torch.Tensor, ...]


class Objective(ABC):
    """What is trained, on what, and what is written in the end; `pipeline.training` is the loop around it.

    Attributes:
        model: the network whose weights are trained and kept in checkpoints.
    """

    model: Any

    @abstractmethod
    def batches(self, seed: int, epoch: int) -> Dataset[Batch]:
        """The steps of an epoch; each depends only on (seed, epoch, its number), so resuming changes nothing."""

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor | None:
        """Of a step; None where it has nothing to learn."""

    @abstractmethod
    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains; AdamW trains the other parameters."""

    @abstractmethod
    def describe(self, folder: Path) -> None:
        """Write what is known before the weights are."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained model's folder."""
