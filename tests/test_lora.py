"""LoRA folders: merged into their base by name, equal to the formula written out, or refused in one sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.attention import Visibility
from adapters.description import Description, describe
from adapters.loading import load
from adapters.places import ModelOptions
from tests.models import LLADA_CONFIG, llada_tensors, write_llada

pytest.importorskip("peft")

RANK, ALPHA = 4, 6
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "bias": "none",
}
LLADA_BLOCKS = "model.transformer.blocks"
DREAM = {
    **{"model_type": "Dream", "architectures": ["DreamModel"], "vocab_size": 61, "mask_token_id": 60},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
}


def dream_tensors() -> dict[str, torch.Tensor]:
    """Random tensors under the names of a published Dream checkpoint."""
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (61, 32), "model.norm.weight": (32,)}
    shapes["lm_head.weight"] = (61, 32)
    for layer in range(2):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.{norm}.weight": (32,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
            shapes |= {f"{stem}.self_attn.{name}.weight": (rows, 32), f"{stem}.self_attn.{name}.bias": (rows,)}
        shapes |= {f"{stem}.self_attn.o_proj.weight": (32, 32), f"{stem}.mlp.down_proj.weight": (32, 48)}
        shapes |= {f"{stem}.mlp.{name}.weight": (48, 32) for name in ("gate_proj", "up_proj")}
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def write_base(folder: Path, family: str, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    if family == "llada":
        tensors = tensors or {name: tensor / 4 for name, tensor in llada_tensors(LLADA_CONFIG).items()}
        write_llada(folder, tensors)
        return tensors
    tensors = tensors or dream_tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DREAM))
    save_file(tensors, folder / "model.safetensors")
    return tensors


TARGETS = {
    "llada": {
        f"{LLADA_BLOCKS}.{layer}.{name}": ((32, 32))
        for layer in range(2)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out")
    },
    "dream": {
        f"model.layers.{layer}.{name}": size
        for layer in range(2)
        for name, size in (
            *(("self_attn.q_proj", (32, 32)), ("self_attn.v_proj", (16, 32))),
            *(("self_attn.o_proj", (32, 32)), ("mlp.down_proj", (32, 48))),
        )
    },
}


def write_lora(folder: Path, base: Path | None, family: str, **changes: Any) -> dict[str, torch.Tensor]:
    """A random LoRA as peft saves it; returns its tensors without peft's prefix."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for module, (rows, columns) in TARGETS[family].items():
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / 4
        tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 4
    folder.mkdir()
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    ends = sorted({module.rpartition(".")[2] for module in TARGETS[family]})
    settings = {**SETTINGS, "target_modules": ends, "base_model_name_or_path": base and str(base), **changes}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def described(folder: Path, **options: Any) -> Description:
    return describe(ModelOptions("lora", path=str(folder), **options))


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """(T, V) in float32 under full attention."""
    adapter = load(described(folder, **options), torch.device("cpu"))
    with torch.inference_mode():
        body = adapter.body(input_ids=torch.arange(12)[None], use_cache=False, visibility=Visibility())  # type: ignore
        return adapter.head(body.last_hidden_state[0])  # type: ignore[attr-defined]


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        logits(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def merged_by_hand(
    base: dict[str, torch.Tensor], lora: dict[str, torch.Tensor], scale: float = ALPHA / RANK
) -> dict[str, torch.Tensor]:
    """W + scale * B A in float64."""
    merged = dict(base)
    for name in (name for name in lora if name.endswith("lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        down, up = lora[name].double(), lora[f"{module}.lora_B.weight"].double()
        merged[f"{module}.weight"] = (base[f"{module}.weight"].double() + scale * up @ down).float()
    return merged


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_a_lora_equals_its_formula_merged_by_hand(tmp_path: Path, family: str, rank_stabilised: bool) -> None:
    base = write_base(tmp_path / "base", family)
    lora = write_lora(tmp_path / "lora", tmp_path / "base", family, use_rslora=rank_stabilised)
    scale = ALPHA / RANK**0.5 if rank_stabilised else ALPHA / RANK
    write_base(tmp_path / "merged", family, merged_by_hand(base, lora, scale))
    ours, by_hand = logits(tmp_path / "lora"), logits(tmp_path / "merged")
    torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-5)
    assert (ours - logits(tmp_path / "base")).abs().max() > 0.1, "the LoRA changes what is predicted"


def test_ranks_and_scales_of_single_modules_follow_their_patterns(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llada")
    pattern = {"blocks.1.attn_out": 12}
    lora = write_lora(tmp_path / "lora", tmp_path / "base", "llada", alpha_pattern=pattern)
    merged = merged_by_hand(base, lora)
    other = merged_by_hand(base, lora, 12 / RANK)
    name = f"{LLADA_BLOCKS}.1.attn_out.weight"
    write_base(tmp_path / "merged", "llada", {**merged, name: other[name]})
    torch.testing.assert_close(logits(tmp_path / "lora"), logits(tmp_path / "merged"), rtol=0, atol=1e-5)


def test_whole_modules_that_were_trained_along_replace_the_base_models(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llada")
    lora = write_lora(tmp_path / "lora", tmp_path / "base", "llada", modules_to_save=["wte"])
    file, name = tmp_path / "lora" / "adapter_model.safetensors", "model.transformer.wte.weight"
    whole = torch.randn(base[name].shape, generator=torch.Generator().manual_seed(3))
    save_file({**load_file(file), f"base_model.model.{name}": whole}, file)
    write_base(tmp_path / "merged", "llada", {**merged_by_hand(base, lora), name: whole})
    torch.testing.assert_close(logits(tmp_path / "lora"), logits(tmp_path / "merged"), rtol=0, atol=1e-5)


def test_facts_are_the_bases_and_the_identity_is_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_base(tmp_path / "base", "llada")
    write_lora(tmp_path / "lora", tmp_path / "base", "llada")
    found, base = described(tmp_path / "lora"), described(tmp_path / "base")
    assert found.facts == base.facts and found.family.name == "LLaDA"
    identity = found.identity()
    assert identity != base.identity()
    write_lora(tmp_path / "scaled", tmp_path / "base", "llada", lora_alpha=7)
    assert described(tmp_path / "scaled").identity() != identity
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    assert described(tmp_path / "lora").identity() != identity


def test_the_base_may_be_named_by_the_user(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "dream")
    write_lora(tmp_path / "lora", None, "dream")
    assert "names no base model: set model.base to a folder or a hub id" in refusal(tmp_path / "lora")
    assert logits(tmp_path / "lora", base=str(tmp_path / "base")).shape == (12, 61)
    write_lora(tmp_path / "theirs", Path("/data/of/the/authors"), "dream")
    assert (
        "/data/of/the/authors of" in (said := refusal(tmp_path / "theirs")) and "set model.base to its folder" in said
    )
    assert "must be a whole model, not a LoRA" in refusal(tmp_path / "theirs", base=str(tmp_path / "nested"))


@pytest.fixture(autouse=True)
def _nested(tmp_path: Path) -> None:
    """A LoRA on a LoRA's folder, for the test above."""
    write_base(tmp_path / "plain", "dream")
    write_lora(tmp_path / "nested", tmp_path / "plain", "dream")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3 is not served, only LORA"),
        ({"target_parameters": ["experts.down_proj"]}, 'target_parameters=["experts.down_proj"] is not served'),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] is not served"),
        ({"use_newest_idea": True}, "use_newest_idea=true is not served"),
        ({"target_modules": ["q_proj", "ff_proj"]}, "adapts ff_proj, but adapter_model.safetensors holds none of it"),
        ({"r": 5}, "adapter_config.json says r=5, but base_model.model."),
        ({"r": "four"}, 'r="four" is no rank: it is a whole number from 1 up'),
        ({"r": None}, "r=null is no rank"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern="),
        ({"rank_pattern": {"q_proj": 2}}, "says r=2, but"),
        ({"lora_alpha": "much"}, 'lora_alpha="much" is no number'),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path=5 is neither a folder nor a hub id"),
        ({"base_model_name_or_path": ["a"]}, "is neither a folder nor a hub id"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_base(tmp_path / "base", "llada")
    write_lora(tmp_path / "lora", tmp_path / "base", "llada", **changes)
    assert said in refusal(tmp_path / "lora")


def test_a_wrong_rank_is_told_before_a_weight_is_read_and_so_is_a_missing_one(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "llada")
    write_lora(tmp_path / "lora", tmp_path / "base", "llada")
    file = tmp_path / "lora" / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in settings.items() if name != "r"}))
    with pytest.raises(ValueError, match=r"says no r, which means 8, but .*lora_A\.weight is of rank 4"):
        described(tmp_path / "lora")
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json holds no JSON object"):
        described(tmp_path / "lora")


def test_a_lora_on_itself_or_in_a_ring_is_refused(tmp_path: Path) -> None:
    write_lora(tmp_path / "self", tmp_path / "self", "llada")
    assert "/self must be a whole model, not a LoRA" in refusal(tmp_path / "self")
    write_lora(tmp_path / "a", tmp_path / "b", "llada")
    write_lora(tmp_path / "b", tmp_path / "a", "llada")
    assert "base_model_name_or_path=" in (said := refusal(tmp_path / "a")) and "/b must be a whole model" in said


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("/nope", "model.base=/nope is not on this machine, and no id of the hub: use a folder, or owner/name"),
        ("../../etc", "model.base=../../etc"),
        ("a/b/c", "model.base=a/b/c is not on this machine"),
        ("{lora}/adapter_config.json", "/adapter_config.json is a file: give the model's folder"),
        ("no one/spaces", "model.base=no one/spaces is not on this machine"),
        ("some/model", "set model.base to a local model folder"),
    ],
)
def test_a_base_that_is_none_is_told_by_its_key_and_value(tmp_path: Path, base: str, said: str) -> None:
    write_lora(tmp_path / "lora", None, "llada")
    told = refusal(tmp_path / "lora", base=base.format(lora=tmp_path / "lora"))
    assert said in told and "model.path" not in told


def test_merging_prints_no_warning(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "llada")
    write_lora(tmp_path / "lora", tmp_path / "base", "llada")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(tmp_path / "lora")


def test_a_tensor_for_a_module_that_the_base_lacks_is_named(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "llada")
    write_lora(tmp_path / "lora", tmp_path / "base", "llada")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    stray = f"base_model.model.{LLADA_BLOCKS}.2.q_proj.lora_A.weight"
    save_file({**load_file(file), stray: torch.zeros(RANK, 32)}, file)
    assert f"{stray} has no place in the base model" in refusal(tmp_path / "lora")
    file.unlink()
    assert "has adapter_config.json but no adapter_model.safetensors" in refusal(tmp_path / "lora")


def test_a_lora_of_experts_is_refused_and_one_of_a_fused_projection_is_cut_apart(tmp_path: Path) -> None:
    from adapters.checkpoints.lora import Names
    from adapters.families import FAMILIES

    (llada2,) = (family for family in FAMILIES if family.name == "LLaDA2")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    names = Names(llada2.rules, sizes, tmp_path)
    assert names.modules("model.layers.1.attention.query_key_value") == [
        f"model.layers.1.self_attn.{part}_proj" for part in "qkv"
    ]
    with pytest.raises(ValueError, match=r"is an expert, whose weights are stacked"):
        names.modules("model.layers.1.mlp.experts.0.up_proj")
