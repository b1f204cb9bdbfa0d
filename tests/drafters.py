"""A small DFlash drafter with random weights under its published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SMALL: dict[str, Any] = {
    **{"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 3},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 64},
    **{"max_position_embeddings": 128, "layer_types": ["full_attention"] * 2},
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2]},
}


def write_drafter(folder: Path, **changes: Any) -> Path:
    """For a target of 3 layers of width 32 and 64 ids; ``changes`` go into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    shapes: dict[str, tuple[int, ...]] = {"fc": (32, 64), "hidden_norm": (32,), "norm": (32,)}
    for n in range(2):
        mlp = {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
        heads = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
        own = {f"self_attn.{name}": shape for name, shape in {**heads, "q_norm": (8,), "k_norm": (8,)}.items()}
        norms = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"layers.{n}.{name}": shape for name, shape in {**own, **mlp, **norms}.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.1 * noise if len(shape) == 1 else 1.5 * noise / shape[1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    return folder
