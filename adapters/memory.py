"""What a native architecture holds, from its configuration alone: tensors, parameters, memory.

Nothing is built and neither torch nor transformers is imported, unless the architecture has no formula here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from adapters import gemma_sizes
from adapters.gemma_sizes import Shapes
from adapters.tensors import Json

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
GEMMA = "diffusion_gemma"  # and in `adapters.gemma_sizes`


@dataclass(frozen=True)
class Sizes:
    """A network's sizes.

    Attributes:
        shapes: of every tensor, by its key in the native ``state_dict``; a tied head is one of them.
        tied: whether the head is the embedding.
        slot: numbers that one slot's keys and values take in all layers together.
        experts, experts_per_token: of a layer that has them; None in a dense network.
        shared_experts: those that every token goes through.
    """

    architecture: str
    shapes: Shapes
    tied: bool
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    slot: int
    experts: int | None = None
    experts_per_token: int | None = None
    shared_experts: int = 0

    @cached_property
    def parameters(self) -> int:
        """Tied parameters count once, buffers not at all."""
        skipped = ("lm_head.weight",) if self.tied else ()
        counted = (name for name in self.shapes if name not in skipped and not name.endswith("correction_bias"))
        return sum(prod(self.shapes[name]) for name in counted)

    @cached_property
    def active(self) -> int:
        """Parameters that one token passes, embedding and head included."""
        if not self.experts or not self.experts_per_token:
            return self.parameters
        expert = sum(prod(shape) for name, shape in self.shapes.items() if ".experts." in name)
        return self.parameters - expert + expert * self.experts_per_token // self.experts

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights."""
        return self.parameters * BYTES[dtype]

    def cache_bytes(self, slots: int, dtype: str) -> int:
        """Memory of the keys and values of so many slots."""
        return self.slot * slots * BYTES[dtype]


def sizes(native: Json) -> Sizes:
    """Sizes of a native architecture.

    Args:
        native: arguments of `transformers.AutoConfig.for_model`.

    Raises:
        KeyError: if a key is absent.
        ValueError: if a size is none, or transformers refuses what has no formula here.
    """
    kinds = {**dict.fromkeys(FORMULAS, _by_formula), GEMMA: _of_gemma}
    return kinds.get(native["model_type"], _by_building)(native)


def _by_formula(native: Json) -> Sizes:
    kind, heads = native["model_type"], native["num_attention_heads"]
    _refuse_sizes(native)
    hidden, vocabulary, layers = native["hidden_size"], native["vocab_size"], native["num_hidden_layers"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        parts = {**_attention(native, kind), **_feed_forward(native, layer)}
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            parts[norm] = (hidden,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    experts = native.get("n_routed_experts") or native.get("num_experts")
    keys = native.get("num_key_value_heads") or heads
    return Sizes(
        architecture=kind,
        shapes=shapes,
        tied=bool(native.get("tie_word_embeddings")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=keys,
        head_size=_head_size(native),
        vocabulary=vocabulary,
        slot=2 * layers * keys * _head_size(native),
        experts=experts,
        experts_per_token=native["num_experts_per_tok"] if experts else None,
        shared_experts=native.get("n_shared_experts") or 0,
    )


def _of_gemma(native: Json) -> Sizes:
    text = native["text_config"]
    _refuse_sizes(text)
    return Sizes(
        architecture=GEMMA,
        shapes=gemma_sizes.shapes(text),
        tied=True,
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        heads=text["num_attention_heads"],
        key_value_heads=text["num_key_value_heads"],
        head_size=text["head_dim"],
        vocabulary=text["vocab_size"],
        slot=gemma_sizes.slot_elements(text),
        experts=text["num_experts"],
        experts_per_token=text["top_k_experts"],
    )


def _refuse_sizes(native: Json) -> None:
    for name in _COUNTS:
        value: Any = native.get(name)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name}={value} is out of range: use a whole number from 1 up")


def _head_size(native: Json) -> int:
    return native.get("head_dim") or native["hidden_size"] // native["num_attention_heads"]


def _attention(native: Json, kind: str) -> Shapes:
    hidden, size = native["hidden_size"], _head_size(native)
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
        return _gated("mlp", hidden, native["intermediate_size"], biased)
    width = native["moe_intermediate_size"]
    shapes: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if kind == "glm4_moe":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= _gated("mlp.shared_experts", hidden, width * native["n_shared_experts"])
    return shapes


def _is_dense(native: Json, layer: int) -> bool:
    if native["model_type"] == "glm4_moe":
        return bool(layer < native["first_k_dense_replace"])
    stepped = (layer + 1) % native.get("decoder_sparse_step", 1) == 0
    return layer in native.get("mlp_only_layers", ()) or not stepped


def _gated(prefix: str, hidden: int, width: int, biased: bool = False) -> Shapes:
    rows = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    shapes: Shapes = {f"{prefix}.{name}_proj.weight": shape for name, shape in rows.items()}
    if biased:
        shapes |= {f"{prefix}.{name}_proj.bias": shape[:1] for name, shape in rows.items()}
    return shapes


def _by_building(native: Json) -> Sizes:
    """An architecture without a formula is built on the meta device: seconds, but no memory."""
    import torch

    from adapters.native import build, first_line

    try:
        from transformers import AutoConfig

        config = AutoConfig.for_model(**native)
        model = build(config, torch.float32, torch.device("meta"))
    except Exception as error:  # transformers raises whatever its validators raise
        raise ValueError(f"transformers cannot build {native['model_type']}: {first_line(error)}") from error
    text = config.get_text_config().to_dict()
    heads, layers = text["num_attention_heads"], text["num_hidden_layers"]
    keys, size = text.get("num_key_value_heads") or heads, text.get("head_dim") or text["hidden_size"] // heads
    copies = set(model.all_tied_weights_keys) - {"lm_head.weight"}
    return Sizes(
        architecture=native["model_type"],
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in copies},
        tied=bool(text.get("tie_word_embeddings")),
        layers=layers,
        hidden=text["hidden_size"],
        heads=heads,
        key_value_heads=keys,
        head_size=size,
        vocabulary=text["vocab_size"],
        slot=2 * layers * keys * size,
        experts=text.get("num_experts") or text.get("num_local_experts"),
        experts_per_token=text.get("num_experts_per_tok") or text.get("top_k_experts"),
    )
