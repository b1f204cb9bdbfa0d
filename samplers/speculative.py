"""Self-speculation: a masked model's own next states, drafted and verified in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from samplers.base import BlockDiffusionSampler, Decoding, refuse_unless
from samplers.forward import Forward, Kind, Prediction
from samplers.rules import ORDERS, sure_or_surest, surest
from samplers.state import DecodeState, Token

Draft = Mapping[int, Token]  # a future state, as what it has decided more than the present one
ACCEPTANCES = ("chain", "spatial")


@dataclass(frozen=True, kw_only=True)
class SpeculativeSampler(BlockDiffusionSampler):
    """Take several steps with one forward: of the present state and of those that will probably follow it.

    SSD (arXiv 2510.04147) and FreeDave (2510.00294). The last prediction ranks a block's open slots: states with the
    first of them decided, the first two, … are drafts, and run as copies of the window beside the present state. Each
    copy that runs says what its step would decide; while the outcome of a step is, in slots and tokens, a state whose
    copy ran along, that copy says the next one. So with ``acceptance: chain`` tokens and their order are those of the
    same rule run step by step under the same cache (`threshold`, or `confidence` without a threshold), whatever the
    drafts are, and forwards are never more. At a temperature above 0 too: a copy draws with the number of the step
    that it stands for.

    A forward decides between one step's tokens and `draft_width` steps'; its work grows with its copies. A block's
    first step runs alone, as the cache has it: nothing is known of the block, and no draft reaches across its border.

    Attributes:
        threshold: probability to commit (``>=``), 0..1, and always the surest; null commits the quota of `steps`, by
            default one token.
        draft_width: most states of a forward, the present one included (FreeDave's ``draft_steps``; SSD's drafts and
            one); 1 is step by step, call for call.
        adaptive: a forward runs one draft more than the last one found right; a block begins with all of them.
        acceptance: ``chain``, or ``spatial``, which is *not lossless*: PSD (arXiv 2605.15609) takes the deepest draft
            whose tokens are all what the present state's copy says of their slots, in whatever order, then its step.
            Which copy must agree is our reading: only its abstract is known to us.
    """

    method_name: ClassVar[str] = "speculative"

    threshold: float | None = None
    draft_width: int = 4
    adaptive: bool = False
    acceptance: str = "chain"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(
            self.threshold is None or 0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1"
        )
        refuse_unless(
            self.draft_width >= 1, "draft_width", self.draft_width, "a whole number from 1 up (1 drafts nothing)"
        )
        refuse_unless(self.acceptance in ACCEPTANCES, "acceptance", self.acceptance, f"one of {', '.join(ACCEPTANCES)}")
        refuse_unless(self.cfg_scale == 0, "cfg_scale", self.cfg_scale, "0: a guided forward runs no drafts")
        self.refuse_idle()

    @classmethod
    def idle(cls, given: Mapping[str, object]) -> Mapping[str, str]:
        alone = given.get("draft_width", cls.draft_width) == 1
        return {"adaptive": "a draft_width of 2 or more"} if alone and given.get("adaptive") else {}

    @property
    def lossless(self) -> bool:
        return self.acceptance == "chain"

    def denoise(self, state: DecodeState, block: range) -> Decoding:
        step, drafts = 0, list[Draft]()
        while not self.finished(state, block, step):
            prediction = yield verifying(self.forward(state, block, step), drafts)
            copies = prediction.copies or [prediction]
            right, steps = self.follow(state, copies, drafts, step)
            step += steps
            most = right + 1 if drafts and self.adaptive else self.draft_width
            drafts = list(islice(self.drafts(state, block, copies[right], step), min(most, self.draft_width - 1)))

    def follow(
        self, state: DecodeState, copies: Sequence[Prediction], drafts: Sequence[Draft], step: int
    ) -> tuple[int, int]:
        """Commit what the copies verify; returns which copy is the last that was right, and the steps taken."""
        right, steps = 0, 1
        if self.acceptance == "spatial":
            right = self.settle(state, copies[0], drafts)
        self.update_state(state, copies[right], step)
        while self.acceptance == "chain" and (at := self.reached(state, copies[0].positions, drafts)):
            if self.temperature > 0 and at != steps:  # it has drawn with the number of another step
                break
            state.steps += 1  # the engine counts one a forward
            self.update_state(state, copies[at], step + steps)
            right, steps = at, steps + 1
        return right, steps

    def reached(self, state: DecodeState, slots: Sequence[int], drafts: Sequence[Draft]) -> int | None:
        """Which draft, from 1 up, the present state is, as far as ``slots`` go; None once all of them are decided."""
        decided = {slot: state.tokens[slot] for slot in slots if not state.mask[slot]}
        return next((k for k, draft in enumerate(drafts, 1) if draft == decided and len(draft) < len(slots)), None)

    def settle(self, state: DecodeState, prediction: Prediction, drafts: Sequence[Draft]) -> int:
        """Commit the deepest draft that agrees with what is said of its slots now; returns how deep it is."""
        agreeing = [
            depth
            for depth, draft in enumerate(drafts, 1)
            if all(prediction.token[slot] == token for slot, token in draft.items())
        ]
        deepest = max(agreeing, default=0)
        for slot, token in drafts[deepest - 1].items() if deepest else ():
            state.commit(slot, token, prediction.confidence[slot])
        return deepest

    def drafts(self, state: DecodeState, block: range, prediction: Prediction, step: int) -> Iterator[Draft]:
        """States that may follow, while a mask is left in them: the surest slots decided as a prediction has them.

        Each has as many more as its step must commit at least.
        """
        masked, score = state.masked_in(block), ORDERS[self.order]
        ranked = surest(masked, lambda i: score(state, prediction, i), len(masked))
        count = self.quota(state, len(masked), step) if masked else 0
        while count < len(masked):
            yield {slot: prediction.token[slot] for slot in ranked[:count]}
            step += 1
            count += self.quota(state, len(masked) - count, step)

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        masked = [i for i in prediction.positions if state.mask[i]]
        sure = [] if self.threshold is None else [i for i in masked if prediction.confidence[i] >= self.threshold]
        score, least = ORDERS[self.order], self.quota(state, len(masked), step)
        for i in sure_or_surest(sure, masked, lambda i: score(state, prediction, i), least):
            state.commit(i, prediction.token[i], prediction.confidence[i])


def verifying(forward: Forward, drafts: Sequence[Draft]) -> Forward:
    """The forward with drafts as further copies of its window; nothing of them is stored."""
    if not drafts:
        return forward
    return replace(forward, variants=[{}, *drafts], proposed=list(drafts[-1]), store=range(0), kind=Kind.VERIFY)
