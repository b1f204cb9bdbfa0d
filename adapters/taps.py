"""Hidden states of chosen layers of a network, caught while it runs.

Shapes: B rows, T positions, F layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def tapped(body: nn.Module, layers: Sequence[int]) -> Iterator[Mapping[int, torch.Tensor]]:
    """Catch what the given ``layers`` of a network's body put out, (B, T, D), in the forwards inside the context.

    The residual stream after the layer, before any final norm; a further forward replaces what was caught.
    """
    caught: dict[int, torch.Tensor] = {}

    def catch(number: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            caught[number] = output[0] if isinstance(output, tuple) else output

        return hook

    stack: Any = body.layers
    handles = [stack[number].register_forward_hook(catch(number)) for number in layers]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def features(caught: Mapping[int, torch.Tensor], layers: Sequence[int]) -> torch.Tensor:
    """What was caught of ``layers``, side by side, (B, T, F·D)."""
    device = caught[layers[-1]].device  # layers may lie on several
    return torch.cat([caught[number].to(device) for number in layers], -1)
