"""DFlash's drafter: equal to the authors' outputs and to a plain formula, whatever its context came in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.attention import Visibility
from adapters.base import DeviceAdapter, Request
from adapters.description import describe
from adapters.dflash import DFlashDrafter, build_drafter, load_drafter
from adapters.draft_config import draft_config, spread_layers
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.taps import features, tapped
from adapters.transformer import TransformerAdapter
from samplers import Forward
from tests import layouts, reference
from tests.drafters import SMALL, write_drafter
from tests.shared import shared

LATER = {  # of the second published layout
    **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True},
    "dflash_config": {
        **{"mask_token_id": 63, "target_layer_ids": [0, 2], "block_size": 6, "input_embedding_scale": 1.5},
        **{"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    },
}
QWEN3 = {
    **SMALL,
    **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 5, "num_attention_heads": 32},
    **{"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1e6, "num_target_layers": 36},
    **{"max_position_embeddings": 40960, "block_size": 16, "layer_types": ["full_attention"] * 5},
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


# ---- golden ----------------------------------------------------------------------------------------------------------


def test_target_features_and_draft_equal_the_authors_within_2e_5() -> None:
    golden = load_file(shared("golden", "dflash", "forward.safetensors"))
    target = _target(shared("golden", "dflash", "target"))
    drafter = load_drafter(shared("golden", "dflash", "draft"), target)
    ids, block = golden["ids"], golden["block_ids"]
    hidden, caught = _run_target(target, ids, drafter.config.target_layers)
    drafter.open(1, 64)
    drafter.place(0, ids[0].tolist() + block[0].tolist(), 0)
    drafter.remember({0: range(21)}, caught)
    drafted = _hidden(drafter, {0: 21})
    for name, ours in {
        "target_logits": _headed(target, hidden),
        "target_hidden": caught,
        "draft_hidden": drafted,
        "draft_logits": _headed(drafter, drafted),
    }.items():
        assert ours.shape == golden[name].shape
        assert (ours - golden[name]).abs().max() < 2e-5, name


# ---- against the formula ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, LATER, {**LATER, "is_causal": False}, {"is_causal": True}])
def test_a_group_of_unequal_contexts_equals_the_formula(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = _drafter(tmp_path, **changes)
    starts, caught = {0: 9, 1: 4, 3: 9}, _noise(3, 9, 64)
    drafter.open(4, 32)
    for row, start in starts.items():
        drafter.place(row, _ids(row, start + drafter.config.block_size), 0)
    drafter.remember({row: range(start) for row, start in starts.items()}, caught)
    together = _logits(drafter, starts)
    for member, (row, start) in enumerate(starts.items()):
        block = _ids(row, start + drafter.config.block_size)[start:]
        wanted = _formula(tmp_path, caught[member, :start], torch.tensor(block))
        assert (together[member] - wanted).abs().max() < 1e-5
        alone = _logits(drafter, {row: start})
        assert (together[member] - alone[0]).abs().max() < 1e-5


def test_a_context_given_in_pieces_and_given_again_after_a_rejection_is_the_same_context(tmp_path: Path) -> None:
    drafter, caught = _drafter(tmp_path), _noise(1, 12, 64)
    drafter.open(1, 32)
    drafter.place(0, _ids(0, 16), 0)
    drafter.remember({0: range(12)}, caught)
    whole = _hidden(drafter, {0: 12})
    drafter.place(0, _ids(0, 16), 0)
    drafter.remember({0: range(7)}, caught[:, :7])
    _hidden(drafter, {0: 7})  # a block over slots 7 to 10, of which nothing may stay
    drafter.remember({0: range(7, 11)}, _noise(1, 4, 64, seed=5))
    drafter.remember({0: range(7, 9)}, caught[:, 7:9])
    _hidden(drafter, {0: 9})
    drafter.remember({0: range(9, 12)}, caught[:, 9:])
    assert (_hidden(drafter, {0: 12}) - whole).abs().max() < 1e-6


def test_the_drafter_answers_the_engines_requests(tmp_path: Path) -> None:
    drafter, caught = _drafter(tmp_path), _noise(1, 9, 64)
    drafter.open(1, 32)
    drafter.place(0, _ids(0, 13), 0)
    drafter.remember({0: range(9)}, caught)
    request = Request(0, Forward(range(9, 13), (10, 11, 12), context=range(9)), [], [])
    logits = _logits(drafter, {0: 9})[0].clone()
    logits[:, 63] = -torch.inf  # a mask is never drafted
    assert list(drafter.forward([request])[0].token.values()) == logits[1:].argmax(-1).tolist()


def test_taps_are_the_stream_after_a_layer_and_before_the_final_norm(tmp_path: Path) -> None:
    target = _target(layouts.write(tmp_path, "causal language model", num_hidden_layers=3))
    hidden, caught = _run_target(target, torch.tensor([_ids(0, 6)]), (0, 2))
    assert caught.shape == (1, 6, 64)
    norm: Any = target.body.norm
    assert torch.equal(norm(caught[..., 32:]), hidden)
    assert not any(layer._forward_hooks for layer in target.body.layers)  # type: ignore[union-attr]


# ---- sizes and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "billions"), [({}, 0.54), ({"hidden_size": 4096, "intermediate_size": 12288}, 1.05)]
)
def test_the_published_sizes_have_the_published_tensors(changes: dict[str, int], billions: float) -> None:
    network = build_drafter(draft_config({**QWEN3, **changes}), torch.bfloat16, torch.device("meta"))
    tensors = network.state_dict()
    assert len(tensors) == 58
    width = changes.get("hidden_size", 2560)
    assert tensors["fc.weight"].shape == (width, 5 * width)
    assert tensors["layers.4.self_attn.k_proj.weight"].shape == (1024, width)
    assert {"hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= set(tensors)
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert sum(tensor.numel() for tensor in tensors.values()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (24, 5, (1, 6, 11, 16, 21)), (28, 1, (14,))],
)
def test_layers_are_spread_as_published_where_none_are_listed(depth: int, count: int, layers: tuple[int, ...]) -> None:
    assert spread_layers(depth, count) == layers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 .* is not served"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is no drafter"),
        ({"num_target_layers": 4}, "belongs to a target of num_hidden_layers=4, but the target given has 3"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks 'mask_token_id'"),
        ({"layer_types": ["sliding_attention"] * 2}, "lacks 'sliding_window'"),
        ({"attention_bias": True}, "8 parameters got no tensor"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    target = _target(layouts.write(tmp_path / "target", "causal language model", num_hidden_layers=3))
    with pytest.raises(ValueError, match=said):
        load_drafter(write_drafter(tmp_path / "draft", **changes), target)


def test_a_drafter_given_as_the_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DFlashDraftModel is a drafter: it decodes only beside a target"):
        describe(ModelOptions("draft", path=str(write_drafter(tmp_path))))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _target(folder: Path) -> TransformerAdapter:
    adapter = load(describe(ModelOptions("target", path=str(folder))), torch.device("cpu"))
    assert isinstance(adapter, TransformerAdapter)
    return adapter


@torch.inference_mode()
def _run_target(target: TransformerAdapter, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    with tapped(target.body, layers) as caught:
        output = target.body(input_ids=ids, use_cache=False, visibility=Visibility(causal=True))
    return output.last_hidden_state, features(caught, layers)


def _drafter(folder: Path, **changes: Any) -> DFlashDrafter:
    target = _target(layouts.write(folder / "target", "causal language model", num_hidden_layers=3))
    target.model.double()
    return load_drafter(write_drafter(folder, **changes), target)


@torch.inference_mode()
def _headed(adapter: DeviceAdapter, hidden: Tensor) -> Tensor:
    return adapter.head(hidden)


def _logits(drafter: DFlashDrafter, starts: dict[int, int]) -> Tensor:
    return _headed(drafter, _hidden(drafter, starts))


@torch.inference_mode()
def _hidden(drafter: DFlashDrafter, starts: dict[int, int]) -> Tensor:
    size = drafter.config.block_size
    forwards = {row: Forward(range(start, start + size), context=range(start)) for row, start in starts.items()}
    return drafter.hidden(drafter._group([Request(row, forward, [], []) for row, forward in forwards.items()]))


def _formula(folder: Path, caught: Tensor, block: Tensor) -> Tensor:
    """(W, V) logits of a block of ids behind the features (C, F·D), in float64."""
    config = json.loads((folder / "config.json").read_text())
    own, weights = config["dflash_config"], reference.read(folder)
    embedding = reference.read(folder / "target")["model.embed_tokens.weight"]
    fused = reference.rms(caught @ weights["fc.weight"].T, weights["hidden_norm.weight"], 1e-6)
    stream = embedding[block] * own.get("input_embedding_scale", 1)
    for n, kind in enumerate(config["layer_types"]):
        w = reference.under(weights, f"layers.{n}.")
        visible = _visible(len(caught), len(block), kind == "sliding_attention", config)
        stream = stream + _attended(stream, fused, w, visible) @ w["self_attn.o_proj.weight"].T
        seen = reference.rms(stream, w["post_attention_layernorm.weight"], 1e-6)
        stream = stream + reference.feed_forward(seen, w, "mlp.")
    head = reference.read(folder / "target")["lm_head.weight"]
    logits = reference.rms(stream, weights["norm.weight"], 1e-6) @ head.T * own.get("output_multiplier", 1)
    cap = own.get("final_logit_softcapping")
    return cap * (logits / cap).tanh() if cap else logits


def _attended(stream: Tensor, fused: Tensor, w: dict[str, Tensor], visible: Tensor) -> Tensor:
    seen = reference.rms(stream, w["input_layernorm.weight"], 1e-6)
    both = torch.cat((fused, seen))
    queries, keys, values = (reference.heads(both @ w[f"self_attn.{name}_proj.weight"].T, 8) for name in "qkv")
    queries = reference.rotate(reference.rms(queries, w["self_attn.q_norm.weight"], 1e-6), 10000.0, 8)
    keys = reference.rotate(reference.rms(keys, w["self_attn.k_norm.weight"], 1e-6), 10000.0, 8)
    return reference.attend(queries[:, len(fused) :], keys, values, visible)


def _visible(context: int, width: int, slides: bool, config: dict[str, Any]) -> Tensor:
    stated = config.get("is_causal")
    causal = slides if stated is None else stated
    ahead = torch.arange(context + width) - torch.arange(context, context + width)[:, None]
    visible = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return visible & (ahead.abs() < config["sliding_window"]) if slides else visible


def _ids(seed: int, count: int) -> list[int]:
    return torch.randint(60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
