"""The one attention function registered with transformers: a described pattern becomes no mask or a dense mask.

Shapes: B rows, H heads, W slots of the window, K keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "blockdiff"
masks_built = 0  # dense masks since the import: tests hold the common paths to none


@dataclass(slots=True)
class Visibility:
    """What each query may see. Without a mask, everything, or everything up to itself if `causal`."""

    mask: torch.Tensor | None = None  # (B, 1, W or 1, K) bool
    causal: bool = False


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    visibility: Visibility | None = None,
    **unused: Any,  # transformers hands every attention function all it has
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention, (B, H, W, D) -> (B, W, H, D); grouped keys are shared, never expanded by hand."""
    assert visibility is not None and attention_mask is None
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visibility.mask,
        is_causal=visibility.causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


def register() -> None:
    """Make transformers know `NAME`. Without a mask function of that name it builds no mask of its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def may_see(
    pattern: str, query: torch.Tensor, key: torch.Tensor, first: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """(B, W, K) bool: which slots ``key`` (B or 1, 1, K) the slots ``query`` (B, W, 1) may see, by pattern.

    ``first`` and ``size`` (B, 1, 1) place the edges of blocks, see `samplers.Attend`.
    """
    if pattern == "full":
        return (query == key).fill_(True)
    if pattern == "causal":
        return key <= query
    return _block(key, first, size) <= _block(query, first, size)


def _block(slots: torch.Tensor, first: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Number of the block a slot lies in; all slots before ``first`` form block -1."""
    return torch.div(slots - first, size, rounding_mode="floor").clamp(min=-1)


def count_mask() -> None:
    global masks_built
    masks_built += 1
