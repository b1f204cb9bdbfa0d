"""From a described model to an adapter: its weights, one tensor at a time, straight to the device."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters import attention, lora, quantized, spread
from adapters.checkpoint import Checkpoint, Shapes, checkpoint, stored_tensors
from adapters.compiling import check_compiler, compile_layers
from adapters.description import Description
from adapters.filling import Goes, Plan, copy, fill, plan, prefix
from adapters.head import whole_head
from adapters.native import build, first_line, native_config
from adapters.places import Place
from adapters.tensors import Piece, pieces
from adapters.toy import ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapters.base import DeviceAdapter

__all__ = ["fill", "load", "stored_tensors"]


def load(description: Description, device: torch.device, logits_mib: int = 256) -> DeviceAdapter:
    """Read the weights onto the device, or onto all GPUs if `ModelOptions.device_map` says so.

    Raises:
        ValueError: one sentence, if an option cannot be had, a file is broken, a tensor has no place or a wrong shape,
            or a parameter gets none. All this is known before a weight is copied.
    """
    if description.place is None:
        toy = ToyMaskedLMAdapter()
        toy.read_out.bytes = logits_mib * 2**20
        return toy
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    options = description.options
    _refuse_options(description, device)
    model = _network(_Reading(description, description.place, device))
    if options.compile:
        compile_layers(model)
    adapter = ADAPTERS[description.family.adapter](model, description, logits_mib)
    adapter.read_out.confidence_dtype = options.confidence_dtype
    return adapter


def _transformer(model: PreTrainedModel, description: Description, logits_mib: int) -> DeviceAdapter:
    kernel = description.options.attention_kernel
    adapter = TransformerAdapter(model, description.facts, description.codec, logits_mib, attention_kernel=kernel)
    adapter.head_module = whole_head(model)
    return adapter


def _diffusion_gemma(model: Any, description: Description, logits_mib: int) -> DeviceAdapter:
    from adapters.diffusion_gemma import DiffusionGemmaAdapter

    return DiffusionGemmaAdapter(model, description.facts, description.codec, logits_mib)


ADAPTERS = {"transformer": _transformer, "diffusion_gemma": _diffusion_gemma}  # by `Family.adapter`


def _refuse_options(description: Description, device: torch.device) -> None:
    options, place = description.options, description.place
    assert place
    if options.confidence_dtype not in ("float32", "model"):
        raise ValueError(f"model.confidence_dtype={options.confidence_dtype} is unknown: use float32 or model")
    if options.device_map is not None:
        spread.check(options.device_map)
    if options.quantization:
        quantized.check(options.quantization)
    if options.quantization and (place.gguf or place.adapter or "quantization_config" in description.config):
        kind = "a .gguf file" if place.gguf else "a LoRA" if place.adapter else "a checkpoint that is quantised already"
        raise ValueError(f"model.quantization does not go with {kind}: leave it out")
    if options.compile:
        check_compiler(device)
    if place.adapter:
        lora.read_settings(place.adapter)


@dataclass(frozen=True)
class _Reading:
    """What is read, and where to."""

    description: Description
    place: Place
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.description.dtype)

    @property
    def source(self) -> Path:
        """As messages name it."""
        return self.place.file or self.place.folder

    @property
    def spreads(self) -> bool:
        return self.description.options.device_map is not None

    def goes(self, name: str) -> list[Piece]:
        return pieces(self.description.family.rules, name, self.description.config)


def _network(reading: _Reading) -> PreTrainedModel:
    description, place = reading.description, reading.place
    if place.gguf:
        from transformers import AutoModelForCausalLM

        return _by_transformers(reading, AutoModelForCausalLM, gguf_file=place.gguf)
    skeleton = build(native_config(description.family, description.config), reading.dtype, torch.device("meta"))
    if "quantization_config" in description.config and description.family.native:
        raise ValueError(f"{place.folder} is quantised under {description.family.name}'s names: it is not served")
    if not description.family.native and _needs_transformers(reading, skeleton):
        return _converted(reading, skeleton)
    weights = checkpoint(place, description.options.trust_checkpoint)
    shapes = _wanted(weights.shapes(), skeleton)
    planned = plan(skeleton, shapes, _unwrapped(reading, shapes, skeleton), reading.source)
    if settings := description.options.quantization:
        arguments = {**_arguments(reading), "quantization_config": quantized.check(settings)}
        return quantized.quantize(skeleton, planned, weights, arguments)
    return _filled(reading, skeleton, planned, weights)


def _converted(reading: _Reading, skeleton: PreTrainedModel) -> PreTrainedModel:
    if reading.place.file:
        raise ValueError(f"{reading.source}: a training's checkpoint of {type(skeleton).__name__} is not served")
    if reading.description.options.quantization:
        raise ValueError(f"model.quantization is not served for {type(skeleton).__name__}: leave it out")
    stored_tensors(reading.place.folder).shapes()  # a file that is not whole is told in our words
    return _adapted(_by_transformers(reading, type(skeleton)), reading)


def _wanted(shapes: Shapes, skeleton: PreTrainedModel) -> Shapes:
    """Without the tensors of which the architecture says that it computes them itself, or has no use for them."""
    ignored = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return {name: shape for name, shape in shapes.items() if not any(re.search(part, name) for part in ignored)}


def _unwrapped(reading: _Reading, names: Collection[str], skeleton: PreTrainedModel) -> Goes:
    """Where the tensors go; a training's checkpoint has its module's name before those of the network."""
    if not reading.place.file:
        return reading.goes
    known = set(skeleton.state_dict())
    wrap = prefix(names, lambda name: all(piece.target in known for piece in reading.goes(name)))
    return lambda name: reading.goes(name.removeprefix(wrap))


def _filled(reading: _Reading, skeleton: PreTrainedModel, planned: Plan, weights: Checkpoint) -> PreTrainedModel:
    places = spread.layout(skeleton, reading.device) if reading.spreads else {"": reading.device}
    model = spread.build_over(skeleton.config, reading.dtype, places)
    _keep_float32(model, reading.dtype)
    copy(model, planned, weights, reading.source)
    return spread.dispatch(_adapted(model, reading), places)


def _adapted(model: PreTrainedModel, reading: _Reading) -> PreTrainedModel:
    if not reading.place.adapter:
        return model
    return lora.merge(model, reading.place.adapter, reading.description.family.rules, reading.description.config)


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What the architecture wants in float32 whatever the rest is in, as routers."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()


# ---- what transformers reads itself ----------------------------------------------------------------------------------


def _needs_transformers(reading: _Reading, skeleton: PreTrainedModel) -> bool:
    """Whether the files are quantised, or hold other tensors than the native network, which transformers converts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if "quantization_config" in reading.description.config:
        return True
    return bool(get_model_conversion_mapping(skeleton, add_legacy=False))


def _by_transformers(reading: _Reading, by_class: Any, **further: Any) -> PreTrainedModel:
    """Read by transformers' own loader, whose report is held to the same rule: nothing left over on either side."""
    try:
        read = by_class.from_pretrained(
            reading.place.folder, **_arguments(reading), **further, output_loading_info=True
        )
    except Exception as error:  # it raises whatever its readers and quantisers do
        raise ValueError(f"{reading.source}: transformers cannot read it: {first_line(error)}") from error
    model, report = read
    wrong = {
        "tensors have no place": report["unexpected_keys"],
        "parameters got no tensor": report["missing_keys"],
        "tensors have a wrong shape": [name for name, *_ in report["mismatched_keys"]],
    }
    faults = [f"{len(names)} {said} ({', '.join(sorted(names)[:3])})" for said, names in wrong.items() if names]
    if faults:
        raise ValueError(f"{reading.source} does not fit {type(model).__name__}: {' and '.join(faults)}")
    return model if reading.spreads or _can_place() else model.to(reading.device)


def _can_place() -> bool:
    """Whether transformers can read straight to a device."""
    return find_spec("accelerate") is not None


def _arguments(reading: _Reading) -> dict[str, Any]:
    """Those of `from_pretrained`."""
    where: Any = "auto" if reading.spreads else {"": reading.device}
    return {
        "dtype": reading.dtype,
        "attn_implementation": attention.NAME,
        "ignore_mismatched_sizes": True,  # the report tells of them in our words
        **({"device_map": where} if _can_place() else {}),
    }
