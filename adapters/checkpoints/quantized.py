"""Weights quantised at load by transformers' own quantisers, from a checkpoint under any family's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from adapters.checkpoints.fit import Plan
from adapters.checkpoints.reading import Checkpoint
from adapters.native import first_line
from adapters.tensors import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


def check(settings: Mapping[str, Any]) -> QuantizationConfigMixin:
    """The settings as transformers has them.

    Raises:
        ValueError: one sentence, if there is no such method, it has no such setting, or its package is absent.
    """
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AutoHfQuantizer,
        AutoQuantizationConfig,
    )

    method = settings.get("quant_method")
    methods = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if method not in methods:
        known = ", ".join(sorted(methods))
        raise ValueError(f"model.quantization.quant_method={method} is unknown to transformers: use one of {known}")
    try:
        config = AutoQuantizationConfig.from_dict(dict(settings))
        AutoHfQuantizer.from_config(config, pre_quantized=False).validate_environment()
    except Exception as error:  # each quantiser raises its own
        raise ValueError(f"model.quantization={dict(settings)}: {first_line(error)}") from error
    return config


@dataclass(frozen=True)
class _Assembled:
    """A native tensor that is put together out of the checkpoint's when transformers reads it."""

    like: torch.Tensor  # on the meta device
    parts: tuple[tuple[str, Piece], ...]
    checkpoint: Checkpoint

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.empty_like(self.like, device="cpu")
        for name, piece in self.parts:
            for _, tensor in self.checkpoint.tensors([name]):
                piece.view(whole).copy_(piece.cut(tensor))
        return whole[index]


def quantize(
    skeleton: PreTrainedModel, planned: Plan, checkpoint: Checkpoint, arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """The network of a skeleton with its weights quantised; ``arguments`` are those of `from_pretrained`.

    Raises:
        ValueError: one sentence, if the quantiser fails.
    """
    from transformers.utils import logging

    parts: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for name, found in planned.items():
        for piece in found:
            parts[piece.target].append((name, piece))
    targets = skeleton.state_dict()
    state = {name: _Assembled(targets[name], tuple(found), checkpoint) for name, found in parts.items()}
    try:
        model: PreTrainedModel = type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, **arguments
        )
    except Exception as error:  # each quantiser raises its own
        raise ValueError(f"model.quantization: {first_line(error)}") from error
    finally:
        logging.set_verbosity_error()
    return model
