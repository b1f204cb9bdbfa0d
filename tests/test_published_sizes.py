"""Every published size, without its weights: its tensors fill the native network exactly, and their number is known.

Names and shapes come from `tests.layouts`, configurations from what ``conf/model`` records. Totals are those that the
authors state, in billions: the papers of LLaDA (arXiv 2502.09992, 8.02), LLaDA2.0 (16 and 100), LLaDA-MoE (7), the
reports of Qwen2.5 (1.54, 7.61) and Qwen3 (1.7, 4.0, 8.2, 30.5), whose networks Dream, Fast-dLLM v2 and SDAR continue.
"""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from adapters.families import family_of
from adapters.native import build, native_config, parameter_count
from adapters.tensors import Piece, pieces
from tests.layouts import LAYOUTS, shapes

MODELS = Path(__file__).resolve().parents[1] / "conf" / "model"
META = torch.device("meta")

# billions, the precision to which they are stated, mask, trained block, where row i - 1 is read
STATED: dict[str, tuple[float, float, int, int | None, int]] = {
    "llada": (8.02, 0.01, 126336, None, 0),
    "llada_moe": (7, 0.5, 156895, None, 0),
    "llada2_mini": (16, 0.5, 156895, 32, 0),
    "llada2_flash": (100, 5, 156895, 32, 0),
    "dream": (7.61, 0.01, 151666, None, 1),
    "fast_dllm_v2_1_5b": (1.54, 0.01, 151665, 32, 1),
    "fast_dllm_v2_7b": (7.61, 0.01, 151665, 32, 1),
    "sdar_1_7b": (1.7, 0.05, 151669, 4, 0),
    "sdar_4b": (4.0, 0.05, 151669, 4, 0),
    "sdar_8b": (8.2, 0.05, 151669, 4, 0),
    "sdar_30b_a3b": (30.5, 0.05, 151669, 4, 0),
}


@cache
def published(name: str) -> dict[str, Any]:
    """The recorded facts of a model, with those of the one it says it resembles beneath."""
    return OmegaConf.to_container(_recorded(name).published, resolve=True)  # type: ignore[return-value]


def _recorded(name: str) -> DictConfig:
    own = OmegaConf.load(MODELS / f"{name}.yaml")
    assert isinstance(own, DictConfig)
    below = [_recorded(other) for other in own.get("defaults", []) if other != "_self_"]
    merged = OmegaConf.merge(*below, own)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def with_facts() -> list[str]:
    """One model for each set of recorded sizes, of every family whose layout we know."""
    found: dict[str, str] = {}
    for name in sorted((file.stem for file in MODELS.glob("*.yaml")), key=lambda name: (name not in STATED, name)):
        if "published" in _recorded(name) and _has_layout(published(name)):
            sizes = {key: value for key, value in published(name).items() if "token" not in key}
            found.setdefault(json.dumps(sizes, sort_keys=True), name)
    return list(found.values())


def _has_layout(config: dict[str, Any]) -> bool:
    layout = LAYOUTS.get(family_of(config).name)
    return layout is not None and layout.config["model_type"] == config["model_type"]


def test_every_stated_size_has_its_facts_recorded() -> None:
    assert set(STATED) <= set(with_facts())


def listed(config: dict[str, Any], layout: str | None = None) -> dict[str, tuple[int, ...]]:
    return shapes(LAYOUTS[layout or family_of(config).name], config)


def misfits(config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> list[str]:
    """Tensors of a checkpoint that have no place, another shape or a taken place; then parameters left unfilled."""
    family = family_of(config)
    targets = build(native_config(family, config), torch.bfloat16, META).state_dict(keep_vars=True)
    unfilled, taken, faults = {key: target.numel() for key, target in targets.items()}, set(), []
    for name, shape in tensors.items():
        found = pieces(family.rules, name, config)
        if sum(prod(_cut(piece, shape)) for piece in found) != prod(shape):
            faults.append(name)
        for piece in found:
            spot, target = (piece.target, piece.expert, piece.part), targets.get(piece.target)
            if target is None or tuple(piece.view(target).shape) != _cut(piece, shape) or spot in taken:
                faults.append(name)
                continue
            taken.add(spot)
            unfilled[piece.target] -= prod(_cut(piece, shape))
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return faults + [key for key, number in unfilled.items() if number and key not in tied]


def _cut(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if piece.rows is None else (piece.rows[1] - piece.rows[0], *shape[1:])


@pytest.mark.parametrize("name", with_facts())
def test_the_published_tensors_fill_every_parameter_once_and_none_is_left(name: str) -> None:
    config = published(name)
    assert misfits(config, listed(config)) == []


def test_merged_experts_fill_the_same_parameters() -> None:
    """The form in which LLaDA2's and DMax's trainings write them."""
    config = {**published("llada2_mini"), "model_type": "llada2_moe_veomni"}
    assert misfits(config, listed(config, "LLaDA2, experts merged")) == []


@pytest.mark.parametrize("name", ["llada", "llada_moe", "dream"])
def test_a_tensor_too_many_too_few_or_of_another_shape_is_named(name: str) -> None:
    """The counterproof of the check above."""
    config = published(name)
    tensors = listed(config)
    gone = next(iter(tensors))
    assert misfits(config, {**tensors, "model.layers.0.mlp.gate.extra": (4,)}) == ["model.layers.0.mlp.gate.extra"]
    assert len(misfits(config, {key: shape for key, shape in tensors.items() if key != gone})) == 1
    assert gone in misfits(config, {**tensors, gone: (7, 7)})


@pytest.mark.parametrize("name", STATED)
def test_mask_block_and_shift_are_the_authors(name: str) -> None:
    _, _, mask, block, shift = STATED[name]
    family, config = family_of(published(name)), published(name)
    assert (family.mask_id(config), family.trained_block(config), family.shift) == (mask, block, shift)


@pytest.mark.parametrize("name", STATED)
def test_parameters_add_up_to_what_the_authors_state(name: str) -> None:
    billions, precision, *_ = STATED[name]
    config = published(name)
    family = family_of(config)
    number = sum(prod(shape) for tensor, shape in listed(config).items() if "expert_bias" not in tensor)
    assert abs(number / 1e9 - billions) <= precision
    assert number == parameter_count(build(native_config(family, config), torch.bfloat16, META))
