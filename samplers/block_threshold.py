"""dInfer's block diffusion: a block's keys are stored by the first forward of the next one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, Decoding, refuse_unless
from samplers.cache import CACHES
from samplers.forward import Forward, Kind, Prediction
from samplers.rules import FILLED, surest
from samplers.state import DecodeState, ModelFacts

SLACK = 1e-5  # of probability: what is as sure as the surest but for rounding goes with it
COMPAT = (None, "dinfer")


@dataclass(frozen=True, kw_only=True)
class BlockThresholdSampler(BlockDiffusionSampler):
    """Commit every undecided slot as sure as the threshold, or as the surest slot where that is less.

    dInfer's threshold decoder in its block-diffusion runner (arXiv 2510.08666). ``cache: block`` stores a block's keys
    with the first forward of the next one, which runs both, the earlier block blind to the later: other than in
    `ThresholdSampler`, no forward is spent on storing. On models that attend fully it takes any of their caches. No
    training is presumed.

    Attributes:
        threshold: smallest probability to commit (``>=``), 0..1.
        early_stop: stop after a block once an end token is final, as published.
        maximum_unroll, expected_tpf: for ``compat: dinfer``, which looks whether masks are left only after as many
            forwards as the masks would take at `expected_tpf` tokens each, at most `maximum_unroll`. A forward on a
            block without masks stores its keys, and the next one then runs its own block alone.
        compat: ``dinfer``: a prompt shorter than a block costs a forward, and an end token anywhere in a block, the
            prompt's tail included, ends the sequence.
    """

    method_name: ClassVar[str] = "block_threshold"

    threshold: float = 0.9
    early_stop: bool = True
    maximum_unroll: int = 1
    expected_tpf: int = 15
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.maximum_unroll >= 1, "maximum_unroll", self.maximum_unroll, "a whole number from 1 up")
        refuse_unless(self.expected_tpf >= 1, "expected_tpf", self.expected_tpf, "a whole number from 1 up")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or dinfer")
        if self.maximum_unroll > 1 and self.compat is None:
            raise ValueError(
                f"sampler.maximum_unroll={self.maximum_unroll} only adds forwards: use 1, or sampler.compat=dinfer"
            )

    @classmethod
    def options(cls) -> frozenset[str]:
        return super().options() - {"order", "cfg_scale"}

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        return {"cache": "block" if model.attention == "blocks" else "none"}

    def decode(self, state: DecodeState) -> Decoding:
        unstored = range(0)  # the block before, while its last tokens are in no key
        for block in state.blocks(self.block_size):
            if block.start <= state.prompt_length:
                yield from self._prefill(state, block)
            unstored = yield from self._fill(state, unstored, block)
            if self.early_stop and self._ended(state, block):
                if block.stop < len(state.tokens) and not state.ended(block.stop):  # the end is in the prompt's tail
                    state.commit(block.stop, min(state.model.end_ids))  # their code writes it to all slots behind
                    state.notes[FILLED] += 1
                return

    def _prefill(self, state: DecodeState, first: range) -> Decoding:
        policy, attend = CACHES[self.cache], self.attend(state)
        if self.compat and self.cache == "block" and not first.start:  # their code runs the block itself, to no use
            yield Forward(first, attend=attend, kind=Kind.COMMIT)
        for forward in policy.prefill(state, first):
            yield replace(forward, attend=attend)

    def _fill(self, state: DecodeState, unstored: range, block: range) -> Generator[Forward, Prediction, range]:
        """Decide a block; returns it, or nothing if a forward stored the keys of all its tokens."""
        attend, law, step, stored = self.attend(state), self.law(state), 0, False
        while masked := state.masked_in(block):
            for _ in range(self._unrolled(len(masked))):
                forward = self._forward(state, unstored if step == 0 else range(0), block, step)
                prediction = yield replace(forward, attend=attend, law=law, draw=step)
                self.update_state(state, prediction, step)
                step, stored = step + 1, forward.store == block
        return range(0) if stored else block

    def _forward(self, state: DecodeState, unstored: range, block: range, step: int) -> Forward:
        want = state.masked_in(block)
        if self.cache != "block":
            return CACHES[self.cache].forward(state, block, step, want)
        if unstored:
            return Forward(range(unstored.start, block.stop), want, context=range(unstored.start), store=unstored)
        if not want:
            return Forward(block, context=range(block.start), store=block, kind=Kind.COMMIT)
        return CACHES["block"].forward(state, block, step, want)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        masked = [slot for slot in prediction.positions if state.mask[slot]]
        chosen = self.chosen(masked, prediction.confidence)
        least = self.quota(state, len(masked), step) if masked else 0
        if len(chosen) < least:
            chosen = surest(masked, prediction.confidence.__getitem__, least)
        for slot in chosen:
            state.commit(slot, prediction.token[slot], prediction.confidence[slot])

    def chosen(self, masked: Sequence[int], confidence: Mapping[int, float]) -> Sequence[int]:
        """Undecided slots that a step commits; ``masked`` ascend."""
        least = as_sure_as(self.threshold, (confidence[slot] for slot in masked))
        return [slot for slot in masked if confidence[slot] >= least]

    def _unrolled(self, masked: int) -> int:
        """Forwards until the next look at what is left."""
        return max(min(masked // self.expected_tpf, self.maximum_unroll), 1)

    def _ended(self, state: DecodeState, block: range) -> bool:
        if self.compat:
            return any(state.tokens[slot] in state.model.end_ids for slot in block)
        return state.ended(block.stop)


def as_sure_as(threshold: float, confidences: Iterable[float]) -> float:
    """The least confidence to commit: the threshold, or by rounding less than the largest one where that is lower."""
    return min(threshold, max(confidences, default=threshold) - SLACK)
