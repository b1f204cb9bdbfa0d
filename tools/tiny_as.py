"""Write the trained tiny model in the key layout of a published family, to run that family's path on real weights.

    python tools/tiny_as.py llada /tmp/tiny-llada
    python -m pipeline sampler=threshold model=llada model.path=/tmp/tiny-llada

decodes token for token as ``model=tiny`` does. Dream and Fast-dLLM v2 read one row earlier, and the latter attends by
blocks, which the tiny model was not trained for: the tool prints the overrides with which their layouts run it too.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

SOURCE = Path(__file__).resolve().parents[1] / "adapters" / "tiny" / "llada"
SPARE = "\u00c0\u00c1"  # the tokens of two bytes that no text in UTF-8 contains
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]

_LAYER = r"model\.layers\.(\d+)\."
_BLOCK = r"model.transformer.blocks.\1."
TO_LLADA = {
    r"model\.embed_tokens": "model.transformer.wte",
    r"model\.norm": "model.transformer.ln_f",
    r"lm_head": "model.transformer.ff_out",
    _LAYER + r"input_layernorm": _BLOCK + "attn_norm",
    _LAYER + r"post_attention_layernorm": _BLOCK + "ff_norm",
    _LAYER + r"self_attn\.(q_proj|k_proj|v_proj)": _BLOCK + r"\2",
    _LAYER + r"self_attn\.o_proj": _BLOCK + "attn_out",
    _LAYER + r"mlp\.gate_proj": _BLOCK + "ff_proj",
    _LAYER + r"mlp\.up_proj": _BLOCK + "up_proj",
    _LAYER + r"mlp\.down_proj": _BLOCK + "ff_out",
}


@dataclass(frozen=True)
class Target:
    """How a family would have published the tiny model.

    Attributes:
        end_tokens: tokens that the family's vocabulary has and the tiny one lacks.
        overrides: with which the family's rules suit a model that was trained as LLaDA is.
    """

    tensors: Callable[[Tensors], Tensors]
    config: Callable[[Json], Json]
    end_tokens: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def to_llada(tensors: Tensors) -> Tensors:
    """Llama's names to LLaDA's."""
    return {_renamed(name): tensor for name, tensor in tensors.items()}


def _renamed(name: str) -> str:
    for pattern, target in TO_LLADA.items():
        if match := re.fullmatch(pattern + r"\.weight", name):
            return match.expand(target) + ".weight"
    raise ValueError(f"LLaDA has no name for {name}")


def to_qwen(tensors: Tensors) -> Tensors:
    """Qwen2's names are Llama's; the biases it has besides are zero."""
    biased = re.compile(r"(.*self_attn\.[qkv]_proj)\.weight")
    heads = {match[1]: tensor for name, tensor in tensors.items() if (match := biased.fullmatch(name))}
    return {**tensors, **{f"{name}.bias": tensor.new_zeros(len(tensor)) for name, tensor in heads.items()}}


def llada_config(native: Json) -> Json:
    return {
        **{"model_type": "llada", "architectures": ["LLaDAModelLM"], **_ids(native)},
        **{"vocab_size": native["vocab_size"], "embedding_size": native["vocab_size"], "block_type": "llama"},
        **{"d_model": native["hidden_size"], "mlp_hidden_size": native["intermediate_size"]},
        **{"n_layers": native["num_hidden_layers"], "n_heads": native["num_attention_heads"]},
        **{"n_kv_heads": native["num_key_value_heads"], "rope_theta": native["rope_parameters"]["rope_theta"]},
        **{"max_sequence_length": native["max_position_embeddings"], "rms_norm_eps": native["rms_norm_eps"]},
        **{"weight_tying": False, "include_bias": False, "include_qkv_bias": False, "torch_dtype": "float32"},
    }


def qwen_config(model_type: str, architecture: str) -> Callable[[Json], Json]:
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
    )

    def config(native: Json) -> Json:
        kept = {**_ids(native), **{key: native[key] for key in same}, "torch_dtype": "float32"}
        theta = native["rope_parameters"]["rope_theta"]
        return {"model_type": model_type, "architectures": [architecture], "rope_theta": theta, **kept}

    return config


def _ids(native: Json) -> Json:
    return {key: native[key] for key in ("mask_token_id", "eos_token_id", "pad_token_id")}


TARGETS = {
    "llada": Target(to_llada, llada_config, ("<|endoftext|>", "<|eot_id|>")),
    "dream": Target(to_qwen, qwen_config("Dream", "DreamModel"), ("<|im_end|>",), ("model.shift=0",)),
    "fast_dllm_v2_7b": Target(
        to_qwen,
        qwen_config("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM"),
        overrides=("model.shift=0", "model.attention=full", "model.block_origin=prompt"),
    ),
}
REFUSED = {"sdar": "SDAR normalises queries and keys, which the tiny model does not: use model=tiny_sdar"}


def write_as(name: str, folder: Path) -> list[str]:
    """Write the folder; returns the arguments with which ``python -m pipeline`` runs it.

    Raises:
        ValueError: one sentence, if the family cannot hold these weights, or the folder holds other files.
        OSError: if it cannot be written.
    """
    if name not in TARGETS:
        raise ValueError(REFUSED.get(name, f"{name} is unknown: use {', '.join(TARGETS)}"))
    target = TARGETS[name]
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(target.tensors(load_file(SOURCE / "model.safetensors")), folder / "model.safetensors")
    for file in COPIED:
        shutil.copy(SOURCE / file, folder)
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text())
    _write_json(folder / "tokenizer.json", _with_tokens(tokenizer, target.end_tokens))
    _write_json(folder / "config.json", target.config(_native()))
    return [f"model={name}", f"model.path={folder}", *target.overrides]


def _refuse_foreign(folder: Path) -> None:
    """Refuse to write where anything lies that was not written here: the files' names and the configuration tell."""
    if not folder.is_dir() or not (there := {path.name for path in folder.iterdir()}):
        return
    ours = [target.config(_native()) for target in TARGETS.values()]
    try:
        known = json.loads((folder / "config.json").read_text()) in ours
    except (OSError, ValueError):
        known = False
    if not known or there - {*COPIED, "model.safetensors", "tokenizer.json", "config.json"}:
        raise ValueError(f"{folder} holds files that were not written by this tool: name a new or an empty folder")


def _native() -> Json:
    return json.loads((SOURCE / "config.json").read_text())


def _with_tokens(tokenizer: Json, tokens: tuple[str, ...]) -> Json:
    """Name further special tokens, in the place of bytes that occur in no text: no encoding changes."""
    ids = dict(tokenizer["model"]["vocab"])
    for spare, token in zip(SPARE, tokens):
        ids[token] = ids.pop(spare)
    added = tokenizer["added_tokens"]
    added = [*added, *({**added[0], "id": ids[token], "content": token} for token in tokens)]
    return {**tokenizer, "added_tokens": added, "model": {**tokenizer["model"], "vocab": ids}}


def _write_json(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        arguments = write_as(given.family, given.folder)
    except OSError as error:
        return _failed(f"{given.folder} cannot be written ({error.strerror or error})")
    except ValueError as error:
        return _failed(str(error))
    except SafetensorError as error:
        return _failed(f"{given.folder} cannot be written ({error})")
    print(shlex.join(["python", "-m", "pipeline", *arguments]))
    return 0


def _failed(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
