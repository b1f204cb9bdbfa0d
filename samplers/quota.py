"""What SDAR and LLaDA2 share: a threshold with a quota below it, and the walk over blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from samplers.base import BlockDiffusionSampler, Decoding, refuse_unless
from samplers.cache import CACHES
from samplers.forward import Forward, Prediction
from samplers.rules import ORDERS, surest
from samplers.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class QuotaSampler(BlockDiffusionSampler):
    """Each step commits every slot above the threshold, or its quota of the surest where those are fewer.

    The quota spreads a *whole* block over the block's steps; where the prompt's tail holds a part of it, or a step
    committed more, the block is done early. What nobody will read is not run: a decided block is committed to the cache
    only if another one follows.

    Attributes:
        threshold: probability that a slot must exceed (``>``), 0..1; null commits the quota and no more.
        early_stop: stop once an end token is final, inside a block, too. The published code finishes the block.
    """

    threshold: float | None = None
    early_stop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(
            self.threshold is None or 0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1"
        )

    def decode(self, state: DecodeState) -> Decoding:
        policy, attend = CACHES[self.cache], self.attend(state)
        blocks = list(state.blocks(self.block_size))
        for forward in policy.prefill(state, blocks[0]) if blocks else ():
            yield replace(forward, attend=attend)
        for block in blocks:
            yield from self.denoise(state, block)
            last = block is blocks[-1] or self.stops(state, block)
            for forward in self.commit(state, block, last):
                yield replace(forward, attend=attend)
            if last:
                return

    @abstractmethod
    def denoise(self, state: DecodeState, block: range) -> Decoding:
        """Decide a block, or as much of it as the answer has."""

    def stops(self, state: DecodeState, block: range) -> bool:
        """Whether no block is decoded after this one."""
        return self.early_stop and self.end(state, block) is not None

    def end(self, state: DecodeState, block: range) -> int | None:
        """A block's first end token, if no mask is left before it."""
        slots, ends = range(max(block.start, state.prompt_length), block.stop), state.model.end_ids
        first = next((i for i in slots if state.mask[i] or state.tokens[i] in ends), None)
        return None if first is None or state.mask[first] else first

    def commit(self, state: DecodeState, block: range, last: bool) -> Iterator[Forward]:
        """Forwards made once a block is decided; none if it was the last."""
        yield from () if last else CACHES[self.cache].commit(state, block)

    def forward(self, state: DecodeState, block: range, step: int) -> Forward:
        """The forward of one step inside a block."""
        forward = super().forward(state, block, step)
        return replace(forward, draw=step)  # a slot has one block: its draws are the same whatever a cache adds

    def chosen(self, state: DecodeState, prediction: Prediction, step: int) -> Sequence[int]:
        """Undecided slots that a step commits."""
        masked = [i for i in prediction.positions if state.mask[i]]
        quota = self.quota(state, len(masked), step)
        if self.threshold is not None:
            sure = [i for i in masked if prediction.confidence[i] > self.threshold]
            if len(sure) >= quota:
                return sure
        score = ORDERS[self.order]
        return surest(masked, lambda i: score(state, prediction, i), quota)

    def steps_per_block(self, state: DecodeState) -> int:
        """The share of `steps` of a whole block: those asked for, rounded up, divide it.

        Raises:
            ValueError: if that leaves a block without a step.
        """
        share = self.steps // max(1, -(-state.asked // self.block_size))
        refuse_unless(share >= 1, "steps", self.steps, f"at least one for each block of {self.block_size} slots")
        return share

    def quota(self, state: DecodeState, undecided: int, step: int) -> int:
        """The step's share of a whole block, larger shares first, and at most what is undecided."""
        each, more = divmod(self.block_size, self.steps_per_block(state))
        return min(each + (step < more), undecided)
