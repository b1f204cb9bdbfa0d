"""A network's layers through `torch.compile`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_compiler(device: str) -> None:
    """Refuse where nothing can be compiled for ``cpu`` or ``cuda``.

    Raises:
        ValueError: one sentence.
    """
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    if device == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ValueError("model.compile=true needs a C++ compiler, and there is none: install g++, or set it to false")


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every layer in place, with window lengths left open so that a new one does not compile anew.

    The attention inside runs as it is: its kernel is chosen by what a request may see, and keys are written in place.
    """
    kinds = model._no_split_modules or ()
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        if type(module).__name__ in kinds:
            module.compile(dynamic=True)
