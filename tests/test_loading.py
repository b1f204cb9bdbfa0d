"""Model folders: what loads, and what is refused in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adapters.description import Description, describe
from adapters.families import FAMILIES, family_of
from adapters.loading import load
from adapters.places import TINY, ModelOptions, content_hash
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
    family = family_of(LLADA_CONFIG)
    assert all(torch.equal(native[family.rename(name)], tensor) for name, tensor in written.items())
    facts = adapter.facts
    assert (facts.vocab_size, facts.mask_id, facts.end_ids, facts.max_positions) == (64, 60, {59}, 128)
    assert (facts.shift, facts.attention, facts.attentions) == (0, "full", {"full", "blocks"})


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    tensors = llada_tensors(LLADA_CONFIG)
    gone = "model.transformer.blocks.1.up_proj.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != gone}
    missing = refusal(write_llada(tmp_path / "missing", kept))
    assert "1 parameters got no tensor (model.layers.1.mlp.up_proj.weight)" in missing and "no place" not in missing
    extra = refusal(write_llada(tmp_path / "extra", {**tensors, "model.transformer.wpe.weight": torch.zeros(3, 4)}))
    assert "1 tensors have no place (model.transformer.wpe.weight (3, 4))" in extra and "got no" not in extra
    shape = refusal(write_llada(tmp_path / "shape", {**tensors, gone: torch.zeros(48, 31)}))
    assert f"{gone} has the shape (48, 31), the configuration wants (48, 32)" in shape


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


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
        (_no_weights, r"holds no \.safetensors file$"),
        (_only_bin, r"holds no \.safetensors file, only \.bin files, .*: convert them with save_pretrained"),
        (_missing_shard, r"lacks model-00001-of-00002\.safetensors, which its model\.safetensors\.index\.json names"),
        (_torn, r"model\.safetensors is no whole \.safetensors file"),
        (_write("config.json", "{"), r"config\.json is not valid JSON"),
        (_write("config.json", "[]"), r"config\.json holds no JSON object"),
        (_write("generation_config.json", "{,}"), r"generation_config\.json is not valid JSON"),
        (_write("tokenizer.json", "{,}"), r"the tokenizer in .* cannot be read"),
        (_without("d_model"), r"config\.json lacks 'd_model'"),
        (_without("eos_token_id"), r"config\.json lacks 'eos_token_id'"),
        (_write("config.json", '{"model_type": "bert"}'), r"model_type=bert is of no known family; known are: LLaDA"),
    ],
)
def test_a_broken_folder_is_refused_in_one_sentence(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(write_llada(tmp_path))
    assert re.search(said, refusal(tmp_path))


def test_what_can_be_refused_before_loading_is(tmp_path: Path) -> None:
    _only_bin(write_llada(tmp_path))
    with pytest.raises(ValueError, match=r"only \.bin files"):
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


def test_a_network_that_alters_its_logits_behind_the_head_is_refused(tmp_path: Path) -> None:
    """We run layers and head apart: Cohere scales its logits, so it must not pass for a plain causal model."""
    from transformers import CohereConfig, CohereForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CohereConfig(vocab_size=61, logit_scale=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2, **shape)
    CohereForCausalLM(config).save_pretrained(tmp_path)
    assert "CohereForCausalLM transforms its logits after the head" in refusal(tmp_path)


def test_every_family_states_an_attention_it_serves() -> None:
    assert all(family.attention in family.attentions for family in FAMILIES)
