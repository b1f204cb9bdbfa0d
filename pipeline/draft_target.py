"""The frozen target of a drafter in training, and the ``config.json`` of a drafter for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from adapters.description import Description, describe
from adapters.draft_config import spread_layers
from adapters.loading import read_network
from adapters.places import ModelOptions
from adapters.text import TokenizerCodec
from pipeline.errors import UserError
from pipeline.recipe import Recipe


def read_target(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The network in float32, without gradients.

    Raises:
        UserError: if it is no whole model, not autoregressive, of another vocabulary or hidden size.
    """
    assert recipe.target is not None
    try:
        description = describe(ModelOptions(path=recipe.target, dtype="float32"))
        _refuse_unfit(recipe, description, tokenizer)
        return read_network(description, torch.device("cpu")).eval().requires_grad_(False)
    except ValueError as error:
        right = "a folder with config.json and sound weights, or tiny/ar"
        raise UserError(f"recipe.target={recipe.target} is no model to draft for: use {right} ({error})") from error


def _refuse_unfit(recipe: Recipe, description: Description, tokenizer: PreTrainedTokenizerFast) -> None:
    codec, facts = description.codec, description.facts
    if facts.attention != "causal":
        raise UserError(
            f"recipe.target={recipe.target} is not autoregressive (its attention is {facts.attention}): use one that "
            "is, such as tiny/ar"
        )
    if not isinstance(codec, TokenizerCodec) or codec.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"recipe.target={recipe.target} has another vocabulary than the problems: use that of tiny/ar")
    if description.config["hidden_size"] != recipe.hidden_size:
        raise UserError(
            f"recipe.hidden_size={recipe.hidden_size} does not fit recipe.target={recipe.target}, whose embedding and "
            f"head the drafter borrows: use {description.config['hidden_size']}"
        )


def drafter_config(recipe: Recipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A drafter's ``config.json`` in the first published layout.

    Raises:
        UserError: if the layers to be tapped are none of the target's.
    """
    theirs: Any = target.config
    own = {
        "mask_token_id": tokenizer.mask_token_id,  # a row that no text reaches; the target lends it as it is
        "target_layer_ids": tapped_layers(recipe, theirs.num_hidden_layers),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": recipe.block_size,
        "bos_token_id": theirs.bos_token_id,
        "dflash_config": own,
        "dtype": "float32",
        "eos_token_id": theirs.eos_token_id,
        "head_dim": recipe.hidden_size // recipe.heads,
        "hidden_act": "silu",
        "hidden_size": recipe.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": recipe.intermediate_size,
        "layer_types": ["full_attention"] * recipe.layers,
        "max_position_embeddings": theirs.max_position_embeddings,
        "max_window_layers": recipe.layers,
        "model_type": "qwen3",
        "num_attention_heads": recipe.heads,
        "num_hidden_layers": recipe.layers,
        "num_key_value_heads": recipe.heads,
        "num_target_layers": theirs.num_hidden_layers,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": theirs.vocab_size,
    }


def tapped_layers(recipe: Recipe, depth: int) -> list[int]:
    """The target's layers to be tapped, of ``depth``.

    Raises:
        UserError: if they don't ascend within the target, which the published rule too can't always give.
    """
    layers = list(spread_layers(depth, recipe.layers) if recipe.taps is None else recipe.taps)
    if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < depth:
        given = f"null, by the published rule {layers}," if recipe.taps is None else layers
        raise UserError(
            f"recipe.taps={given} does not fit recipe.target={recipe.target}: "
            f"use ascending layers from 0 to {depth - 1}"
        )
    return layers
