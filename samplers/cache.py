"""Cache policies: how a step inside a block is worded as a `Forward`. The rule that picks tokens does not know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from samplers.forward import Attend, Forward
from samplers.state import DecodeState


class CachePolicy(Protocol):
    """The seam between a decoding rule and the reuse of keys and values."""

    name: ClassVar[str]

    def prefill(self, state: DecodeState) -> Iterator[Forward]:
        """Forwards made before the first block."""

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        """The forward of one step inside ``block`` that reads ``want``."""

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        """Forwards made once ``block`` is decided."""


class NoCache:
    """Every step runs the whole row: all of it under full attention, up to the block's end under block-causal."""

    name: ClassVar[str] = "none"

    def prefill(self, state: DecodeState) -> Iterator[Forward]:
        yield from ()

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        if state.model.attention != "blocks":
            return Forward(state.row, want)
        first = state.prompt_length if state.model.block_origin == "prompt" else 0
        return Forward(range(block.stop), want, attend=Attend("blocks", first, len(block)))

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        yield from ()


CACHES: dict[str, CachePolicy] = {policy.name: policy for policy in (NoCache(),)}
