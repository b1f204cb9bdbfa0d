"""Cache policies: how a step inside a block is worded as a `Forward`. The rule that picks tokens does not know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from samplers.forward import Forward
from samplers.state import DecodeState


class CachePolicy(Protocol):
    """The seam between a decoding rule and the reuse of keys and values."""

    name: ClassVar[str]

    def prefill(self, state: DecodeState) -> Iterator[Forward]:
        """Forwards made before the first block."""

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        """The forward of one step inside ``block`` that reads ``want``: its window, context and what is stored.

        Visibility, law and statistics are the sampler's to add.
        """

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        """Forwards made once ``block`` is decided."""


class NoCache:
    """Every step runs the whole row: all of it under full attention, up to the block's end under block-causal."""

    name: ClassVar[str] = "none"

    def prefill(self, state: DecodeState) -> Iterator[Forward]:
        yield from ()

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        return Forward(range(block.stop) if state.model.attention == "blocks" else state.row, want)

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        yield from ()


CACHES: dict[str, CachePolicy] = {policy.name: policy for policy in (NoCache(),)}
