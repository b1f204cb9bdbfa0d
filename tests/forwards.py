"""Forwards of small networks, worded by hand, and what they should give by plain formulas."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from adapters.base import Request
from adapters.transformer import TransformerAdapter
from samplers import Attend, Forward
from tests.models import END


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, END, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(
    row: int,
    window: range,
    changed: dict[int, int] | None = None,
    shift: int = 0,
    store: range | bool = False,
    **more: Any,
) -> Request:
    """A forward of a window that reads every row of it; ``store``: slots, or all or none."""
    changed = changed or {}
    want = range(window.start + shift, window.stop + shift)
    kept = store if isinstance(store, range) else window if store else range(0)
    return Request(row, Forward(window, want, store=kept, **more), list(changed), list(changed.values()))


def logits(adapter: TransformerAdapter, *requests: Request) -> list[torch.Tensor]:
    """What the head says of each request's wanted slots, (N, V) each, through the public `forward`."""
    heard: list[torch.Tensor] = []
    hook = adapter.head_module.register_forward_hook(lambda module, given, said: heard.append(said.clone()))
    adapter.forward(requests)
    hook.remove()
    ordered = sorted(requests, key=lambda request: request.row)
    parts = torch.cat(heard).split([len(r.forward.want) for r in ordered])
    return [parts[ordered.index(request)] for request in requests]


def placed(adapter: TransformerAdapter, *rows: list[int], slots: int = 64) -> TransformerAdapter:
    adapter.open(len(rows), slots)
    for row, tokens in enumerate(rows):
        adapter.place(row, tokens, 0)
    return adapter


def same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 5e-5) -> bool:
    return ours.shape == theirs.shape and (ours - theirs).abs().max().item() < tolerance


def dense(adapter: TransformerAdapter, tokens: list[int], visible: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights under transformers' eager attention and a dense mask, (T, T) bool -> (T, V)."""
    config = type(adapter.model.config)(**adapter.model.config.to_dict())
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(adapter.model.state_dict())
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]


def pattern(attend: Attend, length: int) -> torch.Tensor:
    """(T, T) bool, written as the words of `Attend` say, pair by pair."""

    def block(slot: int) -> int:
        return -1 if slot < attend.first else (slot - attend.first) // attend.size

    def sees(query: int, key: int) -> bool:
        if attend.pattern == "blocks":
            return block(key) <= block(query)
        return attend.pattern == "full" or key <= query

    return torch.tensor([[sees(query, key) for key in range(length)] for query in range(length)])
