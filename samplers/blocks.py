"""Bookkeeping of methods that decode several blocks at once: which blocks are in work, and how far each is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from samplers.base import Sampler, refuse_unless
from samplers.forward import Attend, Forward, Kind, Prediction
from samplers.rules import Score
from samplers.state import DecodeState, ModelFacts


@dataclass(slots=True)
class Block:
    """A block in work.

    Attributes:
        activated: it always commits a token ("complete" in D2F's code, "fully activated" in its paper); for good.
    """

    slots: range
    activated: bool = False


class BlockLine:
    """The blocks of one canvas that were added so far, left to right; the prompt counts as a finished one before them.

    Attributes:
        added: blocks in work or done.
        waiting: blocks still to come.
        stored: slots from 0 on whose keys are stored for good.
    """

    def __init__(self, state: DecodeState, block_size: int) -> None:
        self.state = state
        self.waiting = deque(state.blocks(block_size))
        self.added: list[Block] = []
        self.start = self.waiting[0].start if self.waiting else state.prompt_length
        self.stored = 0

    @property
    def stop(self) -> int:
        """End of the last block added."""
        return self.added[-1].slots.stop if self.added else self.start

    @property
    def unstored(self) -> list[Block]:
        return [block for block in self.added if block.slots.stop > self.stored]

    def masked(self) -> list[int]:
        """Undecided slots of all blocks added."""
        return self.state.masked_in(range(self.stored, self.stop))

    def progress(self, slots: range) -> float:
        """Share of the slots that is decided."""
        return self.state.mask[slots.start : slots.stop].count(False) / len(slots)

    def ended(self) -> bool:
        """Whether an end token was committed anywhere."""
        ends, first = self.state.model.end_ids, self.state.prompt_length
        return not ends.isdisjoint(self.state.tokens[first : self.stop])

    def add(self) -> None:
        """Take the next block into work."""
        self.added.append(Block(self.waiting.popleft()))

    def grow(self, least: float) -> None:
        """Add one block, if there is one, where the last one's progress is at least ``least``."""
        if self.waiting and (not self.added or self.progress(self.added[-1].slots) >= least):
            self.add()

    def activate(self, least: float) -> None:
        """Activate each block whose predecessor's progress is at least ``least``; the first one has the prompt."""
        before = 1.0
        for block in self.unstored:
            block.activated = block.activated or before >= least
            before = self.progress(block.slots)

    def final(self) -> int:
        """End of the leading blocks without a mask: under block-causal attention their keys change no more."""
        for block in self.unstored:
            if self.progress(block.slots) < 1:
                return block.slots.start
        return self.stop

    def forward(self, until: int) -> Forward:
        """All blocks added but for what is stored; the keys before slot ``until`` are stored from now on.

        Where slot i is read at row i - 1, the row of the window's first slot has passed with the keys stored last; so a
        forward that stores is asked for the slot behind them, too, and `recall` gives it back.
        """
        state, window = self.state, range(self.stored, self.stop)
        masked = state.masked_in(window)
        want = [slot for slot in masked if slot - state.model.shift >= window.start]
        if state.model.shift and self.stored < until == window.stop < len(state.tokens):
            want.append(until)
        kind = Kind.DENOISE if masked else Kind.COMMIT
        forward = Forward(window, want, context=range(self.stored), store=range(self.stored, until), kind=kind)
        self.stored = until
        return forward

    def recall(self, window: range, before: Prediction, now: Prediction) -> Prediction:
        """``now`` with what ``before`` said of the window's first slot: its row is final, so that holds."""
        slot = window.start
        if slot in before.token and slot not in now.token and self.state.mask[slot]:
            now.token[slot], now.confidence[slot] = before.token[slot], before.confidence[slot]
            for old, new in ((before.margin, now.margin), (before.entropy, now.entropy)):
                if old is not None and new is not None:
                    new[slot] = old[slot]
        return now


NOTHING = Prediction((), {}, {})  # said before the first forward


def accept(state: DecodeState, block: Block, said: Prediction, threshold: float, score: Score) -> None:
    """Commit a block's slots surer than ``threshold`` (strictly); where none is, an activated one's surest by score."""
    masked = state.masked_in(block.slots)
    sure = [slot for slot in masked if said.confidence[slot] > threshold]
    if not sure and masked and block.activated:
        sure = [max(masked, key=lambda slot: score(state, said, slot))]
    for slot in sure:
        state.commit(slot, said.token[slot], said.confidence[slot])


def edges(state: DecodeState, block_size: int) -> Attend:
    """Block-causal attention: a prompt that blocks are counted from is one block before them."""
    return Attend("blocks", state.prompt_length if state.model.block_origin == "prompt" else 0, block_size)


@dataclass(frozen=True, kw_only=True)
class MultiBlockSampler(Sampler):
    """Settings of methods that begin a block before the one in front of it is done.

    Attributes:
        block_size: slots of a block.
        block_add_threshold: the next block is taken into work once this share of the last one is decided; 1 is one
            block after the other.
        block_activate_threshold: a block must commit a token in every forward once this share of the block before it is
            decided; until then it commits only what is sure.
        early_stop: stop once an end token is final, instead of finishing the blocks in work.
    """

    block_size: int = 32
    block_add_threshold: float = 0.1
    block_activate_threshold: float = 0.95
    early_stop: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.block_size >= 1, "block_size", self.block_size, "a whole number from 1 up")
        add, activate = self.block_add_threshold, self.block_activate_threshold
        refuse_unless(0 <= add <= 1, "block_add_threshold", add, "a share of a block, 0 to 1")
        refuse_unless(0 <= activate <= 1, "block_activate_threshold", activate, "a share of a block, 0 to 1")
        several = "allow or never: of several blocks in work none has a last slot that an end token could wait for"
        refuse_unless(self.eos != "last", "eos", self.eos, several)

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
        """Blocks counted from position 0 are whole, as the model was trained; the others may end with a shorter one."""
        if model.block_origin == "prompt":
            return asked
        return asked + -(prompt_length + asked) % self.block_size
