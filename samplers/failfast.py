"""A masked diffusion model that drafts for an autoregressive one: far ahead where it is sure, a little where not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from samplers.base import Decoding, Sampler, refuse_unless
from samplers.drafts import commit, walk
from samplers.forward import CAUSAL, Attend, Forward, Kind, Law, Prediction, Role
from samplers.rules import surest
from samplers.state import DecodeState, ModelFacts, Token
from samplers.trees import chain


@dataclass
class Heard:
    """What the drafter has said in a round, token and confidence by slot, and how many slots' keys it has stored."""

    said: dict[int, tuple[Token, float]] = field(default_factory=dict)
    stored: int = 0


@dataclass(frozen=True, kw_only=True)
class FailFastSampler(Sampler):
    """Draft chunk after chunk while the drafter is sure of every token, then verify all of them in one forward.

    FailFast (arXiv 2512.20573). The drafter, a masked diffusion model such as Fast-dLLM v2 or Dream, fills a chunk of
    masks behind the known text with a loose threshold, in one forward more often than not. A chunk with an unsure token
    is the round's last, but is verified like the others: the target commits its own tokens as long as they are what was
    drafted, and one more. So its output is that of plain decoding, whatever is drafted; above temperature 0 it has the
    same law, with other random numbers.

    A drafter that attends by blocks keeps the keys of known blocks, which is exact, and is shown whole blocks; one with
    full attention is shown the masks of all that a round may draft, and runs the whole text each time.

    Attributes:
        draft_width: most tokens drafted a round; 0 is `autoregressive`, call for call.
        draft_chunk: tokens drafted before it is asked whether to go on.
        draft_confidence: probability of each token of a chunk (``>=``), 0..1, with which drafting goes on.
        threshold: probability that a token of a chunk must exceed (``>``), 0..1, to be drafted together with others;
            the surest always is.
    """

    method_name: ClassVar[str] = "failfast"
    attentions: ClassVar[frozenset[str]] = frozenset({"causal"})

    draft_width: int = 60
    draft_chunk: int = 10
    draft_confidence: float = 0.45
    threshold: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        tau = self.draft_confidence
        refuse_unless(self.draft_width >= 0, "draft_width", self.draft_width, "a whole number from 0 up")
        refuse_unless(self.draft_chunk >= 1, "draft_chunk", self.draft_chunk, "a whole number from 1 up")
        refuse_unless(0 <= tau <= 1, "draft_confidence", tau, "a probability, 0 to 1")
        refuse_unless(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability, 0 to 1")
        refuse_unless(self.eos != "last", "eos", self.eos, "allow or never: in order, no end token can wait")

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        super().check(model)
        if model.shift != 1:
            raise ValueError(
                f"sampler={cls.method_name} verifies a token where the one before it is run, but this model predicts "
                "it where it stands: use an autoregressive model"
            )

    def refuse_misfit(self, model: ModelFacts) -> None:
        drafter = model.draft
        if self.draft_width == 0:
            return
        if drafter is None or drafter.mask_id is None:
            raise ValueError(
                f"sampler={self.method_name} needs a model that comes with a drafter, a masked diffusion model of the "
                "same vocabulary: name it as model.draft=…, or use sampler.draft_width=0"
            )
        if drafter.attention == "full" and drafter.trained_block is not None:
            raise ValueError(
                f"sampler={self.method_name} lets a masked diffusion model draft, but this model's drafter lives on "
                "the target's features: use sampler=dflash"
            )
        if drafter.attention == "blocks" and drafter.trained_block is None:
            raise ValueError(
                f"sampler={self.method_name} shows a drafter that attends by blocks whole ones, but this one does not "
                "say how long they are: use another drafter"
            )

    @property
    def lossless(self) -> bool:
        return True

    def spare_slots(self, model: ModelFacts) -> int:
        """The last block that a drafter is shown may reach behind the row."""
        drafter = model.draft
        return (drafter.trained_block or 0) if self.draft_width and drafter and drafter.attention == "blocks" else 0

    def decode(self, state: DecodeState) -> Decoding:
        if not state.canvas:
            return
        law, prompt, start = self.law(state), range(state.prompt_length), state.prompt_length
        said = yield Forward(prompt, [start], store=prompt, attend=CAUSAL, law=law, draw=state.forwards)
        ended = commit(state, start, [(said.token[start], said.confidence[start])])
        heard, keep = Heard(), None
        while not ended and start + 1 < len(state.tokens):
            # the target adds a token of its own: the last slot needs no draft
            reach = range(start + 1, min(start + 1 + self.draft_width, len(state.tokens) - 1))
            drafts = yield from self.draft(state, reach, heard)
            said = yield replace(verification(state, start, drafts, law), keep=keep)
            path, emitted = walk(start, chain([[(token, 0.0)] for token in drafts]), said)
            ended = commit(state, start + 1, emitted)
            keep = range(start, start + len(path)) if drafts else None
            start += len(path)

    def draft(self, state: DecodeState, reach: range, heard: Heard) -> Generator[Forward, Prediction, list[Token]]:
        """Tokens to verify in the first slots of ``reach``; nothing behind an end token."""
        heard.said.clear()
        drafts: list[Token] = []
        while chunk := reach[len(drafts) : len(drafts) + self.draft_chunk]:
            yield from self.fill(state, reach, chunk, heard)
            for slot in chunk:
                drafts.append(heard.said[slot][0])
                if drafts[-1] in state.model.end_ids:
                    return drafts
            if min(heard.said[slot][1] for slot in chunk) < self.draft_confidence:
                break
        return drafts

    def fill(self, state: DecodeState, reach: range, chunk: range, heard: Heard) -> Decoding:
        """Decide a chunk: together what is surer than the threshold, the surest in any case."""
        while want := [slot for slot in chunk if slot not in heard.said]:
            said = yield self.drafting(state, reach, want, heard)
            sure = [slot for slot in want if said.confidence[slot] > self.threshold]
            for slot in sure or surest(want, said.confidence.__getitem__, 1):
                heard.said[slot] = said.token[slot], said.confidence[slot]

    def drafting(self, state: DecodeState, reach: range, want: Sequence[int], heard: Heard) -> Forward:
        """The text, what is drafted behind it, and masks; of whole blocks if the drafter attends by them."""
        model = state.model.draft
        assert model is not None and model.mask_id is not None
        forward = Forward(
            range(reach.stop),
            want,
            law=Law(banned=self.law(state).banned),
            draw=state.forwards,
            kind=Kind.DRAFT,
            role=Role.DRAFT,
        )
        if model.attention == "blocks":
            assert model.trained_block is not None
            first = state.prompt_length if model.block_origin == "prompt" else 0
            attend = Attend("blocks", first, model.trained_block)
            before, known = range(max(heard.stored - model.shift, 0)), border(reach.start, attend)
            store, heard.stored = range(heard.stored, known), known
            window = range(before.stop, border(want[-1] + attend.size, attend))
            forward = replace(forward, window=window, context=before, store=store, attend=attend)
        shown = {
            slot: heard.said.get(slot, (model.mask_id,))[0]
            for slot in forward.window[reach.start - forward.window.start :]
        }
        return replace(forward, variants=[shown])


def border(slot: int, blocks: Attend) -> int:
    """Where the block of a slot begins; 0 for what precedes all blocks."""
    return slot - (slot - blocks.first) % blocks.size if slot >= blocks.first else 0


def verification(state: DecodeState, start: int, drafts: Sequence[Token], law: Law) -> Forward:
    """The last known token, in slot ``start``, and the drafts behind it; each row predicts the next slot."""
    window = range(start, start + len(drafts) + 1)
    forward = Forward(
        window,
        range(start + 1, min(window.stop + 1, len(state.tokens))),
        context=range(start),
        store=window,
        attend=CAUSAL,
        law=law,
        draw=state.forwards,
    )
    if not drafts:
        return forward
    return replace(
        forward, variants=[dict(zip(window[1:], drafts, strict=True))], proposed=window[1:], kind=Kind.VERIFY
    )
