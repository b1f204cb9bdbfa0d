"""The networks that are trained: their native classes, their first weights, and their families' configurations.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adapters.description import describe
from adapters.loading import read_network
from adapters.places import ModelOptions
from pipeline.errors import UserError
from pipeline.recipe import Recipe

ARCHITECTURES: dict[str, tuple[Any, Any]] = {  # classes of configuration and network
    "llama": (LlamaConfig, LlamaForCausalLM),
    "dream": (Qwen2Config, Qwen2ForCausalLM),  # q, k and v with bias
    "sdar": (Qwen3Config, Qwen3ForCausalLM),  # q and k normed, head by head
}
# what published configurations say in the native one's words
KEPT = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range"),
    *("intermediate_size", "mask_token_id", "max_position_embeddings", "max_window_layers", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"),
)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A native network; ``is_causal=False`` in its configuration makes the attention full where no mask is given."""
    masked = recipe.objective == "masked"
    config_class, model_class = ARCHITECTURES[recipe.family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    config.is_causal = not masked
    if masked:
        config.mask_token_id = tokenizer.mask_token_id
    model = model_class(config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = not masked
    return model


def take_over(model: PreTrainedModel, start: str) -> None:
    """Copy another model's tensors of equal native name; the others (biases, norms of heads) stay neutral.

    Raises:
        UserError: if it is no whole model, or a tensor has another shape or no place here.
    """
    try:
        tensors = read_network(describe(ModelOptions(path=start)), torch.device("cpu")).state_dict()
    except ValueError as error:
        right = "a folder with config.json and sound weights, or null for a start from scratch"
        raise UserError(f"recipe.start={start} is no model to start from: use {right} ({error})") from error
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            here = list(own[name].shape) if name in own else "not there"
            raise UserError(f"recipe.start={start} does not fit: its {name} is {list(tensor.shape)}, here {here}")
    model.load_state_dict(tensors, strict=False)


def noisy_sees_clean(length: int, size: int) -> torch.Tensor:
    """(2 T, 2 T) bool for a noisy sequence of T tokens and then the clean one: which key (column) a query may see.

    A noisy block sees itself and the clean blocks before it; a clean one itself and the clean ones before it. So every
    block learns at once, as if all before it were decided (BD3-LM, arXiv 2503.09573).
    """
    block = torch.arange(length) // size
    query, key = block[:, None], block[None]
    noisy = torch.cat((query == key, key < query), 1)
    clean = torch.cat((torch.zeros(length, length, dtype=torch.bool), key <= query), 1)
    return torch.cat((noisy, clean))


def published_config(recipe: Recipe, config: PreTrainedConfig) -> dict[str, Any] | None:
    """The ``config.json`` of the family's checkpoints; None where the native one serves."""
    if recipe.family == "llama":
        return None
    native = config.to_dict()
    common = {key: native[key] for key in KEPT} | {
        "rope_scaling": None,
        "rope_theta": native["rope_parameters"]["rope_theta"],
        "sliding_window": None,
        "torch_dtype": "float32",
        "transformers_version": native["transformers_version"],
        "use_cache": False,
        "use_sliding_window": False,
    }
    if recipe.family == "dream":
        own = {"architectures": ["DreamModel"], "model_type": "Dream", "pad_token_id": native["pad_token_id"]}
    else:
        own = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": recipe.block_size}
        own |= {"attention_bias": False, "fuse_cross_entropy": True, "head_dim": native["head_dim"]}
    return dict(sorted((common | own).items()))
