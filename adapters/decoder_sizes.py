"""What the usual decoders hold, dense or with experts, from a native configuration alone; see `adapters.memory`."""

from __future__ import annotations

from typing import Any

from adapters.gemma_sizes import Shapes, gated
from adapters.tensors import Json

_BIASED = {  # projections that have a bias
    "llama": {"attention_bias": "qkvo", "mlp_bias": "mlp"},
    "qwen3": {"attention_bias": "qkvo"},
    "qwen3_moe": {"attention_bias": "qkvo"},
    "glm4_moe": {"attention_bias": "qkv"},
}
_COUNTS = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "num_experts_per_tok"),
)
_NORMED = ("qwen3", "qwen3_moe")  # queries and keys have an RMS norm a head
FORMULAS = (*_BIASED, "qwen2")  # architectures whose tensors are written down here
IGNORED = {"glm4_moe": (r"model\.layers\.92.*", r"model\.layers\.46.*")}  # of GLM-4's own files: drafting layers


def shapes(native: Json) -> Shapes:
    """Every tensor, a tied head included."""
    hidden, vocabulary = native["hidden_size"], native["vocab_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(native["num_hidden_layers"]):
        parts = {**_attention(native), **_feed_forward(native, layer)}
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            parts[norm] = (hidden,)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def refuse_sizes(native: Json) -> None:
    """Raises: ValueError: if a size is stated, but is none."""
    for name in _COUNTS:
        value: Any = native.get(name)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name}={value} is out of range: use a whole number from 1 up")


def head_size(native: Json) -> int:
    """Stated, or an equal share of the width."""
    return native.get("head_dim") or native["hidden_size"] // native["num_attention_heads"]


def _attention(native: Json) -> Shapes:
    kind, hidden, size = native["model_type"], native["hidden_size"], head_size(native)
    queries = native["num_attention_heads"] * size
    keys = (native.get("num_key_value_heads") or native["num_attention_heads"]) * size
    rows = {"q": queries, "k": keys, "v": keys}
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (size_, hidden) for name, size_ in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    biased = _BIASED[kind]["attention_bias"] if kind != "qwen2" and native.get("attention_bias") else ""
    for name in "qkv" if kind == "qwen2" else biased:
        shapes[f"self_attn.{name}_proj.bias"] = (hidden if name == "o" else rows[name],)
    if kind in _NORMED or (kind == "glm4_moe" and native.get("use_qk_norm")):
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return shapes


def _feed_forward(native: Json, layer: int) -> Shapes:
    kind, hidden = native["model_type"], native["hidden_size"]
    experts = native.get("n_routed_experts") or native.get("num_experts")
    if not experts or _is_dense(native, layer):
        biased = kind == "llama" and bool(native.get("mlp_bias"))
        return gated("mlp", hidden, native["intermediate_size"], biased)
    width = native["moe_intermediate_size"]
    shapes: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if kind == "glm4_moe":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= gated("mlp.shared_experts", hidden, width * native["n_shared_experts"])
    return shapes


def _is_dense(native: Json, layer: int) -> bool:
    if native["model_type"] == "glm4_moe":
        return bool(layer < native["first_k_dense_replace"])
    stepped = (layer + 1) % native.get("decoder_sparse_step", 1) == 0
    return layer in native.get("mlp_only_layers", ()) or not stepped
