"""The one attention function registered with transformers, and the kernels it calls as `Visibility` says.

Shapes: B rows of a group, L lines of keys (the store's rows, or the B windows themselves), H heads, G query heads that
share a key head, W slots of the window, K keys of a line, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None

NAME = "blockdiff"
masks_built = 0  # dense masks since the import: tests hold the common paths to none


class Everywhere:
    """A tensor read by layers that may lie on several devices: each gets its copy once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.first, self.copies = tensor, {tensor.device: tensor}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self.copies:
            self.copies[device] = self.first.to(device)
        return self.copies[device]


@dataclass(frozen=True, slots=True)
class Run:
    """Members of a group whose lines are adjacent: views suffice to give them one call."""

    members: slice
    lines: slice
    keys: int  # read of each line


@dataclass(slots=True)
class Packing:
    """Arguments of the variable-length kernel. Every line is a sequence; those outside the group have no query.

    So the lines are used where they lie, whatever the group's rows. `real` (T,) picks the queries that are not padding:
    a causal sequence must end with its last one. Otherwise padding is run along, which costs no copy.
    """

    queries: Everywhere  # (L + 1,) int32, cumulative
    keys: Everywhere  # (L + 1,) int32, cumulative
    used: Everywhere  # (L,) int32, keys a line's queries see
    longest: int  # most queries of a line
    most: int  # most keys used of a line
    causal: bool
    real: Everywhere | None = None
    shared: dict[int, Everywhere] = field(default_factory=dict)  # `queries` where G heads ride as queries, by G

    def riding(self, groups: int) -> Everywhere:
        if groups not in self.shared:
            self.shared[groups] = Everywhere(self.queries.first * groups)
        return self.shared[groups]


@dataclass(slots=True)
class Visibility:
    """What each query may see, and how it is computed.

    `packing` stands for one call of the variable-length kernel, `runs` for a call of sdpa each, under `mask` if there
    is one. With neither, every query sees every key of its line, or, if `causal`, those up to itself.
    """

    causal: bool = False
    runs: tuple[Run, ...] = ()
    mask: torch.Tensor | None = None  # (B, 1, W, K) bool
    packing: Packing | None = None
    _masks: dict[int, Everywhere] = field(default_factory=dict)

    def mask_of(self, groups: int, device: torch.device) -> torch.Tensor | None:
        """(B, 1, G * W, K): the mask once for each of the heads that ride as queries."""
        if self.mask is None:
            return None
        if groups not in self._masks:
            self._masks[groups] = Everywhere(self.mask.repeat(1, 1, groups, 1) if groups > 1 else self.mask)
        return self._masks[groups].on(device)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    visibility: Visibility | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **unused: Any,  # transformers hands every attention function all it has
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention of query (B, H, W, D) to key and value (L, H / G, K, D) -> (B, W, H, D).

    Raises:
        ValueError: for an architecture whose scores are capped, whose heads have sinks, or whose layers would not see
            all of so long a row.
    """
    assert visibility is not None and attention_mask is None
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} caps its scores or has attention sinks: it is not served yet")
    if sliding_window is not None and key.shape[2] > sliding_window:
        raise ValueError(f"{type(module).__name__} sees {sliding_window} slots only, fewer than the longest row has")
    if visibility.packing:
        return _packed(query, key, value, visibility.packing, scaling), None
    if visibility.causal:
        grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2), None
    return _in_runs(query, key, value, visibility, scaling), None


def _in_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visibility: Visibility, scaling: float | None
) -> torch.Tensor:
    """The heads that share a key head ride as further queries, so that no kernel expands the keys for them."""
    rows, heads, window, size = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(rows, key.shape[1], groups * window, size)
    mask = visibility.mask_of(groups, query.device)
    outputs = []
    for run in visibility.runs or (Run(slice(None), slice(None), key.shape[2]),):
        shown = mask[run.members, :, :, : run.keys] if mask is not None else None
        keys, values = key[run.lines, :, : run.keys], value[run.lines, :, : run.keys]
        outputs.append(scaled_dot_product_attention(query[run.members], keys, values, attn_mask=shown, scale=scaling))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(rows, heads, window, size).transpose(1, 2)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scaling: float | None
) -> torch.Tensor:
    """One call of the variable-length kernel on (T, H, D) queries and (L * K, H / G, D) keys, which are views."""
    rows, heads, window, size = query.shape
    device, groups = query.device, heads // key.shape[1]
    riding = groups if window == 1 else 1  # the kernel takes single queries of grouped heads for one a sequence
    tokens = query.transpose(1, 2).reshape(rows * window, heads, size)
    if riding > 1:
        tokens = tokens.view(rows, -1, riding, size).transpose(1, 2).reshape(rows * riding, -1, size)
    if packing.real:
        tokens = tokens[packing.real.on(device)]
    said: torch.Tensor = varlen_attn(
        tokens,
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        packing.riding(riding).on(device),
        packing.keys.on(device),
        packing.longest * riding,
        packing.most,
        scale=scaling,
        window_size=(-1, 0) if packing.causal else (-1, -1),
        enable_gqa=groups != riding,
        seqused_k=packing.used.on(device),
    )
    if packing.real:
        said = said.new_zeros(rows * window, heads, size).index_copy_(0, packing.real.on(device), said)
    if riding > 1:
        said = said.view(rows, riding, -1, size).transpose(1, 2)
    return said.reshape(rows, window, heads, size)


def register() -> None:
    """Make transformers know `NAME`. Without a mask function of that name it builds no mask of its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def count_mask() -> None:
    global masks_built
    masks_built += 1
