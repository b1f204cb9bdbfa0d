"""From a described model to an adapter: its weights, one tensor at a time, straight to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.checkpoints.network import Reading, check, read
from adapters.compiling import compile_layers
from adapters.description import Description
from adapters.head import whole_head
from adapters.toy import ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapters.base import DeviceAdapter
    from adapters.drafter import Drafter

__all__ = ["check", "load", "read_network"]


def load(description: Description, device: torch.device, logits_mib: int = 256) -> DeviceAdapter:
    """Read the weights onto the device, or onto all GPUs if `ModelOptions.device_map` says so.

    Raises:
        ValueError: one sentence, if a file is broken, a tensor has no place or a wrong shape, or a parameter gets none.
            All this is known before a weight is copied.
    """
    if description.place is None:
        toy = ToyMaskedLMAdapter()
        toy.read_out.bytes = logits_mib * 2**20
        return toy
    if description.drafter:
        _check_drafter(description.drafter)  # before the target's weights are read
    model = read_network(description, device)
    if description.options.compile:
        compile_layers(model)
    adapter = ADAPTERS[description.family.adapter](model, description, logits_mib)
    adapter.read_out.confidence_dtype = description.options.confidence_dtype
    return adapter


def read_network(description: Description, device: torch.device) -> PreTrainedModel:
    """The native network alone, of any layout, under native names.

    Raises:
        ValueError: as `load`.
    """
    from transformers.utils import logging

    assert description.place, "the toy has no network"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    return read(Reading(description, description.place, device))


def _transformer(model: PreTrainedModel, description: Description, logits_mib: int) -> DeviceAdapter:
    kernel = description.options.attention_kernel
    if description.drafter:
        return _drafted(model, description, logits_mib)
    adapter = TransformerAdapter(model, description.facts, description.codec, logits_mib, attention_kernel=kernel)
    adapter.head_module = whole_head(model)
    return adapter


def _drafted(model: PreTrainedModel, description: Description, logits_mib: int) -> DeviceAdapter:
    from adapters.dflash import load_drafter
    from adapters.drafted import DraftedAdapter

    drafter, kernel = description.drafter, description.options.attention_kernel
    assert drafter
    target = DraftedAdapter(model, description.facts, description.codec, logits_mib, attention_kernel=kernel)
    target.head_module = whole_head(model)
    if drafter.model is None:
        target.attach(load_drafter(drafter.folder, target))
        return target
    loaded = load(drafter.model, target.device, logits_mib)
    assert isinstance(loaded, TransformerAdapter)
    target.attach(loaded)
    return target


def _check_drafter(drafter: Drafter) -> None:
    """Whether its files are whole and fit, before its target's weights are read."""
    if drafter.model is None:
        from adapters.dflash import check_drafter

        check_drafter(drafter.folder)
    elif not drafter.place.gguf:
        check(drafter.model)


def _diffusion_gemma(model: Any, description: Description, logits_mib: int) -> DeviceAdapter:
    from adapters.diffusion_gemma import DiffusionGemmaAdapter

    return DiffusionGemmaAdapter(model, description.facts, description.codec, logits_mib)


ADAPTERS = {"transformer": _transformer, "diffusion_gemma": _diffusion_gemma}  # by `Family.adapter`
