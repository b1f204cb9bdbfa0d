"""A network whose layers lie on several GPUs: placed by `accelerate`, whose hooks move what passes between them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from adapters.native import build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Layout = dict[str, torch.device]  # device of a module and all below it; "" is the whole network


def check(device_map: str) -> None:
    """Refuse what cannot be had.

    Raises:
        ValueError: one sentence.
    """
    if device_map != "auto":
        raise ValueError(f"model.device_map={device_map} is unknown: use auto, or null for one device")
    if find_spec("accelerate") is None:
        raise ValueError("model.device_map=auto needs the package accelerate: pip install accelerate")


def layout(skeleton: PreTrainedModel, device: torch.device) -> Layout:
    """Layers over all GPUs in equal measure, whole; on a CPU or a single GPU everything is on ``device``.

    Raises:
        ValueError: if the GPUs are too small.
    """
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return {"": device}
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = sorted(skeleton._no_split_modules or ())
    room = get_balanced_memory(skeleton, dtype=skeleton.dtype, no_split_module_classes=whole)
    places = infer_auto_device_map(skeleton, room, no_split_module_classes=whole, dtype=skeleton.dtype)
    if any(place in ("cpu", "disk") for place in places.values()):
        raise ValueError(f"model.device_map=auto: {torch.cuda.device_count()} GPUs are too small for this model")
    return {name: torch.device("cuda", place) for name, place in places.items()}


def build_over(config: PreTrainedConfig, dtype: torch.dtype, places: Layout) -> PreTrainedModel:
    """The network with undefined weights, each where it belongs and nowhere else."""
    if set(places) == {""}:
        return build(config, dtype, places[""])
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = build(config, dtype, torch.device("cpu"))  # buffers that no file holds are computed
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                place = _place(places, f"{name}.{leaf}")
                module._parameters[leaf] = nn.Parameter(torch.empty_like(parameter, device=place), requires_grad=False)
        for leaf, buffer in module._buffers.items():
            module._buffers[leaf] = None if buffer is None else buffer.to(_place(places, f"{name}.{leaf}"))
    model.tie_weights()
    return model


def dispatch(model: PreTrainedModel, places: Layout) -> PreTrainedModel:
    """Let each module move its inputs to where it lies."""
    if set(places) == {""}:
        return model
    from accelerate import dispatch_model

    dispatch_model(model, dict(places), force_hooks=True)
    return model


def _place(places: Layout, name: str) -> torch.device:
    """Device of the innermost module that the layout names."""
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]
