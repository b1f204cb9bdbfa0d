"""DiffusionGemma's own decoding: canvases that start as noise, are denoised whole, and are then read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, Sampler, refuse_unless
from samplers.entropy_bound import within_entropy
from samplers.forward import Forward, Kind, Prediction
from samplers.state import DecodeState, ModelFacts

ASK = frozenset({"entropy"})


@dataclass(frozen=True, kw_only=True)
class DiffusionGemmaSampler(Sampler):
    """Canvas after canvas: noise, then steps that each draw every slot and keep what they are sure of together.

    `DiffusionGemmaGenerationMixin.generate` of transformers 5.24. A step runs the whole canvas at a temperature that
    falls linearly, ``last_temperature + (temperature - last_temperature) * left / steps_per_block`` with ``left`` steps
    to go, itself included. It draws a token for every slot; slots ascend by the entropy of that tempered law, and one
    is accepted while the entropies before it sum to at most `entropy_budget`. All others get fresh noise, those that an
    earlier step accepted too. The canvas is done once it is stable and sure, or its steps are spent; it then becomes
    the likeliest ids of the last step, not what was drawn. The next step is conditioned on the tempered logits of the
    last. A finished canvas runs through the encoder before the next one; the last canvas is as long as any.

    Attributes:
        block_size: slots of a canvas; the model's own if not given.
        steps_per_block: most denoising steps of a canvas.
        temperature: at its first step.
        last_temperature: what the temperature falls towards.
        entropy_budget: nats (``<=``) of a step; larger is bolder, 0 accepts one slot.
        stable_steps: how many steps before one must have had its likeliest ids; 0 asks for none.
        stop_entropy: nats that the entropies of a canvas must average less than.
    """

    method_name: ClassVar[str] = "diffusion_gemma"
    attentions: ClassVar[frozenset[str]] = frozenset({"canvas"})
    trained_for: ClassVar[str | None] = "diffusion from uniform noise: DiffusionGemma"

    block_size: int
    steps_per_block: int = 48
    temperature: float = 0.8
    last_temperature: float = 0.4
    entropy_budget: float = 0.1
    stable_steps: int = 1
    stop_entropy: float = 0.005

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.block_size >= 1, "block_size", self.block_size, "a whole number from 1 up")
        refuse_unless(self.steps_per_block >= 1, "steps_per_block", self.steps_per_block, "a whole number from 1 up")
        refuse_unless(self.temperature > 0, "temperature", self.temperature, "a number above 0: every step draws")
        falls = 0 <= self.last_temperature <= self.temperature
        refuse_unless(falls, "last_temperature", self.last_temperature, f"0 to sampler.temperature={self.temperature}")
        budget = self.entropy_budget
        refuse_unless(0 <= budget < math.inf, "entropy_budget", budget, "a number of nats from 0 up, but finite")
        refuse_unless(self.stable_steps >= 0, "stable_steps", self.stable_steps, "a whole number from 0 up")
        refuse_unless(self.stop_entropy >= 0, "stop_entropy", self.stop_entropy, "a number of nats from 0 up")
        refuse_unless(self.eos != "last", "eos", self.eos, "allow or never: a canvas is decided at once")

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        if model.attention not in cls.attentions:
            raise ValueError(
                f"sampler={cls.method_name} denoises uniform noise and conditions a step on the logits of the last, "
                f"which only DiffusionGemma was trained for (the model attends by {model.attention}): use "
                "model=diffusion_gemma, or sampler=entropy_bound for its rule on masks"
            )

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        return {"block_size": model.trained_block} if model.trained_block else {}

    def canvas_length(self, prompt_length: int, asked: int, model: ModelFacts) -> int:
        """Canvases are always whole."""
        return asked + -asked % self.block_size

    def decode(self, state: DecodeState) -> Decoding:
        if prompt := range(state.prompt_length):
            yield Forward(prompt, store=prompt)
        for block in state.blocks(self.block_size):
            yield from self.denoise(state, block)
            if block.stop == len(state.tokens) or state.ended(block.stop):
                return
            yield Forward(block, context=range(block.start), store=block, kind=Kind.COMMIT)

    def denoise(self, state: DecodeState, block: range) -> Decoding:
        """From noise to the likeliest ids of the last step."""
        said: list[list[int]] = []
        for slot in block:
            self.renoise(state, slot)
        for left in range(self.steps_per_block, 0, -1):
            prediction = yield self.forward(state, block, left)
            said.append([prediction.best[slot][0][0] for slot in block])
            if left == 1 or (self.is_stable(said) and self.is_sure(prediction)):
                return self.read(state, prediction)
            self.accept(state, prediction)

    def forward(self, state: DecodeState, block: range, left: int) -> Forward:
        heat = self.last_temperature + (self.temperature - self.last_temperature) * left / self.steps_per_block
        law = replace(self.law(state), temperature=heat, judged="tempered")
        context = range(block.start)
        return Forward(block, block, context=context, law=law, ask=ASK, best=1, draw=state.steps, carry=True)

    def accept(self, state: DecodeState, prediction: Prediction) -> None:
        """Keep the tokens drawn that go together, and put noise in the place of all others."""
        entropy = prediction.entropy
        assert entropy is not None
        ranked = sorted(prediction.positions, key=entropy.__getitem__)
        count = within_entropy([entropy[slot] for slot in ranked], self.entropy_budget)
        for slot in ranked[:count]:
            state.commit(slot, prediction.token[slot], prediction.confidence[slot])
        for slot in ranked[count:]:
            self.renoise(state, slot)

    def renoise(self, state: DecodeState, slot: int) -> None:
        uniform = state.uniform(slot, -1 - state.steps)  # apart from the token draws
        state.renoise(slot, int(uniform * state.model.vocab_size))

    def is_stable(self, said: list[list[int]]) -> bool:
        """Whether the last of the likeliest canvases so far is that of `stable_steps` steps before, too."""
        return len(said) > self.stable_steps and all(ids == said[-1] for ids in said[-1 - self.stable_steps :])

    def is_sure(self, prediction: Prediction) -> bool:
        assert prediction.entropy is not None
        return sum(prediction.entropy.values()) < self.stop_entropy * len(prediction.entropy)

    def read(self, state: DecodeState, prediction: Prediction) -> None:
        """Decide every slot for its likeliest id."""
        for slot in prediction.positions:
            token, log_probability = prediction.best[slot][0]
            state.commit(slot, token, math.exp(log_probability))
