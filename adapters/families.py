"""The family table: how a checkpoint's configuration and tensors map onto a native `transformers` architecture.

A new family is one more `Family` in `FAMILIES`; the first whose recogniser says yes is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: shown to the user.
        recognises: whether a ``config.json`` is of this family.
        config: the native architecture's configuration, as arguments of `transformers.AutoConfig.for_model`; None
            where the file already is a native configuration.
        renames: (pattern, replacement) pairs, tried in order on each tensor's name; the first that matches the whole
            name wins, a name that no pattern matches stays.
        attention: the pattern it was trained with: ``full``, ``causal`` or ``blocks``.
        shift: row of the prediction for slot i is ``i - shift``.
        block_origin: ``prompt`` or ``zero``, see `samplers.ModelFacts`.
        mask_id: reads the mask id out of ``config.json``.
    """

    name: str
    recognises: Callable[[Json], bool]
    attention: str
    shift: int
    config: Callable[[Json], dict[str, Any]] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    block_origin: str = "prompt"
    mask_id: Callable[[Json], int | None] = lambda config: config.get("mask_token_id")

    @property
    def attentions(self) -> frozenset[str]:
        """Patterns it can serve: a mask can always hide more than the training did."""
        served = {"full": {"full", "blocks"}, "blocks": {"blocks"}, "causal": {"causal"}}
        return frozenset(served[self.attention])

    def rename(self, name: str) -> str:
        """The native name of a checkpoint's tensor."""
        for pattern, replacement in self.renames:
            if match := re.fullmatch(pattern, name):
                return match.expand(replacement)
        return name


def _llada_config(config: Json) -> dict[str, Any]:
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
        "bos_token_id": None,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }


_BLOCK = r"model\.transformer\.blocks\.(\d+)\."

FAMILIES: tuple[Family, ...] = (
    Family(
        name="LLaDA",
        recognises=lambda config: config.get("model_type") == "llada",
        config=_llada_config,
        renames=(
            (r"model\.transformer\.wte\.(.+)", r"model.embed_tokens.\1"),
            (r"model\.transformer\.ln_f\.(.+)", r"model.norm.\1"),
            (r"model\.transformer\.ff_out\.(.+)", r"lm_head.\1"),
            (_BLOCK + r"attn_norm\.(.+)", r"model.layers.\1.input_layernorm.\2"),
            (_BLOCK + r"ff_norm\.(.+)", r"model.layers.\1.post_attention_layernorm.\2"),
            (_BLOCK + r"(q_proj|k_proj|v_proj)\.(.+)", r"model.layers.\1.self_attn.\2.\3"),
            (_BLOCK + r"attn_out\.(.+)", r"model.layers.\1.self_attn.o_proj.\2"),
            (_BLOCK + r"ff_proj\.(.+)", r"model.layers.\1.mlp.gate_proj.\2"),
            (_BLOCK + r"up_proj\.(.+)", r"model.layers.\1.mlp.up_proj.\2"),
            (_BLOCK + r"ff_out\.(.+)", r"model.layers.\1.mlp.down_proj.\2"),
        ),
        attention="full",
        shift=0,
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
        mask_id=lambda config: None,
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
