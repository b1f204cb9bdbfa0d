"""The base of all samplers: a frozen record of settings whose `decode` is a generator over one sequence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from samplers.cache import CACHES, CachePolicy
from samplers.forward import Attend, Forward, Guidance, Law, Prediction
from samplers.rules import ORDERS, due
from samplers.state import DecodeState, ModelFacts

Decoding = Generator[Forward, Prediction, None]
COOLEST, HOTTEST = 1e-6, 1e6  # beyond them float32 can't tell the law from an argmax or a uniform one
EOS_CHOICES = ("allow", "last", "never")


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Settings every method shares; the fields of a subclass are the options it uses.

    Attributes:
        temperature, top_k, top_p: see `Law`.
        eos: end tokens may be drawn (``allow``), drawn but committed last (``last``) or never drawn (``never``).
    """

    method_name: ClassVar[str]
    attentions: ClassVar[frozenset[str]]  # patterns it can work with; any one will do
    trained_for: ClassVar[str | None] = None

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    eos: str = "allow"

    def __post_init__(self) -> None:
        tempered = COOLEST <= self.temperature <= HOTTEST
        refuse_unless(tempered or self.temperature == 0, "temperature", self.temperature, "0, or from 1e-6 to 1e6")
        refuse_unless(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        refuse_unless(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "a whole number from 1 up")
        refuse_unless(self.eos in EOS_CHOICES, "eos", self.eos, f"one of {', '.join(EOS_CHOICES)}")

    @classmethod
    def options(cls) -> frozenset[str]:
        """Names of the options this method uses."""
        return frozenset(field.name for field in fields(cls))

    def refuse_idle(self) -> None:
        """Refuse an option that the others leave without an effect; a class that writes `idle` calls it at the end.

        Raises:
            ValueError: naming the option and what it is for.
        """
        for option, wanted in self.idle(vars(self)).items():
            raise ValueError(
                f"sampler.{option}={vars(self)[option]} is for {wanted}, and has no effect here: leave it out"
            )

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        """Refuse a model this method cannot decode.

        Raises:
            ValueError: naming both sides.
        """
        if not cls.attentions & model.attentions:
            causal = ": use an autoregressive model, such as model=tiny_ar, or with a drafter model=tiny_ar_dflash"
            raise ValueError(
                f"sampler={cls.method_name} needs {' or '.join(sorted(cls.attentions))} attention, "
                f"which the model does not serve (it serves {', '.join(sorted(model.attentions))})"
                f"{causal if cls.attentions == {'causal'} else ''}"
            )

    @classmethod
    def idle(cls, given: Mapping[str, object]) -> Mapping[str, str]:
        """Of the options given, those that the others leave without a meaning, each with what it is for.

        One run refuses them, a sweep leaves them out.
        """
        return {}

    def refuse_misfit(self, model: ModelFacts) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse a model that the method can decode, but not with these settings.

        Raises:
            ValueError: naming the setting and what would be right.
        """

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        """Options whose default depends on the model, with what they are on this one."""
        return {}

    def canvas_length(self, prompt_length: int, asked: int, model: ModelFacts) -> int:
        """Slots of the canvas where ``asked`` tokens are wanted behind a prompt: as many, but for whole blocks."""
        return asked

    def spare_slots(self, model: ModelFacts) -> int:
        """Slots behind the row that a window may reach: a tree of drafts takes more than the canvas has."""
        return 0

    @property
    def lossless(self) -> bool:
        """Whether what is decoded at temperature 0 is what the model decodes without drafts; `pipeline.check` looks.

        On a causal model that is `autoregressive`, elsewhere this sampler with a ``draft_width`` of 1.
        """
        return False

    @property
    def reads_ngrams(self) -> bool:
        """Whether `DecodeState.ngram` must be there, counts of ``ngram_order`` tokens in a row (an option then)."""
        return False

    @abstractmethod
    def decode(self, state: DecodeState) -> Decoding:
        """Decode one sequence in place: yield what the model shall run, receive what it said."""

    def law(self, state: DecodeState) -> Law:
        """How tokens are drawn."""
        ends = tuple(sorted(state.model.end_ids))
        return Law(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            banned=ends if self.eos == "never" else (),
            unsure=ends if self.eos == "last" else (),
        )


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionSampler(Sampler):
    """Blocks left to right, steps inside a block; a subclass normally writes `update_state` only.

    Attributes:
        block_size: slots of a block.
        steps: total denoising steps over the canvas, shared evenly by the blocks.
        order: which undecided slot goes first, see `samplers.rules.ORDERS`.
        cache: name of a cache policy.
        early_stop: stop after a block once an end token is final. Off in the published LLaDA and Fast-dLLM.
        cfg_scale: classifier-free guidance against a copy whose prompt is masked, see `Guidance`; 0 is none.
    """

    attentions: ClassVar[frozenset[str]] = frozenset({"full", "blocks"})

    block_size: int
    steps: int
    order: str = "probability"
    cache: str = "none"
    early_stop: bool = False
    cfg_scale: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.block_size >= 1, "block_size", self.block_size, "a whole number from 1 up")
        refuse_unless(self.steps >= 1, "steps", self.steps, "a whole number from 1 up")
        refuse_unless(self.order in ORDERS, "order", self.order, f"one of {', '.join(ORDERS)}")
        refuse_unless(0 <= self.cfg_scale < math.inf, "cfg_scale", self.cfg_scale, "0, or a finite number above it")
        if self.cfg_scale and self.cache != "none":
            raise ValueError(
                f"sampler.cfg_scale={self.cfg_scale} does not go with sampler.cache={self.cache}: use none"
            )
        refuse_unless(self.cache in CACHES, "cache", self.cache, f"one of {', '.join(CACHES)}")

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        super().check(model)
        if model.mask_id is None:
            raise ValueError(
                f"sampler={cls.method_name} fills mask tokens, which an autoregressive model does not have: "
                "use sampler=autoregressive, or a diffusion model"
            )

    def refuse_misfit(self, model: ModelFacts) -> None:
        policy = CACHES[self.cache]
        if model.attention not in policy.attentions:
            usable = [name for name, other in CACHES.items() if model.attention in other.attentions]
            raise ValueError(
                f"sampler.cache={self.cache} is for {' or '.join(sorted(policy.attentions))} attention, the model "
                f"attends by {model.attention}: use {' or '.join(usable)}"
            )

    def canvas_length(self, prompt_length: int, asked: int, model: ModelFacts) -> int:
        """Blocks counted from position 0 are always whole: the model was trained to see all masks of the last one."""
        if model.block_origin == "prompt":
            return asked
        return asked + -(prompt_length + asked) % self.block_size

    def decode(self, state: DecodeState) -> Decoding:
        policy: CachePolicy = CACHES[self.cache]
        attend = self.attend(state)
        blocks = list(state.blocks(self.block_size))
        for forward in policy.prefill(state, blocks[0]) if blocks else ():
            yield replace(forward, attend=attend)
        for block in blocks:
            yield from self.denoise(state, block)
            if self.early_stop and state.ended(block.stop):
                return
            for forward in policy.commit(state, block):
                yield replace(forward, attend=attend)

    def denoise(self, state: DecodeState, block: range) -> Decoding:
        """Decide a block, step by step."""
        for step in range(self.steps_per_block(state)):
            if self.finished(state, block, step):
                return
            prediction = yield self.forward(state, block, step)
            self.update_state(state, prediction, step)

    def forward(self, state: DecodeState, block: range, step: int) -> Forward:
        """The forward of one step inside a block."""
        return replace(
            CACHES[self.cache].forward(state, block, step, self.wanted(state, block, step)),
            attend=self.attend(state),
            guidance=Guidance(self.cfg_scale, range(state.prompt_length)) if self.cfg_scale else None,
            law=self.law(state),
            ask=self.statistics(),
            draw=state.steps,
        )

    @abstractmethod
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        """Commit (or take back) slots in the light of a prediction; ``step`` counts from 0 inside the block."""

    def wanted(self, state: DecodeState, block: range, step: int) -> Sequence[int]:
        """Slots whose prediction a step reads: the block's undecided ones."""
        return state.masked_in(block)

    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        """Whether a block does without step ``step`` and all later ones: no mask is left."""
        return not any(state.mask[block.start : block.stop])

    def statistics(self) -> frozenset[str]:
        """What `order` needs to hear besides token and confidence."""
        return frozenset({self.order}) & {"margin", "entropy"}

    def attend(self, state: DecodeState) -> Attend | None:
        """The model's own pattern; a block-causal model is told where this sampler's blocks lie."""
        if state.model.attention != "blocks":
            return None
        first = state.prompt_length if state.model.block_origin == "prompt" else 0
        return Attend("blocks", first, self.block_size)

    def steps_per_block(self, state: DecodeState) -> int:
        """The block's share of `steps`, rounded down.

        Raises:
            ValueError: if that leaves a block without a step.
        """
        share = self.steps * min(self.block_size, state.asked) // state.asked
        refuse_unless(share >= 1, "steps", self.steps, f"at least one for each block of {self.block_size} slots")
        return share

    def quota(self, state: DecodeState, undecided: int, step: int) -> int:
        """Tokens this step must commit for the block to be done within its steps."""
        return due(undecided, self.steps_per_block(state) - step)


def refuse_unless(right: bool, option: str, value: object, would_be_right: str) -> None:
    if not right:
        raise ValueError(f"sampler.{option}={value} is out of range: use {would_be_right}")
