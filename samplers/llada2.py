"""LLaDA2: threshold with a quota, and the token editing of LLaDA2.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.forward import Law, Prediction
from samplers.quota import QuotaSampler
from samplers.state import DecodeState

COMPAT = (None, "llada2", "diffusers")


@dataclass(frozen=True, kw_only=True)
class Llada2Sampler(QuotaSampler):
    """Fill a block by threshold and quota; with an editing threshold also replace what it holds, until nothing changes.

    Without editing this is LLaDA2.0's `generate` (arXiv 2512.15745), with it LLaDA2.1's (arXiv 2602.08676): filled
    slots of the block whose likeliest token is another one, by more than `editing_threshold`, take that one. Editing
    begins while masks are left; a last forward that changes nothing ends the block.

    Attributes:
        editing_threshold: probability that a replacement must exceed (``>``), 0..1; 0.0 replaces always, null never.
        max_post_steps: most forwards on a block without masks.
        minimal_topk: a block has at most the tokens asked for, divided by this, as steps; binds in short canvases only.
        early_stop: stop once an end token is final: without editing inside the block, with editing once it is settled.
        compat: ``llada2``: its generate stops after a block with an end token whatever `early_stop` says, and inside a
            block only at the step that commits one. ``diffusers``: its LLaDA2Pipeline (0.42.1) stops so inside a block
            with editing, too, unless the answer's first token is the end; runs a full block once more than
            `max_post_steps`, once even without editing, and not at all where filling it took all its steps. Both judge
            by the law after top-k and top-p.
    """

    method_name: ClassVar[str] = "llada2"
    trained_for: ClassVar[str | None] = "block-causal diffusion, e.g. LLaDA2.0"

    threshold: float | None = 0.95
    editing_threshold: float | None = None
    max_post_steps: int = 16
    minimal_topk: int = 1
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        editing, posts = self.editing_threshold, self.max_post_steps
        refuse_unless(editing is None or 0 <= editing <= 1, "editing_threshold", editing, "a probability, 0 to 1")
        refuse_unless(posts >= 0, "max_post_steps", posts, "a whole number from 0 up")
        refuse_unless(self.minimal_topk >= 1, "minimal_topk", self.minimal_topk, "a whole number from 1 up")
        choices = f"null or {', '.join(map(str, COMPAT[1:]))}"
        refuse_unless(self.compat in COMPAT, "compat", self.compat, choices)

    def denoise(self, state: DecodeState, block: range) -> Decoding:
        post_steps = 0
        for step in count():
            full = self.finished(state, block, step)
            if full and post_steps == self._most_post_steps:
                return
            post_steps += full
            revised = state.revised
            prediction = yield self.forward(state, block, step)
            self.update_state(state, prediction, step)
            if full and state.revised == revised:
                return
            if self._ends_within(state, block) or self._unedited(state, full, step):
                return

    @property
    def _most_post_steps(self) -> int:
        if self.compat == "diffusers":
            return self.max_post_steps + 1
        return 0 if self.editing_threshold is None else self.max_post_steps

    def _unedited(self, state: DecodeState, full: bool, step: int) -> bool:
        """Whether the block is left as it is because the last of its steps was needed to fill it."""
        return self.compat == "diffusers" and not full and step + 1 == self.steps_per_block(state)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        for i in (*self.chosen(state, prediction, step), *self._edits(state, prediction)):
            state.commit(i, prediction.token[i], prediction.confidence[i])

    def _edits(self, state: DecodeState, prediction: Prediction) -> list[int]:
        """Filled slots that another token fits better."""
        editing = self.editing_threshold
        filled = [i for i in prediction.positions if not state.mask[i] and prediction.token[i] != state.tokens[i]]
        return [i for i in filled if editing is not None and prediction.confidence[i] > editing]

    def wanted(self, state: DecodeState, block: range, step: int) -> Sequence[int]:
        if self.editing_threshold is None:
            return super().wanted(state, block, step)
        return range(max(block.start, state.prompt_length), block.stop)

    def _ends_within(self, state: DecodeState, block: range) -> bool:
        """Whether the rest of the block is left: an end token is there with no mask before it."""
        first, ends = self.end(state, block), state.model.end_ids
        if not self.early_stop or first is None:
            return False
        if self.compat is None:
            return self.editing_threshold is None
        new = any(state.committed_at[i] == state.forwards and state.tokens[i] in ends for i in block)
        return new and (self.compat == "llada2" or first > state.prompt_length)

    def stops(self, state: DecodeState, block: range) -> bool:
        return super().stops(state, block) or (self.compat == "llada2" and self.end(state, block) is not None)

    def steps_per_block(self, state: DecodeState) -> int:
        return max(1, min(super().steps_per_block(state), state.asked // self.minimal_topk))

    def law(self, state: DecodeState) -> Law:
        return replace(super().law(state), judged="filtered" if self.compat else "raw")
