"""Published layouts: the native configuration that a family's ``config.json`` means, and where its tensors go."""

from __future__ import annotations

from typing import Any

from adapters.rotary import rotary, rotary_share
from adapters.tensors import Json, Rename, Rule, Split, Stack

# ---- native configurations -------------------------------------------------------------------------------------------


def llada(config: Json) -> dict[str, Any]:
    """LLaDA's configuration is OLMo's, under names of its own; its equations are Llama's."""
    return {
        "model_type": "llama",
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config["mlp_hidden_size"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config.get("n_kv_heads") or config["n_heads"],
        "max_position_embeddings": config["max_sequence_length"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": rotary(config),
        "tie_word_embeddings": config.get("weight_tying") or False,
        **_ids(config),
    }


def _shape(config: Json, model_type: str) -> dict[str, Any]:
    """What the configurations of all newer families say under transformers' own names."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "model_type": model_type,
        **{name: config[name] for name in (*sizes, "max_position_embeddings", "rms_norm_eps")},
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_parameters": rotary(config),
        "tie_word_embeddings": config.get("tie_word_embeddings") or False,
        **_ids(config),
    }


def _ids(config: Json) -> dict[str, Any]:
    """The network uses no ids; transformers checks that a padding id lies inside the vocabulary."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def qwen2(config: Json) -> dict[str, Any]:
    return {**_shape(config, "qwen2"), "intermediate_size": config["intermediate_size"], "use_sliding_window": False}


def qwen3(config: Json) -> dict[str, Any]:
    return {
        **_shape(config, "qwen3"),
        "intermediate_size": config["intermediate_size"],
        "head_dim": _head_size(config),
        "attention_bias": config.get("attention_bias") or False,
        "use_sliding_window": False,
    }


def qwen3_moe(config: Json) -> dict[str, Any]:
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return {
        **qwen3(config),
        "model_type": "qwen3_moe",
        **{name: config[name] for name in experts},
        "decoder_sparse_step": config.get("decoder_sparse_step", 1),
        "mlp_only_layers": config.get("mlp_only_layers") or [],
    }


def llada_moe(config: Json) -> dict[str, Any]:
    """Softmax router whose top-k is not renormalised, an RMS norm a head on queries and keys: Qwen3's equations."""
    return {
        **_shape(config, "qwen3_moe"),
        "head_dim": _head_size(config),
        "intermediate_size": config.get("dense_intermediate_size") or config["expert_intermediate_size"],
        "moe_intermediate_size": config["expert_intermediate_size"],
        "num_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def llada2(config: Json) -> dict[str, Any]:
    """Sigmoid router with group-limited top-k and a bias for the choice only, shared expert, half-rotary: GLM-4's."""
    same = ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
    native = _shape(config, "glm4_moe")
    return {
        **native,
        "rope_parameters": {**native["rope_parameters"], "partial_rotary_factor": rotary_share(config)},
        **{name: config[name] for name in same},
        "head_dim": _head_size(config),
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "routed_scaling_factor": config["routed_scaling_factor"],
        "first_k_dense_replace": config["first_k_dense_replace"],
        "norm_topk_prob": True,  # the authors' code normalises whatever the configuration says
        "use_qk_norm": config.get("use_qk_norm", True),
        "attention_bias": config.get("use_qkv_bias") or False,
        "num_mtp_layers": 0,
    }


def _head_size(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _query_key_value_rows(config: Json) -> tuple[int, int, int]:
    size = _head_size(config)
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return queries, keys, keys


# ---- rules for the tensors -------------------------------------------------------------------------------------------

_BLOCK = r"model\.transformer\.blocks\.(\d+)\."
LLADA_RULES: tuple[Rule, ...] = (
    Rename(r"model\.transformer\.wte\.(.+)", r"model.embed_tokens.\1"),
    Rename(r"model\.transformer\.ln_f\.(.+)", r"model.norm.\1"),
    Rename(r"model\.transformer\.ff_out\.(.+)", r"lm_head.\1"),
    Rename(_BLOCK + r"attn_norm\.(.+)", r"model.layers.\1.input_layernorm.\2"),
    Rename(_BLOCK + r"ff_norm\.(.+)", r"model.layers.\1.post_attention_layernorm.\2"),
    Rename(_BLOCK + r"(q_proj|k_proj|v_proj)\.(.+)", r"model.layers.\1.self_attn.\2.\3"),
    Rename(_BLOCK + r"attn_out\.(.+)", r"model.layers.\1.self_attn.o_proj.\2"),
    Rename(_BLOCK + r"ff_proj\.(.+)", r"model.layers.\1.mlp.gate_proj.\2"),
    Rename(_BLOCK + r"up_proj\.(.+)", r"model.layers.\1.mlp.up_proj.\2"),
    Rename(_BLOCK + r"ff_out\.(.+)", r"model.layers.\1.mlp.down_proj.\2"),
)
_EXPERTS = r"(model\.layers\.\d+\.mlp\.experts\.)(?P<expert>\d+)\."
EXPERT_RULES: tuple[Rule, ...] = (
    Stack(_EXPERTS + r"gate_proj\.weight", r"\1gate_up_proj", 0, 2),
    Stack(_EXPERTS + r"up_proj\.weight", r"\1gate_up_proj", 1, 2),
    Stack(_EXPERTS + r"down_proj\.weight", r"\1down_proj"),
)
_MERGED = r"(model\.layers\.\d+\.mlp\.experts\.)"  # as dFactory's and DMax's trainings write them
LLADA2_RULES: tuple[Rule, ...] = (
    Rename(r"model\.word_embeddings\.(.+)", r"model.embed_tokens.\1"),
    Split(
        r"(model\.layers\.\d+)\.attention\.query_key_value\.(weight|bias)",
        (r"\1.self_attn.q_proj.\2", r"\1.self_attn.k_proj.\2", r"\1.self_attn.v_proj.\2"),
        _query_key_value_rows,
    ),
    Rename(r"(model\.layers\.\d+)\.attention\.dense\.(.+)", r"\1.self_attn.o_proj.\2"),
    Rename(r"(model\.layers\.\d+)\.attention\.query_layernorm\.(.+)", r"\1.self_attn.q_norm.\2"),
    Rename(r"(model\.layers\.\d+)\.attention\.key_layernorm\.(.+)", r"\1.self_attn.k_norm.\2"),
    Rename(r"(model\.layers\.\d+\.mlp\.gate)\.expert_bias", r"\1.e_score_correction_bias"),
    *EXPERT_RULES,
    Stack(_MERGED + r"gate_proj", r"\1gate_up_proj", 0, 2),
    Stack(_MERGED + r"up_proj", r"\1gate_up_proj", 1, 2),
)
