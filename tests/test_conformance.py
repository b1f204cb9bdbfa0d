"""Every sampler that has a YAML, on every kind of model it accepts: a new one is looked at unasked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.compose import compose, options
from pipeline.config import plain
from pipeline.conformance import (
    MODELS,
    PROPERTIES,
    VOCABULARY,
    Property,
    Situation,
    Trial,
    accepted,
    fault_of,
    situations,
    smallest,
)
from samplers import (
    BlockDiffusionSampler,
    DecodeState,
    Decoding,
    DFlashSampler,
    Forward,
    Prediction,
    SpeculativeSampler,
    ThresholdSampler,
)
from samplers.speculative import Draft

NAMES = options("sampler")
PRESETS = {name: plain(compose([f"sampler={name}"]).sampler) for name in NAMES}
ACCEPTED = {
    name: [model for model in MODELS if all(accepted(Trial(preset, at)) for at in situations(model))]
    for name, preset in PRESETS.items()
}


def faults(trial: Trial) -> list[str]:
    found = ((prop.words, fault_of(prop, trial)) for prop in PROPERTIES)
    return [f"{words}: {trial.words()}: {fault}" for words, fault in found if fault]


@pytest.mark.parametrize(("name", "model"), [(name, model) for name in NAMES for model in ACCEPTED[name]])
def test_every_sampler_conforms_on_every_model_it_accepts(name: str, model: str) -> None:
    for at in situations(model):
        assert faults(Trial(PRESETS[name], at)) == []


def test_every_sampler_is_looked_at_on_some_model() -> None:
    assert all(ACCEPTED.values())


# ---- random ones -----------------------------------------------------------------------------------------------------


@st.composite
def anywhere(draw: st.DrawFn, models: list[str]) -> Situation:
    """A model, prompts, a network and a canvas."""
    model, seed = draw(st.sampled_from(models)), draw(st.integers(0, 10**6))
    words, shortest = random.Random(seed), MODELS[model].shift
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=1, max_size=2))
    prompts = tuple(tuple(words.randrange(VOCABULARY) for _ in range(length)) for length in lengths)
    return Situation(model, prompts, draw(st.integers(1, 5)), draw(st.integers(1, 3)), seed)


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "threshold": st.floats(0, 1),
    "low_threshold": st.floats(0, 1),
    "entropy_threshold": st.floats(0, 3),
    "entropy_budget": st.floats(0, 3),
    "editing_threshold": st.floats(0, 1),
    "block_add_threshold": st.floats(0, 1),
    "block_activate_threshold": st.floats(0, 1),
    "remask_ratio": st.floats(0, 0.9),
    "order": st.sampled_from(["probability", "margin", "entropy", "random", "left_to_right"]),
    "cache": st.sampled_from(["none", "prefix", "dual", "block"]),
    "eos": st.sampled_from(["allow", "last", "never"]),
    "early_stop": st.booleans(),
    "steps": st.integers(1, 15),
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_sampler_conforms_with_settings_at_random(name: str, data: st.DataObject) -> None:
    at, given_here = data.draw(anywhere(ACCEPTED[name])), dict(PRESETS[name])
    for option in data.draw(st.lists(st.sampled_from(list(CHANGES)), unique=True, max_size=3)):
        tried = {**given_here, option: data.draw(CHANGES[option])}
        if accepted(Trial(tried, at)):
            given_here = tried
    trial = Trial(given_here, at)
    if accepted(trial):
        assert faults(trial) == []


# ---- the suite finds what is wrong -----------------------------------------------------------------------------------


class Wrong(ThresholdSampler):
    """A threshold sampler with one fault; a subclass has it."""

    method_name: ClassVar[str] = "wrong"


@dataclass(frozen=True, kw_only=True)
class Endless(Wrong):
    def finished(self, state: DecodeState, block: range, step: int) -> bool:
        return False

    def steps_per_block(self, state: DecodeState) -> int:
        return 10**6

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class LeavesOpen(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        for slot in prediction.positions[:1]:
            state.commit(slot, prediction.token[slot])

    def steps_per_block(self, state: DecodeState) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class WritesMask(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        super().update_state(state, prediction, step)
        state.tokens[state.canvas[0]] = 12


@dataclass(frozen=True, kw_only=True)
class RewritesPrompt(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        super().update_state(state, prediction, step)
        state.tokens[0] = 3 if state.tokens[0] == 4 else 4


@dataclass(frozen=True, kw_only=True)
class WritesUnseen(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        first = state.canvas[0]
        decided = not state.mask[first]
        super().update_state(state, prediction, step)
        if decided:
            state.tokens[first] = (state.tokens[first] + 1) % 11


HEARD: list[int] = []  # shared by all sequences: what no sampler may do


@dataclass(frozen=True, kw_only=True)
class HearsNeighbours(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        if HEARD and HEARD[-1] != state.stream and len(prediction.positions) > 1:
            prediction.confidence[prediction.positions[-1]] = 2.0
        HEARD.append(state.stream)
        super().update_state(state, prediction, step)


@dataclass(frozen=True, kw_only=True)
class DrawsInSecret(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        for slot in sorted(prediction.positions, key=lambda slot: state.uniform(slot, 77))[:1]:
            state.commit(slot, prediction.token[slot])


@dataclass(frozen=True, kw_only=True)
class OutOfOrder(Wrong):
    def decode(self, state: DecodeState) -> Decoding:
        for block in reversed(list(state.blocks(self.block_size))):
            while want := state.masked_in(block):
                prediction = yield Forward(state.row, want, attend=self.attend(state))
                self.update_state(state, prediction, 0)


@dataclass(frozen=True, kw_only=True)
class ReadsUnstored(Wrong):
    def decode(self, state: DecodeState) -> Decoding:
        decoding = super().decode(state)
        forward = next(decoding, None)
        while forward is not None:
            prediction = yield replace(forward, store=range(0))
            try:
                forward = decoding.send(prediction)
            except StopIteration:
                return


@dataclass(frozen=True, kw_only=True)
class IgnoresThreshold(Wrong):
    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        for slot in prediction.positions[:2]:
            state.commit(slot, prediction.token[slot])


ENDS, WORDS, PROMPT, CANVAS, BATCH, COUNTS, SEEDS, ORDER, STORED, CACHE, LIMITS, LOSSLESS = PROPERTIES
FAULTY: list[tuple[type[BlockDiffusionSampler], Property, str]] = [
    (Endless, ENDS, "had not ended"),
    (LeavesOpen, ENDS, "undecided"),
    (WritesMask, WORDS, "holds 12"),
    (RewritesPrompt, PROMPT, "became"),
    (WritesUnseen, CANVAS, "no commit put there"),
    (HearsNeighbours, BATCH, "rows in flight"),
    (DrawsInSecret, SEEDS, "another seed changed"),
    (OutOfOrder, ORDER, "began while"),
    (ReadsUnstored, STORED, "had not been stored"),
    (ReadsUnstored, CACHE, "cache=block decided"),
    (IgnoresThreshold, LIMITS, "two of"),
]


@pytest.mark.parametrize(("cls", "prop", "words"), FAULTY, ids=lambda value: getattr(value, "__name__", None))
def test_the_suite_finds_a_fault_and_tells_it_small(
    cls: type[BlockDiffusionSampler], prop: Property, words: str
) -> None:
    cache = {"cache": "block"} if cls is ReadsUnstored else {}
    given_here = {"_target_": f"{__name__}.{cls.__name__}", "name": "wrong", **cache}
    (at,) = situations("block-causal from position 0")
    trial = Trial(given_here, at)
    assert words in (fault_of(prop, trial) or "")
    small = smallest(prop, trial)
    assert len(small.at.prompts) <= 2 and fault_of(prop, small)
    assert small.at.asked <= 8 or cls is HearsNeighbours  # its fault hangs on what ran before


@dataclass(frozen=True, kw_only=True)
class KeepsADraft(DFlashSampler):
    """Calls itself lossless, and keeps the first draft whatever the model says."""

    method_name: ClassVar[str] = "wrong"

    def decode(self, state: DecodeState) -> Decoding:
        decoding = super().decode(state)
        forward = next(decoding, None)
        while forward is not None:
            said = yield forward
            for slot in list(forward.proposed)[:1]:
                said.token[slot] = forward.variants[0][slot]
            try:
                forward = decoding.send(said)
            except StopIteration:
                return


@dataclass(frozen=True, kw_only=True)
class TakesAnyState(SpeculativeSampler):
    """Calls itself lossless, and commits the deepest draft unseen."""

    method_name: ClassVar[str] = "wrong"

    def settle(self, state: DecodeState, prediction: Prediction, drafts: Sequence[Draft]) -> int:
        for slot, token in drafts[-1].items() if drafts else ():
            state.commit(slot, token)
        return len(drafts)

    @property
    def lossless(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("cls", "options", "model"),
    [
        (KeepsADraft, {}, "causal, with a drafter"),
        (KeepsADraft, {"temperature": 0.5, "sampled_drafts": True}, "causal, with a drafter"),
        (TakesAnyState, {"acceptance": "spatial"}, "full attention"),
    ],
)
def test_drafts_that_change_what_is_decoded_are_found(cls: type, options: dict[str, Any], model: str) -> None:
    (at,) = situations(model)
    trial = Trial({"_target_": f"{__name__}.{cls.__name__}", "name": "wrong", **options}, at)
    assert "without them" in (fault_of(LOSSLESS, trial) or "")
    assert faults(trial) and fault_of(LOSSLESS, smallest(LOSSLESS, trial))


def test_only_samplers_that_call_themselves_lossless_are_held_to_plain_decoding() -> None:
    held = {
        name
        for name in NAMES
        for model in ACCEPTED[name]
        for at in situations(model)
        if LOSSLESS.applies(Trial(PRESETS[name], at))
    }
    assert held == {"dflash", "ddtree", "presto", "failfast", "speculative"}


def test_the_count_of_forwards_is_held_against_those_made(monkeypatch: pytest.MonkeyPatch) -> None:
    (at,) = situations("full attention")
    trial = Trial(PRESETS["threshold"], at)
    trial.plain.outcomes[0].log.pop()
    fault: Callable[[Trial], str | None] = COUNTS.fault
    assert "were counted" in (fault(trial) or "")
