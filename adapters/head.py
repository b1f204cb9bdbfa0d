"""From last hidden states to logits: mostly one matrix, in some architectures scaled or capped afterwards.

Shapes: N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Given(nn.Module):
    """Stands in for the layers: what they return is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class WholeHead(nn.Module):
    """The network's own way from (N, D) to (N, V): its forward, with the layers taken out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.given = _Given()
        shell = copy.copy(model)
        shell._modules = {**model._modules, model.base_model_prefix: self.given}
        self.shell = [shell]  # in a list: its parameters are the model's
        self.ids = torch.zeros(1, 1, dtype=torch.long)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.given.hidden = hidden[None]
        logits: torch.Tensor = self.shell[0](input_ids=self.ids, use_cache=False).logits[0]
        self.given.hidden = torch.empty(0)
        return logits


@torch.inference_mode()
def whole_head(model: PreTrainedModel) -> nn.Module:
    """The output matrix if it is all there is, else all that the architecture does behind its layers.

    Raises:
        ValueError: if that cannot be told apart.
    """
    matrix, whole = model.get_output_embeddings(), WholeHead(model)
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().hidden_size
    hidden = torch.randn(4, size, generator=generator).to(model.device, model.dtype)
    try:
        own = whole(hidden)
    except Exception as error:  # an architecture whose forward needs more of its layers
        raise ValueError(f"{type(model).__name__} does not keep layers and head apart: it is not served") from error
    alone = matrix(hidden[None])[0]
    return matrix if torch.equal(own.to(alone).nan_to_num(), alone.nan_to_num()) else whole
