"""Divide and conquer: each run of masks gets a token in its midst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from samplers.base import refuse_unless
from samplers.block_threshold import BlockThresholdSampler
from samplers.rules import surest


@dataclass(frozen=True, kw_only=True)
class HierarchySampler(BlockThresholdSampler):
    """Commit every slot surer than the threshold, the surest of each run of masks if it is fairly sure, and the surest.

    dInfer's hierarchical decoder (arXiv 2510.08666): slots that are decided at once lie apart, with masks between them
    that the next step sees from both sides; a block is split again and again.

    Attributes:
        threshold: probability that any slot must exceed (``>``), 0..1.
        low_threshold: probability that the surest slot of a run of masks must exceed (``>``), 0..1.
    """

    method_name: ClassVar[str] = "hierarchy"

    low_threshold: float = 0.62

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.low_threshold <= 1, "low_threshold", self.low_threshold, "a probability, 0 to 1")
        right = f"at most sampler.threshold={self.threshold}, which any slot may exceed"
        refuse_unless(self.low_threshold <= self.threshold, "low_threshold", self.low_threshold, right)

    def chosen(self, masked: Sequence[int], confidence: Mapping[int, float]) -> Sequence[int]:
        heads = [max(run, key=confidence.__getitem__) for run in runs(masked)]
        chosen = {slot for slot in heads if confidence[slot] > self.low_threshold}
        chosen |= {slot for slot in masked if confidence[slot] > self.threshold}
        return sorted(chosen.union(surest(masked, confidence.__getitem__, 1)))


def runs(slots: Sequence[int]) -> list[list[int]]:
    """Slots that lie side by side, together; ``slots`` ascend."""
    found: list[list[int]] = []
    for slot in slots:
        if found and found[-1][-1] == slot - 1:
            found[-1].append(slot)
        else:
            found.append([slot])
    return found
