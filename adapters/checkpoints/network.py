"""From a described model to its network: every tensor has its place before one is copied, straight to the device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from adapters.checkpoints import converted, lora, quantized, spread
from adapters.checkpoints.filling import copy, plan, prefix
from adapters.checkpoints.fit import Goes, Plan
from adapters.checkpoints.reading import Checkpoint, checkpoint, stored_tensors
from adapters.places import Place
from adapters.tensors import Piece, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapters.description import Description


@dataclass(frozen=True)
class Reading:
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

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The network on the meta device."""
        return self.description.skeleton()

    @cached_property
    def weights(self) -> Checkpoint:
        return checkpoint(self.place, self.description.options.trust_checkpoint)

    def goes(self, name: str) -> list[Piece]:
        return pieces(self.description.family.rules, name, self.description.config)

    def plan(self) -> Plan:
        """Where every tensor goes.

        Raises:
            ValueError: one sentence, if a file is not whole, or a tensor or a parameter fits nowhere.
        """
        shapes = self.weights.shapes()
        return plan(self.skeleton, shapes, self._unwrapped(shapes), self.source)

    def _unwrapped(self, names: Collection[str]) -> Goes:
        """Where tensors go; a training's checkpoint has its module's name before those of the network."""
        if not self.place.file:
            return self.goes
        known = set(self.skeleton.state_dict())
        wrap = prefix(names, lambda name: all(piece.target in known for piece in self.goes(name)))
        return lambda name: self.goes(name.removeprefix(wrap))


def check(description: Description) -> int:
    """Hold names and shapes in the files' headers against the native architecture; no weight is read.

    Returns:
        how many tensors there are, those of a LoRA included.

    Raises:
        ValueError: one sentence, if a file is cut short, or a tensor is missing, left over or of a wrong shape.
    """
    assert description.place and not description.place.gguf
    reading = Reading(description, description.place, torch.device("meta"))
    count = len(reading.weights.shapes())
    if not converted.needed(description, reading.skeleton):  # else transformers checks them
        reading.plan()
    return count + (len(lora.stored(reading.place.adapter).shapes()) if reading.place.adapter else 0)


def read(reading: Reading) -> PreTrainedModel:
    """The network with its weights.

    Raises:
        ValueError: one sentence, if a file is broken, a tensor has no place or a wrong shape, or a parameter gets none.
    """
    description = reading.description
    if reading.place.gguf:
        from transformers import AutoModelForCausalLM

        return converted.read(reading, AutoModelForCausalLM, gguf_file=reading.place.gguf)
    if converted.needed(description, reading.skeleton):
        stored_tensors(reading.place.folder).shapes()  # a file that is not whole is told in our words
        return _adapted(converted.read(reading, type(reading.skeleton)), reading)
    planned = reading.plan()
    if settings := description.options.quantization:
        arguments = {**converted.arguments(reading), "quantization_config": quantized.check(settings)}
        return quantized.quantize(reading.skeleton, planned, reading.weights, arguments)
    return _filled(reading, planned)


def _filled(reading: Reading, planned: Plan) -> PreTrainedModel:
    places = spread.layout(reading.skeleton, reading.device) if reading.spreads else {"": reading.device}
    model = spread.build_over(reading.skeleton.config, reading.dtype, places)
    _keep_float32(model, reading.dtype)
    copy(model, planned, reading.weights, reading.source)
    return spread.dispatch(_adapted(model, reading), places)


def _adapted(model: PreTrainedModel, reading: Reading) -> PreTrainedModel:
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
