"""The published networks as plain formulas in float64, read from a checkpoint under its published names.

Written from the papers' equations with nothing but elementary tensor operations, so that it shares no code and no
convention with the networks it checks.

Shapes: T positions, D hidden size, H heads, d head size, V vocabulary, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Json = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def logits(folder: Path, ids: list[int], visible: Tensor) -> Tensor:
    """(T, V) float64 of the checkpoint in ``folder``; ``visible`` (T, T) bool says which key a query sees."""
    config = json.loads((folder / "config.json").read_text())
    return network(config)(config, read(folder), torch.tensor(ids), visible)


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of all shards, in float64."""
    shards = sorted(folder.glob("*.safetensors"))
    return {name: tensor.double() for shard in shards for name, tensor in load_file(shard).items()}


def network(config: Json) -> Callable[[Json, Weights, Tensor, Tensor], Tensor]:
    if config["model_type"].startswith("llada2"):
        return llada2
    return llada if "d_model" in config else qwen


# ---- the networks ----------------------------------------------------------------------------------------------------


def llada(config: Json, weights: Weights, ids: Tensor, visible: Tensor) -> Tensor:
    """arXiv 2502.09992: pre-norm blocks, rotary on whole heads, SwiGLU with ``ff_proj`` as its gate."""
    eps, size = config["rms_norm_eps"], config["d_model"] // config["n_heads"]
    stream = weights["model.transformer.wte.weight"][ids]
    for n in range(config["n_layers"]):
        w = under(weights, f"model.transformer.blocks.{n}.")
        seen = rms(stream, w["attn_norm.weight"], eps)
        queries, keys, values = (heads(seen @ w[f"{name}_proj.weight"].T, size) for name in "qkv")
        queries, keys = (rotate(x, config["rope_theta"], size) for x in (queries, keys))
        stream = stream + attend(queries, keys, values, visible) @ w["attn_out.weight"].T
        seen = rms(stream, w["ff_norm.weight"], eps)
        stream = stream + swiglu(seen, w["ff_proj.weight"], w["up_proj.weight"], w["ff_out.weight"])
    return rms(stream, weights["model.transformer.ln_f.weight"], eps) @ weights["model.transformer.ff_out.weight"].T


def qwen(config: Json, weights: Weights, ids: Tensor, visible: Tensor) -> Tensor:
    """Dream and Fast-dLLM v2 (biases on queries, keys and values), SDAR, LLaDA-MoE and Qwen3 (a norm a head)."""
    eps, size = config["rms_norm_eps"], head_size(config)
    stream = weights["model.embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        w = under(weights, f"model.layers.{n}.")
        seen = rms(stream, w["input_layernorm.weight"], eps)
        queries, keys, values = (heads(projected(seen, w, f"self_attn.{name}_proj"), size) for name in "qkv")
        if "self_attn.q_norm.weight" in w:
            queries = rms(queries, w["self_attn.q_norm.weight"], eps)
            keys = rms(keys, w["self_attn.k_norm.weight"], eps)
        queries, keys = (rotate(x, config["rope_theta"], size) for x in (queries, keys))
        stream = stream + attend(queries, keys, values, visible) @ w["self_attn.o_proj.weight"].T
        seen = rms(stream, w["post_attention_layernorm.weight"], eps)
        if "mlp.gate.weight" in w:
            shares = softmax_router(seen, w["mlp.gate.weight"], config)
            stream = stream + mixture(seen, shares, under(w, "mlp.experts."))
        else:
            stream = stream + feed_forward(seen, w, "mlp.")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return rms(stream, weights["model.norm.weight"], eps) @ head.T


def llada2(config: Json, weights: Weights, ids: Tensor, visible: Tensor) -> Tensor:
    """arXiv 2512.15745 and its published code: one packed projection, half-rotary, a shared and some routed experts."""
    eps, size = config["rms_norm_eps"], head_size(config)
    rotated = int(size * config["partial_rotary_factor"])
    queries_end, keys_end = (size * config["num_attention_heads"], size * config["num_key_value_heads"])
    stream = weights["model.word_embeddings.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        w = under(weights, f"model.layers.{n}.")
        packed = rms(stream, w["input_layernorm.weight"], eps) @ w["attention.query_key_value.weight"].T
        parts = packed.split([queries_end, keys_end, keys_end], -1)
        queries, keys, values = (heads(part, size) for part in parts)
        queries = rotate(rms(queries, w["attention.query_layernorm.weight"], eps), config["rope_theta"], rotated)
        keys = rotate(rms(keys, w["attention.key_layernorm.weight"], eps), config["rope_theta"], rotated)
        stream = stream + attend(queries, keys, values, visible) @ w["attention.dense.weight"].T
        seen = rms(stream, w["post_attention_layernorm.weight"], eps)
        if n < config["first_k_dense_replace"]:
            stream = stream + feed_forward(seen, w, "mlp.")
            continue
        shares = sigmoid_router(seen, w["mlp.gate.weight"], w["mlp.gate.expert_bias"], config)
        routed = mixture(seen, shares, under(w, "mlp.experts."))
        stream = stream + routed + feed_forward(seen, w, "mlp.shared_experts.")
    return rms(stream, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


# ---- their parts -----------------------------------------------------------------------------------------------------


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def head_size(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def heads(x: Tensor, size: int) -> Tensor:
    """(T, H d) -> (H, T, d)."""
    return torch.stack(x.split(size, -1))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float, size: int) -> Tensor:
    """Turn the pairs (i, i + size / 2) of the first ``size`` entries of each head by position * theta^(-2i / size)."""
    turned, half = x.clone(), size // 2
    positions = torch.arange(x.shape[-2], dtype=x.dtype)
    for i in range(half):
        angle = positions * theta ** (-2 * i / size)
        a, b = x[..., i], x[..., i + half]
        turned[..., i] = a * angle.cos() - b * angle.sin()
        turned[..., i + half] = a * angle.sin() + b * angle.cos()
    return turned


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """(H, T, d) queries over fewer key heads, each shared by neighbouring query heads -> (T, H d)."""
    shared, found = len(queries) // len(keys), []
    for head, query in enumerate(queries):
        scores = query @ keys[head // shared].T / query.shape[-1] ** 0.5
        seen = torch.where(visible, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
        found.append(seen / seen.sum(-1, keepdim=True) @ values[head // shared])
    return torch.cat(found, -1)


def projected(x: Tensor, weights: Weights, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gated = x @ gate.T
    return (gated / (1 + (-gated).exp()) * (x @ up.T)) @ down.T


def feed_forward(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    return swiglu(x, *(weights[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down")))


def mixture(x: Tensor, shares: Tensor, experts: Weights) -> Tensor:
    """Sum of the experts' answers (T, D) by their shares (T, E); experts lie apart or in one tensor."""
    total = torch.zeros_like(x)
    for number in range(shares.shape[-1]):
        if "gate_proj" in experts:
            answer = swiglu(x, *(experts[f"{part}_proj"][number] for part in ("gate", "up", "down")))
        else:
            answer = feed_forward(x, experts, f"{number}.")
        total = total + shares[:, number, None] * answer
    return total


def softmax_router(x: Tensor, gate: Tensor, config: Json) -> Tensor:
    """(T, E) shares: the largest probabilities, renormalised only if the configuration says so."""
    scores = (x @ gate.T).exp()
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = scores.topk(config["num_experts_per_tok"], -1).indices
    shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    return shares / shares.sum(-1, keepdim=True) if config.get("norm_topk_prob") else shares


def sigmoid_router(x: Tensor, gate: Tensor, bias: Tensor, config: Json) -> Tensor:
    """(T, E) shares: chosen with the bias within the best groups, weighed without it, summing to the scale."""
    scores = 1 / (1 + (-(x @ gate.T)).exp())
    wanted, groups = scores + bias, config["n_group"]
    size = scores.shape[-1] // groups
    best = wanted.unflatten(-1, (groups, size)).topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    open_groups = torch.zeros(len(x), groups, dtype=torch.bool).scatter(-1, best, True)
    wanted = wanted.masked_fill(~open_groups.repeat_interleave(size, -1), -torch.inf)
    chosen = wanted.topk(config["num_experts_per_tok"], -1).indices
    shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    return shares / shares.sum(-1, keepdim=True) * config["routed_scaling_factor"]
