"""DiffusionGemma: both passes equal the native class's own, alone and in a group, within and beyond its window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.cache_utils import DynamicCache

from adapters.base import Request
from adapters.description import describe
from adapters.diffusion_gemma import DiffusionGemmaAdapter
from adapters.facts import inspect
from adapters.loading import load
from adapters.places import ModelOptions
from samplers import Forward, ThresholdSampler

CANVAS, VOCABULARY = 6, 64
CONFIG: dict[str, Any] = {
    **{"model_type": "diffusion_gemma", "architectures": ["DiffusionGemmaForBlockDiffusion"]},
    **{"canvas_length": CANVAS, "tie_word_embeddings": True},
    "text_config": {
        **{"model_type": "diffusion_gemma_text", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 7, "num_experts": 4},
        **{"top_k_experts": 2, "moe_intermediate_size": 16, "use_bidirectional_attention": "vision"},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        **{"max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0},
    },
    "vision_config": {
        **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
    },
}
PUBLISHED = {  # the language model's sizes of google/diffusiongemma-26B-A4B-it
    **CONFIG,
    "canvas_length": 256,
    "text_config": {
        **{"model_type": "diffusion_gemma_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112},
        **{"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
        **{"global_head_dim": 512, "num_global_key_value_heads": 2, "sliding_window": 1024, "num_experts": 128},
        **{"top_k_experts": 8, "moe_intermediate_size": 704, "use_bidirectional_attention": "vision"},
        **{"eos_token_id": [1, 106, 50], "max_position_embeddings": 262144},
    },
}


def write_gemma(path: Path, **text: Any) -> Path:
    """A checkpoint as the native class writes it, with weights that make every tensor matter.

    ``text`` are changes of the language model's configuration.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(**{**CONFIG, "text_config": {**CONFIG["text_config"], **text}})
    model = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            flat = tensor.ndim < 2
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("layer_scalar"):  # of the encoder and of the decoder: buffers, which are not tied
                tensor.fill_(0.8 if "encoder" in name else 1.1)
            elif "inv_freq" not in name and "vision" not in name:
                tensor.copy_(1 + 0.1 * noise if flat else 1.5 * noise / tensor.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def adapter(folder: Path) -> DiffusionGemmaAdapter:
    made = load(describe(ModelOptions("gemma", path=str(folder))), torch.device("cpu"))
    assert isinstance(made, DiffusionGemmaAdapter)
    made.open(4, 48)
    return made


@pytest.fixture(scope="module")
def native(folder: Path) -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# ---- parity ----------------------------------------------------------------------------------------------------------

PROMPTS = {0: 5, 1: 19, 3: 11}  # rows and lengths, shorter and longer than the sliding layers' window of 7


def test_encoder_and_decoder_equal_the_native_class_alone_and_in_a_group(
    adapter: DiffusionGemmaAdapter, native: DiffusionGemmaForBlockDiffusion
) -> None:
    _commit(adapter, {row: range(length) for row, length in PROMPTS.items()})
    together = _denoise(adapter, PROMPTS)
    for member, (row, length) in enumerate(PROMPTS.items()):
        cache, wanted = _native_pass(native, row, length)
        assert (together[member] - wanted).abs().max() < 1e-5
        assert (_denoise(adapter, {row: length})[0] - wanted).abs().max() < 1e-5
        assert cache.get_seq_length() == length


def test_a_committed_canvas_and_the_next_one_equal_the_native_class(
    adapter: DiffusionGemmaAdapter, native: DiffusionGemmaForBlockDiffusion
) -> None:
    _commit(adapter, {row: range(length) for row, length in PROMPTS.items()})
    before = _denoise(adapter, PROMPTS)
    _commit(adapter, {row: range(length, length + CANVAS) for row, length in PROMPTS.items()})
    after = _denoise(adapter, {row: length + CANVAS for row, length in PROMPTS.items()})
    assert (before - after).abs().max() > 0.1
    for member, (row, length) in enumerate(PROMPTS.items()):
        cache, _ = _native_pass(native, row, length)
        _, wanted = _native_pass(native, row, length + CANVAS, cache)
        assert (after[member] - wanted).abs().max() < 1e-5


def test_each_row_of_a_group_is_conditioned_on_its_own_previous_logits_or_on_none(
    adapter: DiffusionGemmaAdapter, native: DiffusionGemmaForBlockDiffusion
) -> None:
    _commit(adapter, {row: range(length) for row, length in PROMPTS.items()})
    first = _denoise(adapter, PROMPTS)
    adapter.carry(1, first[1] / 0.8)
    second = _denoise(adapter, PROMPTS)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=1e-5)  # threads may round differently
    cache, _ = _native_pass(native, 1, PROMPTS[1])
    canvas = torch.tensor([_tokens(1, PROMPTS[1] + CANVAS)[-CANVAS:]])
    wanted = native(decoder_input_ids=canvas, cache=cache, self_conditioning_logits=first[1:2] / 0.8).logits[0]
    assert (second[1] - wanted).abs().max() < 1e-5
    assert (second[1] - first[1]).abs().max() > 0.1
    _commit(adapter, {1: range(PROMPTS[1], PROMPTS[1] + CANVAS)})
    assert not adapter.carried


def test_commits_and_denoising_passes_may_come_in_one_call(
    adapter: DiffusionGemmaAdapter, native: DiffusionGemmaForBlockDiffusion
) -> None:
    _commit(adapter, {1: range(19)})
    window = range(19, 19 + CANVAS)
    said = adapter.forward(
        [
            Request(1, Forward(window, tuple(window), context=range(19)), [], []),
            Request(2, Forward(range(9), store=range(9)), list(range(9)), _tokens(2, 9)),
        ]
    )
    _, wanted = _native_pass(native, 1, 19)
    assert list(said[0].token.values()) == wanted.argmax(-1).tolist()
    assert said[1].positions == ()
    _, wanted = _native_pass(native, 2, 9)
    adapter.canvas[2, 9 : 9 + CANVAS] = torch.tensor(_tokens(2, 9 + CANVAS)[9:])
    assert (_denoise(adapter, {2: 9})[0] - wanted).abs().max() < 1e-5


# ---- what is known of it ---------------------------------------------------------------------------------------------


def test_its_facts_keep_every_sampler_out_that_does_not_know_its_attention(folder: Path) -> None:
    facts = describe(ModelOptions("gemma", path=str(folder))).facts
    assert (facts.mask_id, facts.shift, facts.trained_block, facts.vocab_size) == (None, 0, CANVAS, VOCABULARY)
    assert facts.end_ids == {1}
    with pytest.raises(ValueError, match="which the model does not serve"):
        ThresholdSampler.check(facts)
    with pytest.raises(ValueError, match=r"model\.attention=full is not to be had of DiffusionGemma"):
        load(describe(ModelOptions("gemma", path=str(folder), attention="full")), torch.device("cpu"))


def test_a_missing_tensor_is_named_and_a_tied_one_may_be_absent(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    assert not any(name.startswith(("lm_head", "model.encoder.language_model.embed")) for name in tensors)
    del tensors["model.decoder.self_conditioning.up_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 parameter got no tensor \(model.decoder.self_conditioning.up_proj.weight"):
        load(describe(ModelOptions("gemma", path=str(tmp_path))), torch.device("cpu"))


def test_the_full_size_is_told_from_the_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    seen = inspect(ModelOptions("gemma", path=str(tmp_path)))
    assert seen.family.name == "DiffusionGemma"
    assert (seen.facts.trained_block, seen.facts.end_ids) == (256, {1, 106, 50})
    assert 24e9 < seen.sizes.parameters < 27e9
    assert 3.5e9 < seen.sizes.active < 4.5e9


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _tokens(row: int, count: int) -> list[int]:
    """The same ids however many are asked."""
    return torch.randint(3, VOCABULARY, (64,), generator=torch.Generator().manual_seed(row)).tolist()[:count]


def _commit(adapter: DiffusionGemmaAdapter, windows: dict[int, range]) -> None:
    requests = []
    for row, window in windows.items():
        if window.start == 0:
            adapter.place(row, _tokens(row, window.stop + 2 * CANVAS), 0)
        requests.append(Request(row, Forward(window, context=range(window.start), store=window), [], []))
    adapter.forward(requests)


def _denoise(adapter: DiffusionGemmaAdapter, starts: dict[int, int]) -> Tensor:
    """(B, W, V) logits of the canvases behind ``starts``."""
    forwards = {row: Forward(range(start, start + CANVAS), context=range(start)) for row, start in starts.items()}
    return adapter.head(adapter.hidden(adapter._group([Request(row, f, [], []) for row, f in forwards.items()])))


def _native_pass(
    native: DiffusionGemmaForBlockDiffusion, row: int, length: int, cache: DynamicCache | None = None
) -> tuple[DynamicCache, Tensor]:
    """The native class on one row: tokens up to ``length`` through the encoder, the canvas behind it decoded."""
    known = cache.get_seq_length() if cache else 0
    text: Any = native.config.text_config
    ids = torch.tensor([_tokens(row, length + CANVAS)])
    output = native(
        input_ids=ids[:, known:length],
        position_ids=torch.arange(known, length)[None],
        cache=cache or DynamicCache(config=text),
        decoder_input_ids=ids[:, length:],
    )
    return output.cache, output.logits[0]
