"""Cache policies: how a step inside a block is worded as a `Forward`. The rule that picks tokens does not know them.

Only ``block`` is exact. ``prefix`` and ``dual`` reuse keys of slots whose neighbours changed since (Fast-dLLM, arXiv
2505.22618): between two refreshes they approximate what full attention would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from samplers.forward import Forward, Kind
from samplers.state import DecodeState


class CachePolicy(Protocol):
    """The seam between a decoding rule and the reuse of keys and values."""

    name: ClassVar[str]
    attentions: ClassVar[frozenset[str]]  # of the models it can serve

    def prefill(self, state: DecodeState, first: range) -> Iterator[Forward]:
        """Forwards made before ``first``, the first block."""

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        """The forward of one step inside ``block`` that reads ``want``: its window, context and what is stored.

        Visibility, law and statistics are the sampler's to add, here and in `prefill` and `commit`.
        """

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        """Forwards made once ``block`` is decided."""


class NoCache:
    """Every step runs the whole row: all of it under full attention, up to the block's end under block-causal."""

    name: ClassVar[str] = "none"
    attentions: ClassVar[frozenset[str]] = frozenset({"full", "blocks"})

    def prefill(self, state: DecodeState, first: range) -> Iterator[Forward]:
        yield from ()

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        return Forward(range(block.stop) if state.model.attention == "blocks" else state.row, want)

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        yield from ()


def first_run(state: DecodeState, block: range) -> int:
    """First slot to run for a block: where the prediction of slot i is read at row i - 1, the one before it."""
    return max(block.start - state.model.shift, 0)


def _refreshing(state: DecodeState, block: range) -> Kind:
    """The first run of a block decodes too; from the second block on it replaces keys that were stored before."""
    return Kind.DENOISE if block.start <= state.prompt_length else Kind.REFRESH


class PrefixCache:
    """A block's first step runs the whole row and keeps what lies before the block; the others run the rest."""

    name: ClassVar[str] = "prefix"
    attentions: ClassVar[frozenset[str]] = frozenset({"full"})

    def prefill(self, state: DecodeState, first: range) -> Iterator[Forward]:
        yield from ()

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        before = range(first_run(state, block))
        if step == 0:
            return Forward(state.row, want, store=before, kind=_refreshing(state, block))
        return Forward(range(before.stop, len(state.tokens)), want, context=before)

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        yield from ()


class DualCache:
    """A block's first step runs and keeps the whole row; the others run the block alone and overwrite its keys.

    What lies behind the block stays as it was at its first step.
    """

    name: ClassVar[str] = "dual"
    attentions: ClassVar[frozenset[str]] = frozenset({"full"})

    def prefill(self, state: DecodeState, first: range) -> Iterator[Forward]:
        yield from ()

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        row, run = state.row, range(first_run(state, block), block.stop)
        if step == 0:
            return Forward(row, want, store=row, kind=_refreshing(state, block))
        return Forward(run, want, context=row, store=run)

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        yield from ()


class BlockCache:
    """The keys of decided blocks are kept: exact, because under block-causal attention nothing behind changes them.

    A decided block is run once more to store its final keys, unless it is the last (as SDAR, arXiv 2510.06303).
    """

    name: ClassVar[str] = "block"
    attentions: ClassVar[frozenset[str]] = frozenset({"blocks"})

    def prefill(self, state: DecodeState, first: range) -> Iterator[Forward]:
        before = range(first.start)
        if before:
            yield Forward(before, store=before)

    def forward(self, state: DecodeState, block: range, step: int, want: Sequence[int]) -> Forward:
        start = first_run(state, block)
        return Forward(range(start, block.stop), want, context=range(start))

    def commit(self, state: DecodeState, block: range) -> Iterator[Forward]:
        if block.stop < len(state.tokens):
            yield Forward(block, context=range(block.start), store=block, kind=Kind.COMMIT)


CACHES: dict[str, CachePolicy] = {
    policy.name: policy for policy in (NoCache(), PrefixCache(), DualCache(), BlockCache())
}
