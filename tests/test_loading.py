"""Model folders: what loads, and what is refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adapters.attention import Visibility
from adapters.checkpoints.files import content_hash
from adapters.checkpoints.sources import Tokens
from adapters.description import Description, describe
from adapters.facts import Stated, model_facts
from adapters.families import family_of
from adapters.head import WholeHead
from adapters.loading import load
from adapters.native import build, native_config
from adapters.options import unused
from adapters.places import TINY, ModelOptions
from adapters.tensors import pieces
from adapters.transformer import TransformerAdapter
from tests.models import LLADA_CONFIG, llada_tensors, write_llada

CPU = torch.device("cpu")


def described(folder: Path, **options: object) -> Description:
    return describe(ModelOptions("random", path=str(folder), **options))  # type: ignore[arg-type]


def loaded(folder: Path, **options: object) -> TransformerAdapter:
    adapter = load(described(folder, **options), CPU)
    assert isinstance(adapter, TransformerAdapter)
    return adapter


def refusal(folder: Path, **options: object) -> str:
    """The one sentence with which a folder is refused, at its description or its loading."""
    with pytest.raises(ValueError) as caught:
        loaded(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def write_native(folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A causal Llama as transformers saves it."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**{"vocab_size": 61, "bos_token_id": None, "eos_token_id": 59, **shape, **changes})
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def test_a_llada_folder_becomes_a_llama_with_every_parameter_filled(tmp_path: Path) -> None:
    adapter = loaded(write_llada(tmp_path))
    native, written = dict(adapter.model.named_parameters()), llada_tensors(LLADA_CONFIG)
    assert len(native) == len(written)
    rules = family_of(LLADA_CONFIG).rules
    for name, tensor in written.items():
        (piece,) = pieces(rules, name, LLADA_CONFIG)
        assert torch.equal(native[piece.target], tensor), name
    facts = adapter.facts
    assert (facts.vocab_size, facts.mask_id, facts.end_ids, facts.max_positions) == (64, 60, {59}, 128)
    assert (facts.shift, facts.attention, facts.attentions) == (0, "full", {"full", "blocks"})


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    tensors = llada_tensors(LLADA_CONFIG)
    gone = "model.transformer.blocks.1.up_proj.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != gone}
    missing = refusal(write_llada(tmp_path / "missing", kept))
    assert "1 parameter got no tensor (model.layers.1.mlp.up_proj.weight)" in missing and "no place" not in missing
    extra = refusal(write_llada(tmp_path / "extra", {**tensors, "model.transformer.wpe.weight": torch.zeros(3, 4)}))
    assert "1 tensor has no place (model.transformer.wpe.weight (3, 4))" in extra and "got no" not in extra
    twin = {**tensors, "model.norm.weight": torch.zeros(32)}
    said = refusal(write_llada(tmp_path / "twin", twin))
    assert "model.norm.weight and model.transformer.ln_f.weight are both model.norm.weight" in said
    shape = refusal(write_llada(tmp_path / "shape", {**tensors, gone: torch.zeros(48, 31)}))
    assert f"{gone} has the shape (48, 31), the configuration wants (48, 32)" in shape


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickled_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1), "b": Path("x")}, folder / "pytorch_model.bin")


def _pickled_number(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": 3}, folder / "pytorch_model.bin")


def _torn_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file({"model.transformer.ln_f.weight": tensors["model.transformer.ln_f.weight"]}, folder / "z.safetensors")


def _bad_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weights": {}}')


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _without(key: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return drop


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_weights, r"holds no weights: neither \.safetensors nor pytorch_model\.bin$"),
        (
            _pickled_code,
            r"pytorch_model\.bin holds pathlib.*, which could run code when read: convert",
        ),
        (_pickled_number, r"pytorch_model\.bin holds a, which is a int, no tensor"),
        (_torn_bin, r"pytorch_model\.bin (is no whole file of torch\.save|holds something that is no tensor)"),
        (_pointer, r"model\.safetensors is a pointer of Git LFS, not the weights: run git lfs pull"),
        (_twice, r"model\.transformer\.ln_f\.weight lies in model-00001-of-00002\.safetensors and in z\.safetensors"),
        (_bad_index, r"model\.safetensors\.index\.json is no index of shards"),
        (_missing_shard, r"lacks model-00001-of-00002\.safetensors, which its model\.safetensors\.index\.json names"),
        (_torn, r"model\.safetensors is no whole \.safetensors file"),
        (_write("config.json", "{"), r"config\.json is not valid JSON"),
        (_write("config.json", "[]"), r"config\.json holds no JSON object"),
        (_write("generation_config.json", "{,}"), r"generation_config\.json is not valid JSON"),
        (_write("tokenizer.json", "{,}"), r"the tokenizer in .* cannot be read"),
        (_without("d_model"), r"config\.json lacks 'd_model'"),
        (_write("config.json", '{"model_type": "bert"}'), r"model_type=bert is of no known family; known are: LLaDA"),
    ],
)
def test_a_broken_folder_is_refused_in_one_sentence(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(write_llada(tmp_path))
    assert re.search(said, refusal(tmp_path))


def test_what_can_be_refused_before_loading_is(tmp_path: Path) -> None:
    _no_weights(write_llada(tmp_path))
    with pytest.raises(ValueError, match=r"holds no weights"):
        described(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json was not found"):
        described(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"model\.dtype=int8 is unknown: use float32, bfloat16 or float16"):
        described(tmp_path, dtype="int8")


def test_shards_are_read_by_their_index_and_other_files_left_alone(tmp_path: Path) -> None:
    whole = loaded(write_llada(tmp_path)).model.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {name: f"shard{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in ("shard0.safetensors", "shard1.safetensors"):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, tmp_path / shard)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = loaded(tmp_path).model.state_dict()
    assert all(torch.equal(sharded[name], tensor) for name, tensor in whole.items())


def test_the_content_hash_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    one, two = (write_llada(tmp_path / name) for name in ("one", "two"))
    identity = described(one).identity()
    assert identity == described(two).identity() == described(one).identity(), "by content, not by path"
    cached = json.loads((tmp_path / "home" / ".cache" / "blockdiff" / "hashes.json").read_text())
    assert len(cached) == 4
    write_llada(two, llada_tensors(LLADA_CONFIG, seed=1))
    assert described(two).identity() != identity
    write_llada(one, rope_theta=5e5)
    assert described(one).identity() != identity
    assert content_hash([one / "config.json", one / "absent"]) == content_hash([one / "config.json"])


def test_tied_embeddings_load_from_one_tensor(tmp_path: Path) -> None:
    folder = write_native(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    adapter = loaded(folder)
    assert adapter.model.lm_head.weight is adapter.model.model.embed_tokens.weight
    assert torch.equal(
        adapter.model.lm_head.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert adapter.facts.attention == "causal" and adapter.facts.mask_id is None and adapter.facts.shift == 1


def test_tied_llada_loads_and_an_untied_one_without_a_head_does_not(tmp_path: Path) -> None:
    tensors = llada_tensors(LLADA_CONFIG)
    del tensors["model.transformer.ff_out.weight"]
    assert loaded(write_llada(tmp_path / "tied", tensors, weight_tying=True)).model.lm_head.weight.shape == (64, 32)
    assert "lm_head.weight" in refusal(write_llada(tmp_path / "untied", tensors))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_another_dtype_loads_as_float32_on_a_cpu_and_as_itself_if_asked(tmp_path: Path, saved: torch.dtype) -> None:
    folder = write_native(tmp_path, saved)
    tensors = load_file(folder / "model.safetensors")
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        adapter = loaded(folder, dtype=dtype)
        state = adapter.model.state_dict()
        assert all(torch.equal(state[name], tensor.to(expected)) for name, tensor in tensors.items())
        assert adapter.model.dtype == expected


def test_a_masked_native_model_is_told_from_a_causal_one(tmp_path: Path) -> None:
    folder = write_native(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False, "mask_token_id": 60}))
    facts = loaded(folder).facts
    assert (facts.attention, facts.shift, facts.mask_id) == ("full", 0, 60)


def test_every_end_id_counts_wherever_it_is_stated(tmp_path: Path) -> None:
    folder = tmp_path / "ar"
    shutil.copytree(TINY / "ar", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    mask = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|mask|>")
    assert described(folder, end_tokens=["<|mask|>"]).facts.end_ids == {0, 7, mask}
    assert described(folder, end_ids=[3]).facts.end_ids == {3}
    with pytest.raises(ValueError, match=r"model\.end_tokens: <\|no\|> is not a token of model=random"):
        described(folder, end_tokens=["<|no|>"])


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _logits(adapter: TransformerAdapter, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) as the adapter gets them: layers and head apart."""
    with torch.inference_mode():
        body = adapter.body(input_ids=ids[None], use_cache=False, visibility=Visibility(causal=True))
        return adapter.head(body.last_hidden_state[0])


def _reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) of transformers' own causal model."""
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids[None]).logits[0]


@pytest.mark.parametrize("architecture", ["Cohere", "Granite"])
def test_a_network_that_scales_its_logits_behind_the_head_is_served_with_them(
    tmp_path: Path, architecture: str
) -> None:
    import transformers

    scale = {"Cohere": {"logit_scale": 0.5}, "Granite": {"logits_scaling": 3.0}}[architecture]
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=61, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=4, **SHAPE, **scale
    )
    torch.manual_seed(0)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(tmp_path)
    adapter, ids = loaded(tmp_path), torch.arange(9)
    assert isinstance(adapter.head_module, WholeHead)
    torch.testing.assert_close(_logits(adapter, ids), _reference(tmp_path, ids), rtol=0, atol=1e-6)


def test_a_plain_head_stays_a_matrix(tmp_path: Path) -> None:
    assert isinstance(loaded(write_native(tmp_path)).head_module, torch.nn.Linear)


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral"])
def test_experts_in_their_published_files_are_read_by_transformers_and_nothing_may_be_left(
    tmp_path: Path, architecture: str
) -> None:
    import transformers

    experts = (
        {"num_experts": 4, "moe_intermediate_size": 16} if architecture == "Qwen3Moe" else {"num_local_experts": 4}
    )
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=61, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8, eos_token_id=2, **SHAPE, **experts
    )
    torch.manual_seed(0)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert = next(name for name in tensors if "experts.3." in name)
    ids = torch.arange(9)
    torch.testing.assert_close(_logits(loaded(tmp_path), ids), _reference(tmp_path, ids), rtol=0, atol=1e-5)
    save_file({**tensors, "model.layers.0.extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "1 tensors have no place (model.layers.0.extra)" in refusal(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, tmp_path / "model.safetensors")
    assert "1 parameters got no tensor (model.norm.weight)" in refusal(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != expert}, tmp_path / "model.safetensors")
    assert refusal(tmp_path)


def test_an_expert_out_of_range_and_one_that_is_missing_are_named(tmp_path: Path) -> None:
    tensors = write_moe(tmp_path)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({**tensors, expert.replace(".3.", ".4."): tensors[expert].clone()}, tmp_path / "model.safetensors")
    assert f"{expert.replace('.3.', '.4.')} is of expert 4, the configuration's last is 3" in refusal(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != expert}, tmp_path / "model.safetensors")
    assert "(model.layers.1.mlp.experts.gate_up_proj (in part))" in refusal(tmp_path)
    save_file({**tensors, expert: torch.zeros(16, 31)}, tmp_path / "model.safetensors")
    assert f"{expert} has the shape (16, 31), the configuration wants (16, 32)" in refusal(tmp_path)


def write_moe(folder: Path) -> dict[str, torch.Tensor]:
    """A random SDAR-MoE in its published files: a tensor an expert and matrix."""
    config = {
        **{"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"], "vocab_size": 61, "mask_token_id": 60},
        **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"norm_topk_prob": True, "block_size": 4, **SHAPE},
    }
    (folder / "config.json").write_text(json.dumps(config))
    skeleton = build(native_config(family_of(config), config), torch.float32, torch.device("meta"))
    tensors: dict[str, torch.Tensor] = {}
    for name, target in skeleton.state_dict().items():
        value = torch.randn(target.shape)
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        for expert, matrix in enumerate(value):
            stem = f"{name.rpartition('.')[0]}.{expert}"
            parts = {"down_proj": matrix}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            tensors |= {f"{stem}.{part}.weight": piece.clone() for part, piece in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_nothing_is_copied_before_everything_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        pytest.fail("weights were copied")

    monkeypatch.setattr("adapters.checkpoints.network.copy", fail)
    tensors = llada_tensors(LLADA_CONFIG)
    tensors["model.transformer.zzz.weight"] = torch.zeros(1)  # the last one
    assert "has no place" in refusal(write_llada(tmp_path, tensors))


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    tensors = llada_tensors(LLADA_CONFIG)
    embedding, head = "model.transformer.wte.weight", "model.transformer.ff_out.weight"
    tensors[head] = tensors[embedding].clone()
    adapter = loaded(write_llada(tmp_path / "equal", tensors, weight_tying=True))
    assert torch.equal(adapter.model.lm_head.weight, tensors[embedding])
    tensors[head] = tensors[embedding] + 1
    said = refusal(write_llada(tmp_path / "other", tensors, weight_tying=True))
    assert f"{head} and {embedding} are one parameter, but differ" in said


def test_routers_and_expert_biases_stay_in_float32(tmp_path: Path) -> None:
    description = described(write_llada2(tmp_path), dtype="bfloat16")
    model = load(description, CPU).model  # type: ignore[attr-defined]
    wide = {name.rpartition(".layers.")[2][2:] for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert wide == {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"} and model.dtype == torch.bfloat16


def write_llada2(folder: Path) -> Path:
    """A random LLaDA2 of two layers, the first without experts, in published names; see `tests.models` for LLaDA."""
    config = {
        **{"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "vocab_size": 61, "mask_token_id": 60},
        **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e4, "partial_rotary_factor": 0.5, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "num_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "eos_token_id": 59, **SHAPE},
    }
    (folder / "config.json").write_text(json.dumps(config))
    skeleton = build(native_config(family_of(config), config), torch.float32, torch.device("meta"))
    save_file({n: torch.randn(t.shape) for n, t in skeleton.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_logit_softcapping": 50.0, "model_type": "gemma2"}, "caps its attention scores"),
        ({"model_type": "gpt_oss"}, "has attention sinks"),
    ],
)
def test_attention_that_is_no_plain_softmax_is_refused_by_its_configuration(changes: dict, said: str) -> None:
    config = {"architectures": ["XForCausalLM"], "vocab_size": 9, **changes}
    with pytest.raises(ValueError, match=said):
        model_facts(ModelOptions(), family_of(config), Stated(config, {}), Tokens({}))


def test_rows_are_no_longer_than_sliding_layers_see() -> None:
    config = {"architectures": ["XForCausalLM"], "vocab_size": 9, "max_position_embeddings": 64, "sliding_window": 16}
    for slides, longest in ((True, 16), (False, 64)):
        stated = Stated({**config, "use_sliding_window": slides}, {})
        assert model_facts(ModelOptions(), family_of(config), stated, Tokens({})).max_positions == longest


# ---- options, places and permissions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("path", "/nope"), ("hub", "a/b"), ("revision", "x"), ("dtype", "bfloat16"), ("mask_id", 5), ("shift", 1)),
        *(("end_ids", [1]), ("end_tokens", ["x"]), ("quantization", {"quant_method": "x"}), ("compile", True)),
        *(("base", "a/b"), ("confidence_dtype", "model"), ("trust_checkpoint", True), ("published", {"a": 1})),
    ],
)
def test_the_toy_refuses_what_only_a_checkpoint_uses(option: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        describe(ModelOptions("toy", kind="toy", **{option: value}))  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"model.{option}={value} is not used: model.kind=toy has no weights")


def test_an_option_without_effect_is_told(tmp_path: Path) -> None:
    write_llada(tmp_path)
    found = described(tmp_path, end_tokens=["<x>"], base="a/b", hub="a/b", revision="x")
    assert set(unused(found)) == {"end_tokens", "base", "hub", "revision"}
    assert found.notice and "model.end_tokens is not used" in found.notice and "model.base is" in found.notice
    assert "model.hub" not in found.notice, "a YAML's hub beside a path is the normal use"
    assert described(tmp_path).notice is None


def test_a_gguf_is_refused_for_quantising_before_the_quantiser_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    said = refusal(tmp_path / "x.gguf", quantization={"quant_method": "wishful"})
    assert said == "model.quantization does not go with a .gguf file: leave it out"


def test_a_place_that_is_none_is_told_by_its_key(tmp_path: Path) -> None:
    write_llada(tmp_path)
    assert "/config.json is a file: give the model's folder, a .gguf or a .ckpt file" in refusal(
        tmp_path / "config.json"
    )
    for hub in ("../../etc", "/nope", "a/b/c", "a b"):
        with pytest.raises(
            ValueError, match=rf"model\.hub={re.escape(hub)} is no id of the hub: write it as owner/name"
        ):
            describe(ModelOptions("x", hub=hub))


@pytest.mark.parametrize("locked", ["", "config.json", "model.safetensors"])
def test_what_may_not_be_read_is_named_before_anything_is_loaded(tmp_path: Path, locked: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_llada(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    folder.chmod(0o755)
    tmp_path.chmod(0o755)
    all_temporary = Path(tempfile.gettempdir()).resolve()
    for parent in tmp_path.resolve().parents:
        if all_temporary in parent.parents:
            parent.chmod(0o755)
    (folder / locked).chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # the superuser may read everything
    try:
        with pytest.raises(ValueError) as caught:
            described(folder)
    finally:
        os.seteuid(user)
        (folder / locked).chmod(0o755)
    said = str(caught.value)
    assert f"{folder / locked} cannot be read (Permission denied): let this user read it" in said, said
    assert "adapter_config" not in said and "\n" not in said
