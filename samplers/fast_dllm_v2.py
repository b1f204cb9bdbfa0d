"""Fast-dLLM v2: blocks whose first token is autoregressive, filled sub-block by sub-block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import ClassVar

from samplers.base import Decoding, Sampler, refuse_unless
from samplers.blocks import edges
from samplers.forward import Forward, Kind, Law, Prediction
from samplers.state import DecodeState, ModelFacts

CACHES = ("none", "block", "dual")
COMPAT = (None, "fast_dllm_v2")


@dataclass(frozen=True, kw_only=True)
class FastDLLMV2Sampler(Sampler):
    """Fill a block's sub-blocks from the left; run the full block once more for its keys and for the next one's start.

    Fast-dLLM v2 (arXiv 2509.26328). A step commits the sub-block's slots that are surer than the threshold, and always
    the surest. The forward that stores a decided block predicts the token behind it, where the model predicts a slot
    at the row before it: a block is begun autoregressively.

    Attributes:
        block_size: slots of a block; the model's trained size, 32 in the published checkpoints.
        sub_block_size: slots of a sub-block, which are decided before the next ones are looked at.
        threshold: probability that a slot must exceed (``>``), 0..1; 1 is one token a step.
        cache: ``block`` keeps the keys of decided blocks, which is exact; ``dual`` also those inside a block: a
            sub-block's first step runs the whole block, the others the sub-block alone and replace its keys in place.
        early_stop: stop as soon as an end token is final, inside a block, too.
        compat: ``fast_dllm_v2``: its `generate` rounds the tokens asked for down to blocks, counts them from the one
            that holds the prompt's tail and adds one token; never shows the model a prompt of exactly one block; and
            above temperature 0 judges by the law after top-p.
    """

    method_name: ClassVar[str] = "fast_dllm_v2"
    attentions: ClassVar[frozenset[str]] = frozenset({"blocks"})
    trained_for: ClassVar[str | None] = "complementary masks in blocks that predict the next slot (Fast-dLLM v2)"

    block_size: int = 32
    sub_block_size: int = 8
    threshold: float = 0.9
    cache: str = "block"
    early_stop: bool = True
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.block_size >= 1, "block_size", self.block_size, "a whole number from 1 up")
        refuse_unless(self.sub_block_size >= 1, "sub_block_size", self.sub_block_size, "a whole number from 1 up")
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.cache in CACHES, "cache", self.cache, f"one of {', '.join(CACHES)}")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or fast_dllm_v2")

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        super().check(model)
        if model.mask_id is None:
            raise ValueError(
                f"sampler={cls.method_name} fills mask tokens, which an autoregressive model does not have: "
                "use sampler=autoregressive, or a diffusion model"
            )

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        return {"block_size": model.trained_block} if model.trained_block else {}

    def canvas_length(self, prompt_length: int, asked: int, model: ModelFacts) -> int:
        """Blocks counted from position 0 are whole, as the model was trained."""
        if model.block_origin == "prompt":
            return asked
        if self.compat:
            return max(asked // self.block_size * self.block_size - prompt_length % self.block_size + 1, 0)
        return asked + -(prompt_length + asked) % self.block_size

    def decode(self, state: DecodeState) -> Decoding:
        blocks = list(state.blocks(self.block_size))
        before = [range(self._unseen(state), blocks[0].start)] if blocks else []
        for decided, block in zip(chain(before, blocks), blocks, strict=False):
            yield from self._settle(state, decided)
            yield from self._fill(state, block)
            if self._ended(state, block):
                return

    def _settle(self, state: DecodeState, decided: range) -> Decoding:
        """Run what is decided for good: its keys are stored, and its last row tells the first token behind it."""
        behind, before = decided.stop, range(self._unseen(state), decided.start)
        want = [behind] if decided and state.model.shift and state.mask[behind] else []
        if self.cache != "none" and decided:
            forward = Forward(decided, want, context=before, store=decided, kind=Kind.COMMIT)
        elif want:
            forward = Forward(range(before.start, behind), want)
        else:
            return
        prediction = yield replace(forward, attend=edges(state, self.block_size), law=self.law(state))
        for slot in want:
            state.commit(slot, prediction.token[slot], prediction.confidence[slot])

    def _fill(self, state: DecodeState, block: range) -> Decoding:
        """Decide a block, or as much of it as the answer has."""
        attend, law, kept = edges(state, self.block_size), self.law(state), False
        for part in self._sub_blocks(block):
            for step in count(1):
                if self._ended(state, block) or not state.masked_in(part):
                    break
                whole = not kept or state.mask[part.start]
                prediction = yield replace(self._forward(state, block, part, whole), attend=attend, law=law, draw=step)
                self._commit(state, part, prediction)
                kept = self.cache == "dual"

    def _forward(self, state: DecodeState, block: range, part: range, whole: bool) -> Forward:
        """A step inside ``part`` of a block, run on the ``whole`` block or on the part alone."""
        start = self._unseen(state)
        want = sorted({self._read_as(state, slot) for slot in state.masked_in(part)})
        if self.cache == "none":
            return Forward(range(start, block.stop), want)
        if not whole:  # its first slot is decided: every row that is read lies inside
            return Forward(part, want, context=range(start, block.stop), store=part)
        kept = block if self.cache == "dual" else range(0)
        return Forward(block, want, context=range(start, block.start), store=kept)

    def _commit(self, state: DecodeState, part: range, prediction: Prediction) -> None:
        """Commit every undecided slot above the threshold, and the surest."""
        masked = state.masked_in(part)
        read = {slot: self._read_as(state, slot) for slot in masked}
        surest = max(masked, key=lambda slot: prediction.confidence[read[slot]])
        for slot in masked:
            token, confidence = prediction.token[read[slot]], prediction.confidence[read[slot]]
            if slot == surest or confidence > self.threshold:
                state.commit(slot, token, confidence)

    def _sub_blocks(self, block: range) -> Iterator[range]:
        for first in range(block.start, block.stop, self.sub_block_size):
            yield range(first, min(first + self.sub_block_size, block.stop))

    def _ended(self, state: DecodeState, block: range) -> bool:
        """Whether a block has an end token and no mask before it; those before the block have none."""
        if not self.early_stop:
            return False
        slots, ends = range(max(block.start, state.prompt_length), block.stop), state.model.end_ids
        first = next((slot for slot in slots if state.mask[slot] or state.tokens[slot] in ends), None)
        return first is not None and not state.mask[first]

    def _unseen(self, state: DecodeState) -> int:
        """Slots that the model is never shown: as published, a prompt of exactly one block."""
        alone = state.model.block_origin == "zero" and state.prompt_length == self.block_size
        return self.block_size if self.compat and alone else 0

    def _read_as(self, state: DecodeState, slot: int) -> int:
        """The slot whose row is read for a slot: without a row before it, what its own one says of the next slot."""
        unseen = self._unseen(state)
        return slot + 1 if state.model.shift and unseen and slot == unseen else slot

    def law(self, state: DecodeState) -> Law:
        return replace(super().law(state), judged="filtered" if self.compat and self.temperature else "raw")
