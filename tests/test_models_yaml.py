"""Every published model's YAML: it composes, its recorded facts are a model's, and they amount to what is published."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
import yaml

from adapters.checkpoints.converted import converts
from adapters.draft_config import draft_config, refuse_foreign_target
from adapters.facts import inspect
from adapters.families import family_of
from adapters.memory import FORMULAS, GEMMA, sizes
from adapters.native import build, native_config, parameter_count
from adapters.places import ModelOptions
from pipeline.compose import compose, conf_folder, options
from pipeline.config import plain

FOLDER = conf_folder() / "model"
TEXTS = {name: (FOLDER / f"{name}.yaml").read_text() for name in options("model")}
OURS = ("tiny", "toy")  # trained here, or no model at all
PUBLISHED = [name for name in TEXTS if not name.startswith(OURS)]
PAIRS = [name for name in PUBLISHED if "draft" in yaml.safe_load(TEXTS[name])]  # a target and its drafter
CHILDREN = [name for name in PUBLISHED if "defaults" in yaml.safe_load(TEXTS[name]) and name not in PAIRS]

BILLIONS = {  # total and active for a token, as specifications, model names or the bases' cards have them
    **dict.fromkeys(("llada", "llada_base", "llada_1_5", "d2f_llada", "dparallel_llada", "tad_llada"), (8.02, 8.02)),
    **dict.fromkeys(("dream", "dream_coder", "diffucoder", "d3llm_dream", "fast_dllm_v2_7b"), (7.62, 7.62)),
    **dict.fromkeys(("llada2_mini", "llada2_mini_cap", "llada21_mini", "dmax_math", "dmax_16b"), (16.26, 1.44)),
    **dict.fromkeys(("llada2_flash", "llada2_flash_cap", "llada21_flash"), (100.0, 6.1)),
    "llada_moe": (7.36, 1.72),
    "fast_dllm_v2_1_5b": (1.54, 1.54),
    "sdar_1_7b": (1.72, 1.72),
    "sdar_4b": (4.02, 4.02),
    "sdar_8b": (8.19, 8.19),
    "sdar_30b_a3b": (30.5, 3.3),
    "qwen3_4b": (4.02, 4.02),
    "qwen3_8b": (8.19, 8.19),
    "smollm2": (0.1345, 0.1345),
    "diffusion_gemma": (25.2, 3.8),
}


@cache
def model(name: str) -> ModelOptions:
    return ModelOptions(**plain(compose([f"model={name}"]).model))


def natives() -> dict[str, dict[str, Any]]:
    """Every native configuration that the recorded facts come to, once, by the first model that has it."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in PUBLISHED:
        facts = model(name).published
        found.setdefault(json.dumps(facts, sort_keys=True), (name, facts))
    return dict(found.values())


NATIVES = natives()
_VISION = "vision"


@pytest.mark.parametrize("name", PUBLISHED)
def test_recorded_facts_are_a_models_of_the_family_table(name: str) -> None:
    found = inspect(model(name))
    ids = {*found.facts.end_ids, *([] if found.facts.mask_id is None else [found.facts.mask_id])}
    assert found.facts.end_ids and all(0 <= id_ < found.facts.vocab_size for id_ in ids)
    assert (found.facts.mask_id is None) == (found.facts.attention in ("causal", "canvas"))
    assert found.sizes.architecture in (*FORMULAS, GEMMA) and found.sizes.vocabulary == found.facts.vocab_size


@pytest.mark.parametrize("name", NATIVES)
def test_what_is_computed_from_the_facts_is_what_transformers_builds(name: str) -> None:
    family = family_of(NATIVES[name])
    built = build(native_config(family, NATIVES[name]), torch.bfloat16, torch.device("meta"))
    computed = inspect(model(name)).sizes
    if computed.architecture in FORMULAS:
        assert set(computed.ignored) == set(built._keys_to_ignore_on_load_unexpected or ())
        assert computed.complete != converts(built)
    assert {key: tuple(tensor.shape) for key, tensor in _language(built).items()} == computed.shapes
    seen = sum(tensor.numel() for key, tensor in built.named_parameters() if _VISION in key)
    assert parameter_count(built) - seen == computed.parameters


def _language(built: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the language model, each under one name where an encoder and a decoder share them."""
    tensors = built.state_dict()
    if not any(key.startswith("model.decoder.") for key in tensors):
        return tensors
    return {key: value for key, value in tensors.items() if key.startswith("model.decoder.") and "scalar" not in key}


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_those_published(name: str) -> None:
    total, active = BILLIONS[name]
    found = inspect(model(name)).sizes
    assert found.parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert found.active / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_yaml_says_what_it_is_which_commit_and_whether_it_ever_ran(name: str) -> None:
    text, chosen = TEXTS[name], model(name)
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert text.startswith("# ") and ("Never run on the released weights." in comment) != (name == "smollm2")
    assert "Published" in comment or "published" in comment or chosen.package
    if chosen.revision is None:
        assert "not pinned: " in text
    else:
        assert re.fullmatch(r"[0-9a-f]{40}", chosen.revision)
    assert chosen.name == name and chosen.dtype is None


@pytest.mark.parametrize("name", CHILDREN)
def test_a_model_that_shares_anothers_facts_does_not_inherit_its_place(name: str) -> None:
    own = yaml.safe_load(TEXTS[name])
    parent = model(own["defaults"][0])
    assert {"name", "hub", "revision"} <= set(own)
    assert own["hub"] != parent.hub and (own["revision"] is None or own["revision"] != parent.revision)


@pytest.mark.parametrize("name", PAIRS)
def test_a_recorded_drafter_belongs_to_its_target(name: str) -> None:
    own, target = model(name), model(yaml.safe_load(TEXTS[name])["defaults"][0])
    assert (own.hub, own.revision, own.published) == (target.hub, target.revision, target.published)
    facts, drafter = inspect(own).facts, draft_config(own.draft_published)
    refuse_foreign_target(drafter, native_config(family_of(own.published), own.published), facts.vocab_size)
    assert facts.draft is not None and facts.draft.trained_block == drafter.block_size


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("d2f")])
def test_the_base_under_a_lora_is_the_model_whose_facts_it_shares(name: str) -> None:
    lora, parent = model(name), model(yaml.safe_load(TEXTS[name])["defaults"][0])
    assert (lora.base, lora.base_revision, lora.published) == (parent.hub, parent.revision, parent.published)


def test_end_tokens_have_recorded_ids() -> None:
    for name in PUBLISHED:
        chosen = model(name)
        assert set(chosen.end_tokens) == set(chosen.published.get("token_ids") or {}), name


def test_sizes_of_an_architecture_without_a_formula_come_from_building_it() -> None:
    native = {"model_type": "olmo2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    native |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    found = sizes(native)
    assert (found.layers, found.heads, found.key_value_heads, found.head_size) == (2, 4, 2, 8)
    assert found.parameters == sum(torch.Size(shape).numel() for shape in found.shapes.values())
