"""Small networks with random weights, built on the spot: enough to hold the engine and the adapters to their word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from adapters import attention
from adapters.text import IdCodec
from adapters.transformer import TransformerAdapter
from samplers import ModelFacts
from tests.layouts import LAYOUTS, shapes

VOCABULARY, MASK, END = 61, 60, 59

LLADA_CONFIG = {
    **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "vocab_size": 61, "embedding_size": 64},
    **{"d_model": 32, "mlp_hidden_size": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4},
    **{"max_sequence_length": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "mask_token_id": 60},
    **{"eos_token_id": 59, "pad_token_id": 59},
}


def random_llama(causal: bool = False, **changes: Any) -> TransformerAdapter:
    """A Llama of 2 layers with grouped heads whose predictions depend sharply on what it sees.

    ``causal``: autoregressive; else masked diffusion as LLaDA's. ``changes`` go into its configuration.
    """
    attention.register()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(**{"vocab_size": VOCABULARY, "pad_token_id": None, **shape, **heads, **changes})
    config._attn_implementation = attention.NAME
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 2 / parameter.shape[1] ** 0.5, generator=generator)
    return TransformerAdapter(model, llama_facts(causal, config), IdCodec(config.vocab_size))


def llama_facts(causal: bool, config: LlamaConfig) -> ModelFacts:
    served = {"causal"} if causal else {"full", "blocks"}
    return ModelFacts(
        vocab_size=config.vocab_size,
        mask_id=None if causal else config.vocab_size - 1,
        end_ids=frozenset({config.vocab_size - 2}),
        shift=int(causal),
        attention="causal" if causal else "full",
        attentions=frozenset(served),
        max_positions=config.max_position_embeddings,
    )


def llada_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the names of a published LLaDA checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in shapes(LAYOUTS["LLaDA"], config).items()}


def write_llada(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A model folder in LLaDA's layout, without a tokenizer."""
    config = {**LLADA_CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(llada_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder
