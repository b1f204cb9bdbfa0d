"""What a native mapping takes for granted: keys of a published configuration that may hold one value only.

A list is held to it element by element; a key without a value must be absent. Null is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.keys import Json, shown

Assumed = Mapping[str, tuple[Any, ...]]

_DECODER: Assumed = {
    **{"use_sliding_window": (False,), "layer_types": ("full_attention",), "mlp_bias": (False,), "clip_qkv": ()},
    **{"attn_logit_softcapping": (), "final_logit_softcapping": ()},
}
_TURNED: Assumed = {"partial_rotary_factor": (1,)}
_NOT_SHARED: Assumed = dict.fromkeys(
    ("num_shared_experts", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"), (0,)
)
LLADA: Assumed = {
    **{"alibi": (False,), "rope": (True,), "rope_scaling": (), "rope_parameters": (), "sliding_window": ()},
    **{"scale_logits": (False,), "input_emb_norm": (False,), "norm_after": (False,), "clip_qkv": ()},
    **{"activation_type": ("silu",), "layer_norm_type": ("rms",), "layer_norm_with_affine": (True,)},
    **{"block_type": ("llama",), "block_group_size": (1,), "attention_layer_norm": (False,)},
    **{"bias_for_layer_norm": (False,), "include_bias": (False,), "include_qkv_bias": (False,)},
    **{"multi_query_attention": (False,), "hidden_act": ("silu",), "partial_rotary_factor": (1,)},
}
QWEN2: Assumed = {**_DECODER, **_TURNED, "attention_bias": (True,), "use_qk_norm": (False,), "num_experts": ()}
QWEN3: Assumed = {**_DECODER, **_TURNED, "use_qk_norm": (True,), "num_experts": ()}
QWEN3_MOE: Assumed = {**_DECODER, **_TURNED, **_NOT_SHARED, "use_qk_norm": (True,)}
_ONE_GROUP: Assumed = dict.fromkeys(("n_group", "topk_group", "router_num_group", "router_topk_group"), (1,))
LLADA_MOE: Assumed = {
    **{**_DECODER, **_TURNED, **_NOT_SHARED, **_ONE_GROUP, "attention_bias": (False,), "qk_layernorm": (True,)},
    **{"use_qk_norm": (True,), "moe_layer_freq": (1,), "mlp_only_layers": (), "decoder_sparse_step": (1,)},
    **{"moe_router_score_function": ("softmax",), "moe_router_enable_expert_bias": (False,)},
    **{"moe_router_topk_scaling_factor": (1,), "routed_scaling_factor": (1,)},
}
LLADA2: Assumed = {
    **{**_DECODER, "score_function": ("sigmoid",), "moe_router_enable_expert_bias": (True,), "use_bias": (False,)},
    **{"use_rmsnorm": (True,), "norm_softmax": (False,), "norm_head": (False,), "attention_bias": (False,)},
    **{"using_split_qkv_in_self_attention": (False,), "rope_interleave": (False,), "router_dtype": ("fp32", "float32")},
    **{"moe_layer_freq": (1,), "mlp_only_layers": (), "decoder_sparse_step": (1,)},
}


def refuse_unassumed(assumed: Assumed, config: Json, family: str) -> None:
    """Refuse a key that says other than the native architecture does.

    Raises:
        ValueError: one sentence that names key, value and what is served.
    """
    for key, served in assumed.items():
        value = config.get(key)
        if value is None:
            continue
        held = value if isinstance(value, list | tuple) else [value]
        if any(one not in served for one in held):
            right = " or ".join(shown(one) for one in served)
            raise ValueError(
                f"{key}={shown(value)} is not served for {family}: {f'only {right}' if served else 'leave it out'}"
            )
