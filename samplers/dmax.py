"""Soft parallel decoding: every filled slot is predicted anew each step and shown as a mixture with the mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, Decoding, refuse_unless
from samplers.cache import CACHES
from samplers.forward import Forward, Kind, Prediction, Soft
from samplers.state import DecodeState, ModelFacts

SURE = 0.9  # of all slots of a block together it ends the block; a constant in the authors' code
COMPAT = (None, "dmax")


@dataclass(frozen=True, kw_only=True)
class DMaxSampler(BlockDiffusionSampler):
    """Fill the block from its left, rewrite what is filled, and show it to the model as softly as it was predicted.

    DMax's soft parallel decoding (arXiv 2604.08302). A step reads every slot of the block that was open on entry:
    masks are filled up to the first one below the threshold, at least the leftmost; filled slots take whatever is
    predicted now. The next step sees a filled slot as ``p E[token] + (1 - p) E[mask]``. A block is done once no mask
    is left and either all its predictions are sure (0.9) or nothing changed.

    On block-causal models, for which it is published, ``cache: block`` stores a block's keys with the first forward of
    the next one, which runs both: no forward is spent on storing. On models that attend fully, our adaptation: the
    same rule with any of their cache policies; what lies outside the block is shown as the ids it holds.

    Attributes:
        threshold: smallest probability to fill a mask (``>=``), 0..1; at 0 the first step fills the block.
        steps: a block's share is the most steps it takes; below one a slot, a step fills at least what the rest needs.
        early_stop: stop after a block once an end token is final, as published.
        compat: ``dmax`` does as the authors' code: the same end tests with masks left, an end token anywhere in the
            block (the prompt's tail too) ends the sequence and fills the rest of the canvas, and a prompt shorter than
            a block costs a forward.
    """

    method_name: ClassVar[str] = "dmax"
    trained_for: ClassVar[str | None] = "on-policy uniform training (DMax)"

    threshold: float = 0.5
    early_stop: bool = True
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or dmax")

    @classmethod
    def options(cls) -> frozenset[str]:
        return super().options() - {"order", "cfg_scale"}

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        return {"cache": "block" if model.attention == "blocks" else "none"}

    def decode(self, state: DecodeState) -> Decoding:
        law, attend = self.law(state), self.attend(state)
        decided = range(0)  # the block before, if we filled it
        for block in state.blocks(self.block_size):
            active = state.masked_in(block)
            if not decided:
                for forward in self._prefill(state, block):
                    yield replace(forward, attend=attend)
            soft: dict[int, Soft] = {}
            for step in range(self.steps_per_block(state)):
                forward = self._forward(state, decided, block, step, active)
                prediction = yield replace(forward, inputs=soft, attend=attend, law=law, draw=state.steps)
                before = [state.tokens[slot] for slot in active]
                self.update_state(state, prediction, step)
                if self._settled(state, prediction, before):
                    break
                soft = {slot: as_predicted(prediction, slot) for slot in active if not state.mask[slot]}
            decided = block
            if self.early_stop and self._ended(state, block):
                return

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        """Fill the promoted masks and rewrite what was filled before."""
        masked = [slot for slot in prediction.positions if state.mask[slot]]
        sure = sure_from_the_left(masked, prediction.confidence, self.threshold)
        promoted = masked[: max(sure, self.quota(state, len(masked), step))]
        for slot in prediction.positions:
            if not state.mask[slot] or slot in promoted:
                state.commit(slot, prediction.token[slot], prediction.confidence[slot])

    def _prefill(self, state: DecodeState, first: range) -> Sequence[Forward]:
        if (
            self.compat == "dmax" and self.cache == "block" and not first.start
        ):  # their code runs the block itself, to no use
            return [Forward(first, kind=Kind.COMMIT)]
        return list(CACHES[self.cache].prefill(state, first))

    def _forward(self, state: DecodeState, decided: range, block: range, step: int, active: Sequence[int]) -> Forward:
        if self.cache == "block" and decided and step == 0:  # the block before cannot see this one
            window, before = range(decided.start, block.stop), range(decided.start)
            return Forward(window, active, context=before, store=decided)
        return CACHES[self.cache].forward(state, block, step, active)

    def _settled(self, state: DecodeState, prediction: Prediction, before: Sequence[int]) -> bool:
        active = prediction.positions
        if self.compat is None and any(state.mask[slot] for slot in active):
            return False
        unchanged = before == [state.tokens[slot] for slot in active]
        return unchanged or all(prediction.confidence[slot] >= SURE for slot in active)

    def _ended(self, state: DecodeState, block: range) -> bool:
        if self.compat is None:
            return state.ended(block.stop)
        end = next((state.tokens[slot] for slot in block if state.tokens[slot] in state.model.end_ids), None)
        if end is None:
            return False
        for slot in range(block.stop, len(state.tokens)):
            state.commit(slot, end)
        return True


def as_predicted(prediction: Prediction, slot: int) -> Soft:
    """A token and, for what its probability lacks to 1, the mask."""
    return Soft((prediction.token[slot],), (prediction.confidence[slot],))


def sure_from_the_left(masked: Sequence[int], confidence: Mapping[int, float], threshold: float) -> int:
    """How many masks, left to right, come before the first unsure one; filled slots between them are passed over."""
    unsure = (count for count, slot in enumerate(masked) if confidence[slot] < threshold)
    return next(unsure, len(masked))
