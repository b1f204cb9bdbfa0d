"""Pipelined blocks in a buffer of few places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.blocks import NOTHING, BlockLine, MultiBlockSampler, accept, edges
from samplers.rules import ORDERS
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class MultiBDSampler(MultiBlockSampler):
    """As D2F, but never more blocks in work than the buffer has places; a block holds its place until it is stored.

    Multi-block diffusion's block buffer (MBD-LMs, Diffulex). A finished block's keys are stored by the next forward,
    which decodes the others; with one place that forward stores alone, as SDAR's does. Before the first block a prompt
    of whole blocks is run by itself; else its tail is part of the first block and decoded with it. Places that hold no
    block yet are not run: block-causal attention hides them from the others.

    Attributes:
        threshold: slots surer than this (``>``) are committed, 0..1. ``accept`` in the authors' code.
        block_activate_threshold: ``semi_complete`` in the authors' code.
        buffer_blocks: places of the buffer; 1 is one block after the other.
    """

    method_name: ClassVar[str] = "multibd"
    attentions: ClassVar[frozenset[str]] = frozenset({"blocks"})
    trained_for: ClassVar[str | None] = "multi-block diffusion, several noisy blocks at once (MBD-LMs)"

    threshold: float = 0.95
    block_activate_threshold: float = 0.9
    buffer_blocks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.buffer_blocks >= 1, "buffer_blocks", self.buffer_blocks, "a whole number from 1 up")

    def decode(self, state: DecodeState) -> Decoding:
        line, said = BlockLine(state, self.block_size), NOTHING
        law, attend = self.law(state), edges(state, self.block_size)
        if line.start < state.prompt_length:  # the prompt's tail
            line.add()
        elif line.start and line.waiting:
            said = yield replace(line.forward(until=line.start), attend=attend, law=law, draw=state.forwards)
        while True:
            if len(line.unstored) < self.buffer_blocks and not line.ended():
                line.grow(self.block_add_threshold)
            line.activate(self.block_activate_threshold)
            if self._done(state, line):
                return
            forward = line.forward(until=line.final())
            now = yield replace(forward, attend=attend, law=law, draw=state.forwards)
            said = line.recall(forward.window, said, now)
            for block in line.unstored:
                accept(state, block, said, self.threshold, ORDERS["probability"])

    def _done(self, state: DecodeState, line: BlockLine) -> bool:
        if self.early_stop and state.ended(line.stop):
            return True
        return not line.masked() and (line.ended() or not line.waiting)
