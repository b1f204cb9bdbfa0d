"""What the ``config.json`` of a DFlash drafter says, in both its published layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.native import first_line
from adapters.tensors import Json

if TYPE_CHECKING:
    from transformers import Qwen3Config


@dataclass(frozen=True)
class DraftConfig:
    """What a drafter's ``config.json`` says.

    Attributes:
        native: its layers, which are Qwen3's.
        block_size: slots of a block, the last known token's included.
        mask_id: what the other slots hold.
        target_layers: the target's layers that are tapped, counted from 0.
        target_depth: how many layers the target has.
        causal, windows: of each layer: whether a slot sees none behind it, and how far it sees (None: everything).
        embedding_scale, logits_scale, logits_cap: applied to the rows of the target's embedding and to its logits.
    """

    native: Qwen3Config
    block_size: int
    mask_id: int
    target_layers: tuple[int, ...]
    target_depth: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    embedding_scale: float
    logits_scale: float
    logits_cap: float | None


def read_draft_config(folder: Path) -> DraftConfig:
    """Read a published drafter's ``config.json``.

    Raises:
        ValueError: one sentence, if there is none, it is of no DFlash drafter, of DFlash 2, or lacks a key.
    """
    try:
        return draft_config(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"the drafter's {folder / 'config.json'} cannot be used: {reason}") from error


def draft_config(config: Json) -> DraftConfig:
    """What ``dflash_config`` says goes before the top level.

    Raises:
        ValueError: if it is of no DFlash drafter, or of DFlash 2.
        KeyError: if a key is absent.
    """
    own: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    names = config.get("architectures") or []
    if "DFlash2DraftModel" in names or "conv_kernel_size" in own or "selector_rank" in own:
        raise ValueError("DFlash 2 (convolutions in the block, candidate selector) is not served, DFlashDraftModel is")
    if "DFlashDraftModel" not in names:
        raise ValueError(f"architectures={names} is no drafter, DFlashDraftModel is served")
    native, depth = _native(config), int(own["num_target_layers"])
    sliding, causal = [kind == "sliding_attention" for kind in native.layer_types or ()], own.get("is_causal")
    return DraftConfig(
        native=native,
        block_size=int(own["block_size"]),
        mask_id=int(own["mask_token_id"]),
        target_layers=tuple(own.get("target_layer_ids") or spread_layers(depth, native.num_hidden_layers)),
        target_depth=depth,
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        windows=tuple(_window(own) if slides else None for slides in sliding),
        embedding_scale=float(own.get("input_embedding_scale", 1.0)),
        logits_scale=float(own.get("output_multiplier", 1.0)),
        logits_cap=own.get("final_logit_softcapping"),
    )


def _window(config: Json) -> int:
    if not config.get("sliding_window"):
        raise KeyError("sliding_window")
    return int(config["sliding_window"])


def _native(config: Json) -> Qwen3Config:
    from transformers import Qwen3Config

    try:
        return Qwen3Config(**config)
    except Exception as error:  # transformers raises whatever its validators raise
        raise ValueError(f"transformers cannot read it ({first_line(error)})") from error


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """The layers that a drafter taps of a target of ``depth`` if its configuration does not list them."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))
