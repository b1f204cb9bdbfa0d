"""Options that change how a network is held or run: spread over devices, quantised, compiled."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.attention import Visibility
from adapters.checkpoints import spread
from adapters.checkpoints.filling import copy, plan
from adapters.checkpoints.reading import stored_tensors
from adapters.description import describe
from adapters.facts import inspect
from adapters.loading import check, load
from adapters.native import build, native_config
from adapters.places import TINY, ModelOptions
from adapters.tensors import pieces
from adapters.transformer import TransformerAdapter
from tests.models import LLADA_CONFIG, llada_tensors, write_llada

CPU = torch.device("cpu")
INT8 = {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}  # as torchao writes it


def loaded(folder: Path, **options: Any) -> TransformerAdapter:
    adapter = load(describe(ModelOptions("random", path=str(folder), **options)), CPU)
    assert isinstance(adapter, TransformerAdapter)
    return adapter


def logits(adapter: TransformerAdapter, length: int = 12) -> torch.Tensor:
    """(T, V) under full attention."""
    with torch.inference_mode():
        ids = torch.arange(2 * length).reshape(2, length) % 60
        return adapter.head(adapter.body(input_ids=ids, use_cache=False, visibility=Visibility()).last_hidden_state[1])


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        loaded(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_spread_over_one_device_is_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_llada(tmp_path)
    assert torch.equal(logits(loaded(tmp_path, device_map="auto")), logits(loaded(tmp_path)))
    assert "model.device_map=balanced is unknown: use auto" in refusal(tmp_path, device_map="balanced")


def test_layers_placed_one_by_one_run_through_the_hooks_as_well(tmp_path: Path) -> None:
    """One CPU stands for all devices: placing, filling and hooks are the real ones, moving between devices is not."""
    pytest.importorskip("accelerate")
    whole = loaded(write_llada(tmp_path))
    found = describe(ModelOptions("random", path=str(tmp_path)))
    config = native_config(found.family, found.config)
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(names, CPU)
    model = spread.build_over(config, torch.float32, places)
    checkpoint = stored_tensors(tmp_path)
    skeleton = build(config, torch.float32, torch.device("meta"))
    planned = plan(skeleton, checkpoint.shapes(), lambda n: pieces(found.family.rules, n, found.config), tmp_path)
    copy(model, planned, checkpoint, tmp_path)
    adapter = TransformerAdapter(spread.dispatch(model, places), found.facts, found.codec)
    assert "AlignDevicesHook" in repr(model.model.layers[1]._hf_hook) and adapter.device == CPU
    assert torch.equal(logits(adapter), logits(whole))


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("optimum.quanto", {"quant_method": "quanto", "weights": "int8"}),
        ("torchao", {"quant_method": "torchao", "quant_type": {"default": INT8}}),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ],
)
def test_quantised_weights_are_close_to_the_whole_ones(tmp_path: Path, package: str, settings: dict[str, Any]) -> None:
    pytest.importorskip(package)
    changes = {"d_model": 64, "mlp_hidden_size": 128}
    tensors = {name: tensor / 4 for name, tensor in llada_tensors({**LLADA_CONFIG, **changes}).items()}
    write_llada(tmp_path, tensors, **changes)
    whole, adapter = logits(loaded(tmp_path)), loaded(tmp_path, quantization=settings)
    difference = (logits(adapter) - whole).abs().mean() / whole.abs().mean()
    assert 0 < difference < 0.05
    assert type(adapter.model.model.layers[0].mlp.down_proj.weight) is not torch.nn.Parameter


def test_a_quantiser_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_llada(tmp_path)
    unknown = refusal(tmp_path, quantization={"quant_method": "wishful"})
    assert "model.quantization.quant_method=wishful is unknown to transformers: use one of" in unknown
    if find_spec("hqq") is None:
        assert "model.quantization={'quant_method': 'hqq'}: ImportError" in refusal(
            tmp_path, quantization={"quant_method": "hqq"}
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"confidence_dtype": "half"}, "model.confidence_dtype=half is unknown: use float32 or model"),
        ({"attention_kernel": "flash"}, "model.attention_kernel=flash is unknown: use auto or dense"),
        ({"device_map": "balanced"}, "model.device_map=balanced is unknown: use auto"),
        ({"quantization": {"quant_method": "wishful"}}, "quant_method=wishful is unknown to transformers"),
    ],
)
def test_an_option_that_cannot_be_had_is_refused_before_anything_is_loaded(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        describe(ModelOptions("tiny", path="tiny/llada", **options))
    assert said in str(caught.value)


def test_quantising_what_is_converted_or_quantised_already_is_refused_before_loading(tmp_path: Path) -> None:
    pytest.importorskip("optimum.quanto")
    chosen = {"quantization": {"quant_method": "quanto", "weights": "int8"}}
    config = json.loads((write_llada(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="does not go with a checkpoint that is quantised already"):
        describe(ModelOptions("random", path=str(tmp_path), **chosen))
    with pytest.raises(ValueError, match="is quantised under LLaDA's names"):
        describe(ModelOptions("random", path=str(tmp_path)))
    write_mixtral(tmp_path / "mixtral")
    with pytest.raises(ValueError, match=r"model\.quantization is not served for MixtralForCausalLM"):
        describe(ModelOptions("random", path=str(tmp_path / "mixtral"), **chosen))


def write_mixtral(folder: Path) -> None:
    """A random network whose published tensors transformers converts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=61, num_key_value_heads=2, num_local_experts=4, eos_token_id=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(folder)


def test_inspecting_leaves_converted_tensors_to_transformers(tmp_path: Path) -> None:
    write_mixtral(tmp_path)
    assert inspect(ModelOptions("random", path=str(tmp_path))).fit is None
    assert check(describe(ModelOptions("random", path=str(tmp_path))))


def test_without_a_compiler_compilation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "model.compile=true needs a C++ compiler" in refusal(TINY / "llada", compile=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_layers_give_the_same_logits_and_compile_once_for_all_lengths(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    plain, compiled = loaded(TINY / "llada"), loaded(TINY / "llada", compile=True)
    counters.clear()
    torch.testing.assert_close(logits(compiled, 16), logits(plain, 16), rtol=0, atol=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    for length in (17, 33, 8):
        torch.testing.assert_close(logits(compiled, length), logits(plain, length), rtol=0, atol=1e-4)
    assert graphs and counters["stats"]["unique_graphs"] == graphs


def test_options_of_the_read_out_reach_it(tmp_path: Path) -> None:
    write_llada(tmp_path)
    adapter = loaded(tmp_path, confidence_dtype="model", attention_kernel="dense")
    assert adapter.read_out.confidence_dtype == "model" and not adapter.packs
    assert "model.confidence_dtype=half is unknown: use float32 or model" in refusal(tmp_path, confidence_dtype="half")
    assert "model.attention_kernel=flash is unknown: use auto or dense" in refusal(tmp_path, attention_kernel="flash")
