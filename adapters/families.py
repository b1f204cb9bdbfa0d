"""The family table: how a published checkpoint maps onto a native `transformers` architecture, and how it decodes.

A new family is one more `Family` in `FAMILIES`; the first whose recogniser says yes is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adapters.tensors import Json, Rename, Rule, Split, Stack


def _no_block(config: Json) -> int | None:
    return None


def _no_mask(config: Json) -> int | None:
    return None


def _stated_mask(config: Json) -> int | None:
    return config.get("mask_token_id")


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: shown to the user.
        recognises: whether a ``config.json`` is of this family.
        attention: the pattern it was trained with: ``full``, ``causal`` or ``blocks``.
        shift: row of the prediction for slot i is ``i - shift``.
        native: the native architecture's configuration, as arguments of `transformers.AutoConfig.for_model`; None where
            the file already is a native configuration.
        rules: where the checkpoint's tensors go, see `adapters.tensors`.
        block_origin: ``prompt`` or ``zero``, see `samplers.ModelFacts`.
        mask_id, trained_block: read out of ``config.json``.
        end_ids: ends of an answer that the configuration does not name.
    """

    name: str
    recognises: Callable[[Json], bool]
    attention: str
    shift: int
    native: Callable[[Json], dict[str, Any]] | None = None
    rules: tuple[Rule, ...] = ()
    block_origin: str = "prompt"
    mask_id: Callable[[Json], int | None] = _stated_mask
    trained_block: Callable[[Json], int | None] = _no_block
    end_ids: frozenset[int] = frozenset()

    @property
    def attentions(self) -> frozenset[str]:
        """Patterns it can serve: a mask can always hide more than the training did."""
        return SERVED[self.attention]


SERVED = {
    "full": frozenset({"full", "blocks"}),
    "blocks": frozenset({"blocks"}),
    "causal": frozenset({"causal"}),
}


# ---- native configurations -------------------------------------------------------------------------------------------


def _llada(config: Json) -> dict[str, Any]:
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "attention_bias": config.get("include_qkv_bias") or False,
        "mlp_bias": config.get("include_bias") or False,
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
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config["rope_theta"])},
        "tie_word_embeddings": config.get("tie_word_embeddings") or False,
        **_ids(config),
    }


def _ids(config: Json) -> dict[str, Any]:
    """The network uses no ids; transformers checks that a padding id lies inside the vocabulary."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _qwen2(config: Json) -> dict[str, Any]:
    return {**_shape(config, "qwen2"), "intermediate_size": config["intermediate_size"], "use_sliding_window": False}


def _qwen3(config: Json) -> dict[str, Any]:
    return {
        **_shape(config, "qwen3"),
        "intermediate_size": config["intermediate_size"],
        "head_dim": _head_size(config),
        "attention_bias": config.get("attention_bias") or False,
        "use_sliding_window": False,
    }


def _qwen3_moe(config: Json) -> dict[str, Any]:
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return {
        **_qwen3(config),
        "model_type": "qwen3_moe",
        **{name: config[name] for name in experts},
        "decoder_sparse_step": config.get("decoder_sparse_step", 1),
        "mlp_only_layers": config.get("mlp_only_layers") or [],
    }


def _llada_moe(config: Json) -> dict[str, Any]:
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


def _llada2(config: Json) -> dict[str, Any]:
    """Sigmoid router with group-limited top-k and a bias for the choice only, shared expert, half-rotary: GLM-4's."""
    same = ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
    rotary = config.get("partial_rotary_factor", 1.0)
    native = _shape(config, "glm4_moe")
    return {
        **native,
        "rope_parameters": {**native["rope_parameters"], "partial_rotary_factor": rotary},
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
_LLADA_RULES: tuple[Rule, ...] = (
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
_EXPERT_RULES: tuple[Rule, ...] = (
    Stack(_EXPERTS + r"gate_proj\.weight", r"\1gate_up_proj", 0, 2),
    Stack(_EXPERTS + r"up_proj\.weight", r"\1gate_up_proj", 1, 2),
    Stack(_EXPERTS + r"down_proj\.weight", r"\1down_proj"),
)
_MERGED = r"(model\.layers\.\d+\.mlp\.experts\.)"  # as dFactory's and DMax's trainings write them
_LLADA2_RULES: tuple[Rule, ...] = (
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
    *_EXPERT_RULES,
    Stack(_MERGED + r"gate_proj", r"\1gate_up_proj", 0, 2),
    Stack(_MERGED + r"up_proj", r"\1gate_up_proj", 1, 2),
)

# ---- the table -------------------------------------------------------------------------------------------------------


def _of_type(*model_types: str) -> Callable[[Json], bool]:
    return lambda config: config.get("model_type") in model_types


def _is_llada_moe(config: Json) -> bool:
    """LLaDA-MoE shares its ``model_type`` with LLaDA."""
    return config.get("model_type") in ("llada", "lladamoe", "llada_moe") and "num_experts" in config


FAMILIES: tuple[Family, ...] = (
    Family(
        name="LLaDA-MoE",
        recognises=_is_llada_moe,
        native=_llada_moe,
        rules=_EXPERT_RULES,
        attention="full",
        shift=0,
        mask_id=lambda config: config.get("mask_token_id") or 156895,
    ),
    Family(
        name="LLaDA",
        recognises=_of_type("llada"),
        native=_llada,
        rules=_LLADA_RULES,
        attention="full",
        shift=0,
        mask_id=lambda config: config.get("mask_token_id") or 126336,
    ),
    Family(
        name="LLaDA2",
        recognises=_of_type("llada2_moe", "llada2_moe_veomni"),
        native=_llada2,
        rules=_LLADA2_RULES,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=lambda config: config.get("mask_token_id") or 156895,
        trained_block=lambda config: config.get("block_size") or 32,
        end_ids=frozenset({156892}),
    ),
    Family(
        name="Dream",
        recognises=_of_type("Dream", "dream"),
        native=_qwen2,
        attention="full",
        shift=1,
        mask_id=lambda config: config.get("mask_token_id") or 151666,
    ),
    Family(
        name="Fast-dLLM v2",
        recognises=_of_type("Fast_dLLM_Qwen"),
        native=_qwen2,
        attention="blocks",
        shift=1,
        block_origin="zero",
        mask_id=lambda config: config.get("mask_token_id") or 151665,
        trained_block=lambda config: config.get("bd_size") or 32,
    ),
    Family(
        name="SDAR-MoE",
        recognises=_of_type("sdar_moe"),
        native=_qwen3_moe,
        rules=_EXPERT_RULES,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=lambda config: config.get("mask_token_id") or 151669,
        trained_block=lambda config: config.get("block_size") or 4,
    ),
    Family(
        name="SDAR",
        recognises=_of_type("sdar"),
        native=_qwen3,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=lambda config: config.get("mask_token_id") or 151669,
        trained_block=lambda config: config.get("block_size") or 4,
    ),
    Family(
        name="masked diffusion on a native architecture",
        recognises=lambda config: config.get("is_causal") is False and config.get("mask_token_id") is not None,
        attention="full",
        shift=0,
    ),
    Family(
        name="causal language model",
        recognises=lambda config: any("CausalLM" in name for name in config.get("architectures") or ()),
        attention="causal",
        shift=1,
        mask_id=_no_mask,
    ),
)


def family_of(config: Json) -> Family:
    """The family of a ``config.json``.

    Raises:
        ValueError: if no row recognises it.
    """
    for family in FAMILIES:
        if family.recognises(config):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ValueError(f"model_type={config.get('model_type')} is of no known family; known are: {known}")
