"""The native `transformers` architecture of a family's checkpoint, with or without memory behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.families import Family
from adapters.reading_config import native_arguments
from adapters.tensors import Json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def native_config(family: Family, config: Json) -> PreTrainedConfig:
    """The configuration of the native architecture that serves a published ``config.json``.

    Raises:
        KeyError: if a key is absent.
        ValueError: one sentence, if a value is none, or transformers refuses it.
    """
    from transformers import AutoConfig

    arguments = native_arguments(family, config)
    try:
        return AutoConfig.for_model(**arguments)
    except Exception as error:  # transformers raises whatever its validators raise
        raise ValueError(f"transformers cannot read it: {first_line(error)}") from error


def build(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The network with undefined weights, attending through `adapters.attention`; on ``meta`` it takes no memory."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    attention.register()
    by_class: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = by_class.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.tie_weights()  # left undone where weights are not initialised
    return model


def first_line(error: Exception) -> str:
    """An error of another library in one line: its first, and the next where that ends in a colon."""
    said = ""
    for line in str(error).strip().splitlines():
        said = f"{said} {line.strip()}".strip()
        if not said.endswith(":"):
            break
    return f"{type(error).__name__}: {said}"


def parameter_count(model: torch.nn.Module) -> int:
    """Tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
