"""Soft inputs: slots whose embedding is a mixture, for the whole group at once.

Shapes: B rows of a group, W slots of the longest window, n soft slots, k ids of a mixture, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samplers import Forward

TINY = 1e-6  # keeps a mixture that cancels out finite, as the authors have it


@dataclass(slots=True)
class SoftInputs:
    """Mixtures and where they stand."""

    member: torch.Tensor  # (n,) row of the group
    column: torch.Tensor  # (n,) column of its window
    ids: torch.Tensor  # (n, k); a mixture of fewer ids is filled up with ids of weight 0
    weights: torch.Tensor  # (n, k) float64


def pack(forwards: Sequence[Forward], device: torch.device) -> SoftInputs | None:
    """The soft inputs of a group, in one copy to the device; None if it has none."""
    entries = [(b, slot - f.window.start, soft) for b, f in enumerate(forwards) for slot, soft in f.inputs.items()]
    if not entries:
        return None
    k = max(len(soft.ids) for _, _, soft in entries)
    lines = []
    for member, column, soft in entries:
        spare = (0,) * (k - len(soft.ids))
        lines.append((member, column, *soft.ids, *spare, *soft.weights, *spare))
    packed = torch.tensor(lines, dtype=torch.float64, device=device)  # holds every id exactly
    places = packed[:, : 2 + k].long()
    return SoftInputs(places[:, 0], places[:, 1], places[:, 2:], packed[:, 2 + k :])


def embedded(ids: torch.Tensor, soft: SoftInputs, embedding: torch.nn.Module, mask_id: int) -> torch.Tensor:
    """Embeddings of ``ids``, (B, W) -> (B, W, D), with the mixtures in their places."""
    hard: torch.Tensor = embedding(ids)
    mask = embedding(torch.full_like(soft.member[:1], mask_id))[0]
    hard[soft.member, soft.column] = mixed(embedding(soft.ids), soft.weights, mask)
    return hard


def mixed(parts: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mixtures as long as their parts are on average (DMax, arXiv 2604.08302), in the parts' dtype.

    The weight that is missing to 1 is the mask's. Norms are taken in the dtype of the embeddings and products in
    float32 or better, as in the authors' code.

    parts (n, k, D), weights (n, k), mask (D,) -> (n, D).
    """
    weights = weights.to(torch.promote_types(parts.dtype, torch.float32))[..., None]
    rest = (1 - weights.sum(1)).clamp(min=0)
    mixture = (weights * parts).sum(1) + rest * mask
    length = (weights * parts.norm(dim=-1, keepdim=True)).sum(1) + rest * mask.norm()
    return (mixture * (length / (mixture.norm(dim=-1, keepdim=True) + TINY))).to(parts.dtype)
