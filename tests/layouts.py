"""Checkpoints in the key layouts their authors published: tables of names and shapes, and small random weights.

A table's letters are sizes (see `_sizes`), its braces numbers: {n} every layer, {d} the dense and {s} the sparse ones,
{e} experts. They come from the authors' papers, configurations and indices, not from `adapters.families`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Json = Mapping[str, Any]

LLADA = """
model.transformer.wte.weight                     V D
model.transformer.blocks.{n}.attn_norm.weight    D
model.transformer.blocks.{n}.q_proj.weight       Q D
model.transformer.blocks.{n}.k_proj.weight       K D
model.transformer.blocks.{n}.v_proj.weight       K D
model.transformer.blocks.{n}.attn_out.weight     D Q
model.transformer.blocks.{n}.ff_norm.weight      D
model.transformer.blocks.{n}.ff_proj.weight      F D
model.transformer.blocks.{n}.up_proj.weight      F D
model.transformer.blocks.{n}.ff_out.weight       D F
model.transformer.ln_f.weight                    D
model.transformer.ff_out.weight                  V D
"""
QWEN = """
model.embed_tokens.weight                              V D
model.layers.{n}.input_layernorm.weight                D
model.layers.{n}.self_attn.q_proj.weight               Q D
model.layers.{n}.self_attn.k_proj.weight               K D
model.layers.{n}.self_attn.v_proj.weight               K D
model.layers.{n}.self_attn.o_proj.weight               D Q
model.layers.{n}.post_attention_layernorm.weight       D
model.norm.weight                                      D
lm_head.weight                                         V D
"""
QWEN_BIASES = """
model.layers.{n}.self_attn.q_proj.bias                 Q
model.layers.{n}.self_attn.k_proj.bias                 K
model.layers.{n}.self_attn.v_proj.bias                 K
"""
HEAD_NORMS = """
model.layers.{n}.self_attn.q_norm.weight               H
model.layers.{n}.self_attn.k_norm.weight               H
"""
DENSE = """
model.layers.{d}.mlp.gate_proj.weight                  F D
model.layers.{d}.mlp.up_proj.weight                    F D
model.layers.{d}.mlp.down_proj.weight                  D F
"""
ROUTER = """
model.layers.{s}.mlp.gate.weight                       E D
"""
EXPERTS = """
model.layers.{s}.mlp.experts.{e}.gate_proj.weight      M D
model.layers.{s}.mlp.experts.{e}.up_proj.weight        M D
model.layers.{s}.mlp.experts.{e}.down_proj.weight      D M
"""
MERGED_EXPERTS = """
model.layers.{s}.mlp.experts.gate_proj                 E M D
model.layers.{s}.mlp.experts.up_proj                   E M D
model.layers.{s}.mlp.experts.down_proj                 E D M
"""
LLADA2 = """
model.word_embeddings.weight                           V D
model.layers.{n}.input_layernorm.weight                D
model.layers.{n}.attention.query_key_value.weight      P D
model.layers.{n}.attention.query_layernorm.weight      H
model.layers.{n}.attention.key_layernorm.weight        H
model.layers.{n}.attention.dense.weight                D Q
model.layers.{n}.post_attention_layernorm.weight       D
model.layers.{s}.mlp.gate.expert_bias                  E
model.layers.{s}.mlp.shared_experts.gate_proj.weight   S D
model.layers.{s}.mlp.shared_experts.up_proj.weight     S D
model.layers.{s}.mlp.shared_experts.down_proj.weight   D S
model.norm.weight                                      D
lm_head.weight                                         V D
"""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a family's tensors, and the ``config.json`` of a small one."""

    table: str
    config: dict[str, Any]


# values that differ from transformers' defaults and are large enough to show, so that a lost one changes the result
_IDS = {"vocab_size": 64, "mask_token_id": 63, "eos_token_id": 62, "pad_token_id": 62}
_SMALL = {
    **{**_IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "rope_theta": 5e4},
    **{"hidden_act": "silu", "rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3}
_SDAR = {**_SMALL, "head_dim": 12, "attention_bias": False, "block_size": 4}
_LLADA2 = {
    **{**_SMALL, **_MOE, "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "num_hidden_layers": 3},
    **{"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4},
    **{"topk_group": 2, "num_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    **{"partial_rotary_factor": 0.5, "norm_topk_prob": True, "score_function": "sigmoid", "use_qk_norm": True},
    **{"use_qkv_bias": False, "use_bias": False, "moe_router_enable_expert_bias": True},
}

LAYOUTS: dict[str, Layout] = {
    "LLaDA": Layout(
        LLADA,
        {
            **{**_IDS, "model_type": "llada", "architectures": ["LLaDAModelLM"], "embedding_size": 64, "d_model": 32},
            **{"mlp_hidden_size": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "max_sequence_length": 128},
            **{"rms_norm_eps": 1e-3, "rope_theta": 5e4, "weight_tying": False, "include_bias": False},
            **{"include_qkv_bias": False, "block_group_size": 1, "activation_type": "silu", "layer_norm_type": "rms"},
        },
    ),
    "LLaDA-MoE": Layout(
        QWEN + HEAD_NORMS + ROUTER + EXPERTS,
        {
            **{**_SMALL, **_MOE, "model_type": "llada", "architectures": ["LLaDAMoEModelLM"]},
            **{"num_key_value_heads": 4, "expert_intermediate_size": 24, "dense_intermediate_size": 48},
            "norm_topk_prob": None,
        },
    ),
    "LLaDA2": Layout(LLADA2 + DENSE + ROUTER + EXPERTS, _LLADA2),
    "LLaDA2, experts merged": Layout(
        LLADA2 + DENSE + ROUTER + MERGED_EXPERTS, {**_LLADA2, "model_type": "llada2_moe_veomni"}
    ),
    "Dream": Layout(QWEN + QWEN_BIASES + DENSE, {**_SMALL, "model_type": "Dream", "architectures": ["DreamModel"]}),
    "Fast-dLLM v2": Layout(
        QWEN + QWEN_BIASES + DENSE,
        {**_SMALL, "model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8},
    ),
    "SDAR": Layout(QWEN + HEAD_NORMS + DENSE, {**_SDAR, "model_type": "sdar", "architectures": ["SDARForCausalLM"]}),
    "SDAR-MoE": Layout(
        QWEN + HEAD_NORMS + ROUTER + EXPERTS,
        {
            **{**_SDAR, **_MOE, "model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"]},
            **{"moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
    "causal language model": Layout(
        QWEN + HEAD_NORMS + DENSE,
        {**_SMALL, "head_dim": 12, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    ),
}


def _sizes(config: Json) -> dict[str, int]:
    """V vocabulary, D hidden size, H of a head, Q and K of all query and key heads, P of queries, keys and values, F
    dense feed-forward, E experts, M of an expert, S of the shared ones."""
    if "d_model" in config:
        head = config["d_model"] // config["n_heads"]
        sizes = {"V": config["embedding_size"], "D": config["d_model"], "F": config["mlp_hidden_size"]}
        return {**sizes, "Q": head * config["n_heads"], "K": head * config["n_kv_heads"]}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    expert = config.get("moe_intermediate_size") or config.get("expert_intermediate_size", 0)
    return {
        **{"V": config["vocab_size"], "D": config["hidden_size"], "H": head, "Q": queries, "K": keys},
        **{"P": queries + 2 * keys, "F": config.get("intermediate_size", 0), "E": config.get("num_experts", 0)},
        **{"M": expert, "S": expert * config.get("num_shared_experts", 0)},
    }


def _numbers(config: Json) -> dict[str, range]:
    layers = config.get("n_layers") or config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace", 0) if "num_experts" in config else layers
    ranges = {"n": range(layers), "d": range(dense), "s": range(dense, layers)}
    return {**ranges, "e": range(config.get("num_experts", 0))}


def shapes(layout: Layout, config: Json) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this layout, by its published name."""
    sizes, numbers, found = _sizes(config), _numbers(config), {}
    for line in layout.table.split("\n"):
        template, *axes = line.split() or [""]
        if template and not (template.startswith("lm_head") and config.get("tie_word_embeddings")):
            found.update(dict.fromkeys(_names(template, numbers), tuple(sizes[axis] for axis in axes)))
    return found


def _names(template: str, numbers: Mapping[str, range]) -> Iterator[str]:
    letters = re.findall(r"{(\w)}", template)
    for chosen in product(*(numbers[letter] for letter in letters)):
        yield template.format(**dict(zip(letters, chosen)))


def weights(layout: Layout, config: Json, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors, sharp enough that one missing, swapped or misread tensor changes what is predicted."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in shapes(layout, config).items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or "ln_f" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if any(part in name for part in ("embed", "wte", "lm_head", "transformer.ff_out")):
        return 0.5 * noise
    return noise * 1.5 / shape[-1] ** 0.5


def write(folder: Path, name: str, shards: int = 1, tokenizer: Path | None = None, **changes: Any) -> Path:
    """A model folder of the family ``name`` of `LAYOUTS`; ``changes`` go into its configuration.

    Args:
        shards: weight files, with an index if more than one.
        tokenizer: a folder whose tokenizer it gets; without one it is driven by ids.
    """
    layout = LAYOUTS[name]
    config = {**layout.config, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _save(folder, weights(layout, config), shards)
    for file in tokenizer.glob("*token*") if tokenizer else ():
        shutil.copy(file, folder)
    return folder


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
