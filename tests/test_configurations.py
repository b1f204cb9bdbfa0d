"""What a configuration says is followed or refused, by `describe` and by `inspect` alike, and never dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN

from adapters.description import describe
from adapters.facts import inspect
from adapters.families import family_of
from adapters.keys import ACTIVATIONS
from adapters.loading import load
from adapters.native import build, first_line, native_config
from adapters.places import ModelOptions
from tests.layouts import LAYOUTS, write

YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
SCALED = {"linear": {"type": "linear", "factor": 2.0}, "yarn": YARN, "llama3": LLAMA3}


def changed(folder: Path, name: str, **changes: Any) -> Path:
    """A family's sound checkpoint whose configuration says something else; None is null."""
    write(folder, name)
    (folder / "config.json").write_text(json.dumps({**LAYOUTS[name].config, **changes}))
    return folder


def both(folder: Path) -> list[Callable[[], Any]]:
    """The two that look at a folder."""
    options = ModelOptions("it", path=str(folder))
    return [lambda: describe(options), lambda: inspect(options)]


def refused(folder: Path, said: str) -> None:
    """Both refuse, in one sentence that names the model and the file."""
    for look in both(folder):
        with pytest.raises(ValueError, match=said) as caught:
            look()
        assert re.match(rf"model=it: {folder}/(generation_)?config\.json[: ]", str(caught.value))
        assert "\n" not in str(caught.value) and "config.json: config.json" not in str(caught.value)


def served(folder: Path) -> None:
    for look in both(folder):
        look()


def rotations(config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of 100 positions as the native network of a configuration turns by them."""
    model = build(config, torch.float32, torch.device("cpu"))
    rotary = type(model.model.rotary_emb)(config)
    cosines, sines = rotary(torch.zeros(1), torch.arange(100)[None])
    return cosines, sines


# ---- rotary positions ------------------------------------------------------------------------------------------------

NATIVES = {"Dream": Qwen2Config, "Fast-dLLM v2": Qwen2Config, "SDAR": Qwen3Config, "LLaDA2": Glm4MoeConfig}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", NATIVES)
def test_scaled_positions_turn_as_those_of_a_native_configuration(name: str, kind: str) -> None:
    config = {**LAYOUTS[name].config, "rope_scaling": SCALED[kind]}
    own = native_config(family_of(config), config)
    said = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "layer_types")}
    said["rope_scaling"] = dict(SCALED[kind])
    native = NATIVES[name](**said)
    plain = native_config(family_of(config), {**config, "rope_scaling": None})
    for ours, theirs, unscaled in zip(rotations(own), rotations(native), rotations(plain), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, unscaled, atol=1e-2)


@pytest.mark.parametrize("name", NATIVES)
def test_the_words_of_transformers_5_mean_the_same(name: str) -> None:
    config = {**LAYOUTS[name].config, "rope_scaling": YARN}
    old = native_config(family_of(config), config).rope_parameters
    moved: dict[str, Any] = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    settings: dict[str, Any] = {**YARN, **moved, "rope_type": "yarn"}
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", *moved)}
    assert native_config(family_of(config), {**new, "rope_parameters": settings}).rope_parameters == old


ROTARY: dict[str, tuple[str, dict[str, Any], str]] = {
    "of a kind that follows the length": (
        "Dream",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling: rope_type=dynamic is not served: use default, linear, yarn or llama3",
    ),
    "without a factor": ("SDAR", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of rope_type=yarn lacks factor"),
    "factor in words": (
        "SDAR",
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        "rope_scaling: factor=2 is out of range: use a number above 0",
    ),
    "an unknown setting": (
        "SDAR",
        {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
        r"rope_scaling: mrope_section=\[1\] is not served",
    ),
    "no object": ("LLaDA2", {"rope_scaling": "yarn"}, "rope_scaling=yarn is out of range: use an object"),
    "no base": ("Dream", {"rope_theta": None}, "lacks 'rope_theta'"),
    "two bases": ("Dream", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta=50000.0 is 1.0 among the rotary"),
    "LLaDA's": ("LLaDA", {"rope_scaling": YARN}, "rope_scaling=.* is not served for LLaDA: leave it out"),
    "no share": ("LLaDA2", {"partial_rotary_factor": None}, "lacks 'partial_rotary_factor'"),
    "two shares": ("LLaDA2", {"rotary_dim": 4}, "rotary_dim=4 is not partial_rotary_factor=0.5 of a head of 16"),
    "a share where all is turned": ("Dream", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not served"),
}


@pytest.mark.parametrize("case", ROTARY)
def test_rotary_settings_that_are_not_served_are_refused(tmp_path: Path, case: str) -> None:
    name, changes, said = ROTARY[case]
    refused(changed(tmp_path, name, **changes), said)


def test_the_turned_part_may_be_stated_in_dimensions(tmp_path: Path) -> None:
    config = {**LAYOUTS["LLaDA2"].config, "partial_rotary_factor": None, "rotary_dim": 4}
    assert native_config(family_of(config), config).rope_parameters["partial_rotary_factor"] == 0.25


# ---- what a mapping takes for granted --------------------------------------------------------------------------------

OTHERWISE: dict[str, dict[str, Any]] = {
    "LLaDA": {
        **{"alibi": True, "rope": False, "scale_logits": True, "input_emb_norm": True, "activation_type": "gelu"},
        **{"layer_norm_type": "default", "block_type": "sequential", "block_group_size": 2, "clip_qkv": 8.0},
        **{"attention_layer_norm": True, "bias_for_layer_norm": True, "multi_query_attention": True},
        **{"include_bias": True, "include_qkv_bias": True, "layer_norm_with_affine": False},
    },
    "LLaDA-MoE": {
        **{"clip_qkv": 8.0, "moe_layer_freq": [0, 1], "num_shared_experts": 1, "qk_layernorm": False},
        **{"shared_expert_intermediate_size": 24, "moe_router_score_function": "sigmoid"},
        **{"moe_router_enable_expert_bias": True, "n_group": 2, "attention_bias": True},
    },
    "LLaDA2": {
        **{"score_function": "softmax", "moe_router_enable_expert_bias": False, "use_rmsnorm": False},
        **{"use_bias": True, "norm_softmax": True, "norm_head": True, "use_sliding_window": True},
        **{"using_split_qkv_in_self_attention": True, "router_dtype": "bf16"},
    },
    "Dream": {"use_sliding_window": True, "attention_bias": False, "layer_types": ["sliding_attention"] * 2},
    "Fast-dLLM v2": {"use_sliding_window": True, "mlp_bias": True},
    "SDAR": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "SDAR-MoE": {"use_sliding_window": True, "num_shared_experts": 1},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OTHERWISE.items() for key in keys])
def test_a_key_that_says_other_than_the_mapping_does_is_refused(tmp_path: Path, name: str, key: str) -> None:
    refused(changed(tmp_path, name, **{key: OTHERWISE[name][key]}), f"{key}=.* is not served for {name}: ")


@pytest.mark.parametrize("name", OTHERWISE)
def test_null_counts_as_absent(tmp_path: Path, name: str) -> None:
    nulls = dict.fromkeys((*OTHERWISE[name], "quantization_config", "rope_scaling", "hidden_act"))
    served(changed(tmp_path, name, **nulls))


# ---- values ----------------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("SDAR", {"eos_token_id": 254.0}, r"eos_token_id=254.0 is out of range: use an id or a list of ids"),
    ("SDAR", {"eos_token_id": "abc"}, r"eos_token_id=abc is out of range"),
    ("SDAR", {"eos_token_id": [62, "x"]}, r'eos_token_id=\[62, "x"\] is out of range'),
    ("SDAR", {"eos_token_id": [62, 64]}, r"eos_token_id=64 is no id of the vocabulary: use 0 to 63"),
    ("SDAR", {"eos_token_id": 63}, r"63 is the mask and an end id"),
    ("SDAR", {"architectures": [5]}, r"architectures=\[5\] is out of range: use a list of names"),
    ("SDAR", {"architectures": 5}, r"architectures=5 is out of range"),
    ("SDAR", {"model_type": ["sdar"]}, r'model_type=\["sdar"\] is out of range: use a name'),
    ("SDAR", {"text_config": "abc"}, r"text_config=abc is out of range: use an object"),
    ("SDAR", {"torch_dtype": "int7"}, r"torch_dtype=int7 is out of range: use float32, bfloat16 or float16"),
    ("SDAR", {"torch_dtype": 7}, r"torch_dtype=7 is out of range"),
    ("SDAR", {"mask_token_id": 9999}, r"mask_token_id=9999 is no id of the vocabulary: use 0 to 63"),
    ("SDAR", {"mask_token_id": None}, r"mask_token_id=151669, the family's own, is no id of the vocabulary"),
    ("SDAR", {"mask_token_id": -1}, r"mask_token_id=-1 is out of range: use a whole number from 0 up"),
    ("SDAR", {"mask_token_id": "x"}, r"mask_token_id=x is out of range"),
    ("SDAR", {"rope_theta": "500000"}, r"rope_theta=500000 is out of range: use a number above 0"),
    ("SDAR", {"rms_norm_eps": float("nan")}, r"rms_norm_eps=NaN is out of range"),
    ("SDAR", {"block_size": "4"}, r"block_size=4 is out of range: use a whole number from 1 up"),
    ("SDAR", {"block_size": 0}, r"block_size=0 is out of range"),
    ("SDAR", {"block_size": True}, r"block_size=true is out of range"),
    ("SDAR", {"hidden_act": "nonsense"}, r"hidden_act=nonsense is out of range: use an activation of transformers"),
    ("SDAR", {"num_hidden_layers": 1_000_000}, r"num_hidden_layers=1000000 is out of range: .* up to 1000"),
    ("SDAR", {"num_key_value_heads": 3}, r"num_key_value_heads=3 does not divide num_attention_heads=4"),
    ("SDAR", {"attention_bias": "yes"}, r"attention_bias=yes is out of range: use true or false"),
    ("LLaDA", {"max_sequence_length": -5}, r"max_sequence_length=-5 is out of range"),
    ("LLaDA", {"max_sequence_length": 0}, r"max_sequence_length=0 is out of range"),
    ("LLaDA", {"n_layers": 0}, r"n_layers=0 is out of range: use a whole number from 1 up to 1000"),
    ("LLaDA", {"embedding_size": 60}, r"vocab_size=64 is above embedding_size=60"),
    ("LLaDA", {"mlp_hidden_size": None}, r"lacks 'mlp_hidden_size'"),
    ("LLaDA2", {"n_group": 3}, r"n_group=3 does not divide num_experts=16"),
    ("LLaDA2", {"topk_group": 5}, r"topk_group=5 is above n_group=4"),
    ("LLaDA2", {"num_experts_per_tok": 99}, r"num_experts_per_tok=99 is above num_experts=16"),
    ("LLaDA2", {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is above the 8 experts of the chosen groups"),
    ("LLaDA2", {"n_group": 16}, r"n_group=16 leaves fewer than 2 of 16 experts to a group"),
    ("causal language model", {"eos_token_id": "abc"}, r"eos_token_id=abc is out of range"),
    ("causal language model", {"num_hidden_layers": 1_000_000}, r"num_hidden_layers=1000000 is out of range"),
    ("causal language model", {"hidden_act": "nonsense"}, r"hidden_act=nonsense is out of range"),
    ("SDAR", {"model_type": "what", "architectures": ["What"]}, r"model_type=what is of no known family"),
    ("SDAR", {"architectures": ["DFlashDraftModel"]}, r"DFlashDraftModel is a drafter"),
]


@pytest.mark.parametrize(("name", "changes", "said"), VALUES, ids=lambda value: str(value)[:50])
def test_a_value_that_is_none_is_refused_with_key_and_value(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    refused(changed(tmp_path, name, **changes), said)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (99, r"eos_token_id=99 of generation_config\.json is no id of the vocabulary: use 0 to 63"),
        (63, r"63 is the mask and an end id"),
        ("abc", r"generation_config\.json: eos_token_id=abc is out of range"),
        ([1, 2.5], r"generation_config\.json: eos_token_id=\[1, 2.5\] is out of range"),
    ],
)
def test_the_generation_configuration_is_held_to_the_same(tmp_path: Path, value: Any, said: str) -> None:
    folder = write(tmp_path, "SDAR")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(folder, said)


def test_the_activations_are_those_that_transformers_knows() -> None:
    assert set(ACTIVATIONS) == set(ACT2FN)


def test_another_librarys_sentence_is_not_cut_at_its_colon() -> None:
    error = ValueError("Validation error for field 'vocab_size':\n    TypeError: expected int, got 'x'\n  more")
    assert first_line(error) == "ValueError: Validation error for field 'vocab_size': TypeError: expected int, got 'x'"


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_whole_numbers_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write(tmp_path, "SDAR")
    file, key = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, key: tensors[key].to(dtype)}, file)
    with pytest.raises(ValueError, match=f"{key} is u?int8, no floating-point weight"):
        load(describe(ModelOptions("it", path=str(folder))), torch.device("cpu"))
    found = inspect(ModelOptions("it", path=str(folder))).fit
    assert found is not None and not found.faultless
    assert re.search(f"{key} is [UI]8, no floating-point weight", found.sentence())
