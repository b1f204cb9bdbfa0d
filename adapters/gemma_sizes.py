"""What DiffusionGemma's language model holds: layers of two kinds, whose heads and key-value heads differ.

Named as its decoder names them; the encoder has the same tensors. The vision tower, which text needs not, is left out.
"""

from __future__ import annotations

from adapters.tensors import Json

Shapes = dict[str, tuple[int, ...]]
NORMS = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)


def is_full(text: Json, layer: int) -> bool:
    """Whether a layer attends to all; the others look back one sliding window. Unsaid, every sixth and the last do."""
    if kinds := text.get("layer_types"):
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % 6 == 0 or layer == text["num_hidden_layers"] - 1


def heads_of(text: Json, layer: int) -> tuple[int, int]:
    """Key-value heads of a layer and their size."""
    if is_full(text, layer):
        return text.get("num_global_key_value_heads") or text["num_key_value_heads"], text.get("global_head_dim", 512)
    return text["num_key_value_heads"], text["head_dim"]


def shapes(text: Json) -> Shapes:
    """Every tensor that has a shape of its own.

    Args:
        text: the configuration's ``text_config``.
    """
    hidden, width = text["hidden_size"], text["intermediate_size"]
    found: Shapes = {"model.decoder.embed_tokens.weight": (text["vocab_size"], hidden)}
    for layer in range(text["num_hidden_layers"]):
        parts = {**_attention(text, layer), **_experts(text), **gated("mlp", hidden, width)}
        parts |= {f"{norm}.weight": (hidden,) for norm in NORMS}
        found |= {f"model.decoder.layers.{layer}.{name}": shape for name, shape in parts.items()}
    found |= gated("model.decoder.self_conditioning", hidden, width)
    found |= {"model.decoder.self_conditioning.pre_norm.weight": (hidden,), "model.decoder.norm.weight": (hidden,)}
    return found


def slot_elements(text: Json) -> int:
    """Numbers that one slot's keys and values take in all layers together."""
    return sum(2 * heads * size for heads, size in (heads_of(text, n) for n in range(text["num_hidden_layers"])))


def _attention(text: Json, layer: int) -> Shapes:
    hidden, (heads, size) = text["hidden_size"], heads_of(text, layer)
    queries = text["num_attention_heads"] * size
    found: Shapes = {"self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (heads * size, hidden)}
    if not is_full(text, layer):  # where all is seen, keys serve as values
        found["self_attn.v_proj.weight"] = (heads * size, hidden)
    norms: Shapes = {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return {**found, "self_attn.o_proj.weight": (hidden, queries), **norms}


def _experts(text: Json) -> Shapes:
    hidden, count, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    return {
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
        "router.proj.weight": (count, hidden),
        "experts.gate_up_proj": (count, 2 * width, hidden),
        "experts.down_proj": (count, hidden, width),
    }


def gated(prefix: str, hidden: int, width: int, biased: bool = False) -> Shapes:
    """A feed-forward network of three matrices."""
    rows = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    found: Shapes = {f"{prefix}.{name}_proj.weight": shape for name, shape in rows.items()}
    if biased:
        found |= {f"{prefix}.{name}_proj.bias": shape[:1] for name, shape in rows.items()}
    return found
