"""What the ``config.json`` of a DFlash drafter says, in both its published layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.tensors import Json
from samplers import ModelFacts

if TYPE_CHECKING:
    from transformers import Qwen3Config


@dataclass(frozen=True)
class DraftConfig:
    """What a drafter's ``config.json`` says.

    Attributes:
        stated: the file's content.
        native: its layers, which are Qwen3's.
        block_size: slots of a block, the last known token's included.
        mask_id: what the other slots hold.
        target_layers: the target's layers that are tapped, counted from 0.
        target_depth: how many layers the target has.
        causal, windows: of each layer: whether a slot sees none behind it, and how far it sees (None: everything).
        embedding_scale, logits_scale, logits_cap: applied to the rows of the target's embedding and to its logits.
    """

    stated: Json
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
    except (OSError, TypeError, ValueError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"the drafter's {folder / 'config.json'} cannot be used: {reason}") from error


def draft_config(config: Json) -> DraftConfig:
    """What ``dflash_config`` says goes before the top level.

    Raises:
        ValueError: if it is of no DFlash drafter, or of DFlash 2.
        KeyError: if a key is absent.
    """
    own = _own(config)
    native, depth = _native(config), int(own["num_target_layers"])
    sliding, causal = [kind == "sliding_attention" for kind in native.layer_types or ()], own.get("is_causal")
    return DraftConfig(
        stated=config,
        native=native,
        block_size=int(own["block_size"]),
        mask_id=int(own["mask_token_id"]),
        target_layers=tapped_layers(config),
        target_depth=depth,
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        windows=tuple(_window(own) if slides else None for slides in sliding),
        embedding_scale=float(own.get("input_embedding_scale", 1.0)),
        logits_scale=float(own.get("output_multiplier", 1.0)),
        logits_cap=own.get("final_logit_softcapping"),
    )


def _own(config: Json) -> dict[str, Any]:
    """What a drafter's configuration says, whichever place it says it in."""
    own: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    names = config.get("architectures") or []
    if "DFlash2DraftModel" in names or "conv_kernel_size" in own or "selector_rank" in own:
        raise ValueError("DFlash 2 (convolutions in the block, candidate selector) is not served, DFlashDraftModel is")
    if "DFlashDraftModel" not in names:
        raise ValueError(f"architectures={names} is no drafter, DFlashDraftModel is served")
    return own


def is_dflash(config: Json) -> bool:
    """Whether a ``config.json`` is of a DFlash drafter, of either version."""
    return any(str(name).startswith("DFlash") for name in config.get("architectures") or [])


def facts_of_drafter(config: Json, target: ModelFacts) -> ModelFacts:
    """What concerns a sampler of a drafter beside its target, whose vocabulary it shares.

    Raises:
        ValueError: if the configuration is of no drafter that is served.
        KeyError: if a key is absent.
    """
    own = _own(config)
    return replace(
        target,
        mask_id=int(own["mask_token_id"]),
        shift=0,
        attention="full",
        attentions=frozenset({"full"}),
        block_origin="prompt",
        trained_block=int(own["block_size"]),
        max_positions=config.get("max_position_embeddings"),
        draft=None,
    )


def refuse_foreign_target(config: DraftConfig, target: Any, vocab_size: int) -> None:
    """Refuse a target whose layers this drafter was not trained on, or whose ids it does not speak.

    Args:
        target: its native configuration.

    Raises:
        ValueError: one sentence.
    """
    stated = {**config.stated, "hidden_size": config.native.hidden_size}
    refuse_foreign_sizes(stated, target.num_hidden_layers, target.hidden_size, vocab_size)


def refuse_foreign_sizes(config: Json, depth: int, hidden: int, vocab_size: int) -> None:
    """As `refuse_foreign_target`, by a target's layers, width and ids.

    Raises:
        ValueError: one sentence.
        KeyError: if a key is absent.
    """
    own = _own(config)
    for name, got, wanted in (
        ("num_hidden_layers", depth, int(own["num_target_layers"])),
        ("hidden_size", hidden, own["hidden_size"]),
        ("vocab_size", vocab_size, own.get("vocab_size") or vocab_size),  # its ids are the target's, stated or not
    ):
        if got != wanted:
            raise ValueError(f"this drafter belongs to a target of {name}={wanted}, but the target given has {got}")
    taps = tapped_layers(config)
    if strange := [layer for layer in taps if not (isinstance(layer, int) and 0 <= layer < depth)]:
        raise ValueError(
            f"the drafter's target_layer_ids={list(taps)} name {strange[0]}, which is no layer of its target: "
            f"they go from 0 to {depth - 1}"
        )
    if not 0 <= int(own["mask_token_id"]) < vocab_size:
        raise ValueError(f"the drafter's mask_token_id={own['mask_token_id']} is no id of its target")


def _window(config: Json) -> int:
    if not config.get("sliding_window"):
        raise KeyError("sliding_window")
    return int(config["sliding_window"])


def _native(config: Json) -> Qwen3Config:
    from transformers import Qwen3Config

    from adapters.native import first_line

    try:
        return Qwen3Config(**config)
    except Exception as error:  # transformers raises whatever its validators raise
        raise ValueError(f"transformers cannot read it ({first_line(error)})") from error


def tapped_layers(config: Json) -> tuple[int, ...]:
    """The target's layers that a DFlash drafter is fed by, counted from 0.

    Raises:
        ValueError: if it is of no DFlash drafter, or of DFlash 2.
        KeyError: if a key is absent.
    """
    own = _own(config)
    told = own.get("target_layer_ids") or spread_layers(int(own["num_target_layers"]), int(own["num_hidden_layers"]))
    return tuple(told)


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """The layers that a drafter taps of a target of ``depth`` if its configuration does not list them."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))
