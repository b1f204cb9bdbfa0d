"""What the keys of a published configuration may hold: one table for all that read one, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

MOST_LAYERS = 1000  # far above any network; a number that was mistyped would otherwise build for minutes
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = (  # those that transformers knows by name
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)


@dataclass(frozen=True)
class Kind:
    """Values of one kind: whether a value is one, and what to tell who gives another."""

    holds: Callable[[Any], bool]
    right: str


def is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _lists(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(holds(one) for one in value)


COUNT = Kind(lambda value: is_whole(value, 1), "a whole number from 1 up")
COUNT_OR_NONE = Kind(is_whole, "a whole number from 0 up")
LAYERS = Kind(lambda value: is_whole(value, 1) and value <= MOST_LAYERS, f"a whole number from 1 up to {MOST_LAYERS}")
POSITIVE = Kind(lambda value: is_number(value) and value > 0, "a number above 0")
SHARE = Kind(lambda value: is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
INDICES = Kind(_lists(is_whole), "a list of whole numbers from 0 up")
IDS = Kind(lambda value: is_whole(value) or INDICES.holds(value), "an id or a list of ids, whole numbers from 0 up")
TEXT = Kind(lambda value: isinstance(value, str), "a name")
NAMES = Kind(_lists(TEXT.holds), "a list of names")
OBJECT = Kind(lambda value: isinstance(value, Mapping), "an object")
DTYPE = Kind(lambda value: value in DTYPES, "float32, bfloat16 or float16")
ACTIVATION = Kind(
    lambda value: isinstance(value, str) and value in ACTIVATIONS, "an activation of transformers, such as silu"
)

NAMING: dict[str, Kind] = {"model_type": TEXT, "architectures": NAMES, "text_config": OBJECT}
COMMON: dict[str, Kind] = {  # what is read of any model
    **NAMING,
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPE),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("vocab_size", "embedding_size", "max_position_embeddings", "max_sequence_length"), COUNT),
    **{"quantization_config": OBJECT, "hidden_act": ACTIVATION, "mask_token_id": COUNT_OR_NONE, "eos_token_id": IDS},
    **{"sliding_window": COUNT_OR_NONE, "canvas_length": COUNT, "token_ids": OBJECT},
}
_COUNTS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("d_model", "n_heads", "n_kv_heads", "mlp_hidden_size", "moe_intermediate_size", "expert_intermediate_size"),
    *("dense_intermediate_size", "num_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("decoder_sparse_step", "rotary_dim", "block_size", "bd_size"),
)
_FLAGS = (
    *("tie_word_embeddings", "weight_tying", "attention_bias", "mlp_bias", "use_qkv_bias", "use_qk_norm"),
    *("norm_topk_prob", "include_bias", "include_qkv_bias"),
)
DECODER: dict[str, Kind] = {  # what is read of an architecture whose layers are written down here
    **COMMON,
    **dict.fromkeys(_COUNTS, COUNT),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "first_k_dense_replace"), COUNT_OR_NONE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), POSITIVE),
    **dict.fromkeys(_FLAGS, FLAG),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
    **{"partial_rotary_factor": SHARE, "mlp_only_layers": INDICES},
}
DIVIDES = (  # the first is contained in the second a whole number of times
    *(("num_key_value_heads", "num_attention_heads"), ("n_kv_heads", "n_heads"), ("n_heads", "d_model")),
    *(("n_group", "num_experts"), ("n_group", "n_routed_experts")),
)
AT_MOST = (
    *(("num_experts_per_tok", "num_experts"), ("num_experts_per_tok", "n_routed_experts")),
    *(("topk_group", "n_group"), ("vocab_size", "embedding_size"), ("rotary_dim", "head_dim")),
)


def shown(value: Any) -> str:
    """A value as a message tells it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def refuse_wrong(config: Json, kinds: Mapping[str, Kind]) -> None:
    """Refuse a key whose value is not of its kind; null counts as absent.

    Raises:
        ValueError: one sentence that names key and value.
    """
    for key, kind in kinds.items():
        value = config.get(key)
        if value is not None and not kind.holds(value):
            raise ValueError(f"{key}={shown(value)} is out of range: use {kind.right}")


def refuse_unfitting(config: Json) -> None:
    """Refuse sizes that do not go with each other; each is known to be one.

    Raises:
        ValueError: one sentence that names both.
    """
    widths = () if config.get("head_dim") else (("num_attention_heads", "hidden_size"),)
    for part, whole in (*DIVIDES, *widths):
        if config.get(part) and config.get(whole) and config[whole] % config[part]:
            raise ValueError(f"{part}={config[part]} does not divide {whole}={config[whole]}: use a divisor of it")
    for part, whole in AT_MOST:
        if config.get(part) and config.get(whole) and config[part] > config[whole]:
            raise ValueError(f"{part}={config[part]} is above {whole}={config[whole]}: use at most that")
    _refuse_groups(config)


def _refuse_groups(config: Json) -> None:
    """Of a router that first chooses groups, by the two best experts of each."""
    experts, groups = config.get("num_experts") or config.get("n_routed_experts"), config.get("n_group")
    if not experts or not groups:
        return
    if experts < 2 * groups:
        raise ValueError(f"n_group={groups} leaves fewer than 2 of {experts} experts to a group: use at most half")
    within = (config.get("topk_group") or groups) * experts // groups
    if (chosen := config.get("num_experts_per_tok") or 0) > within:
        raise ValueError(f"num_experts_per_tok={chosen} is above the {within} experts of the chosen groups: use less")
