"""Self-speculation: tokens, order and confidences are those of the same rule run step by step, with fewer forwards."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, ClassVar

import pytest
import torch

from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.toy import TableAdapter
from pipeline.data.arithmetic import make_problems
from pipeline.engine import Engine, Task
from samplers import (
    BlockDiffusionSampler,
    ConfidenceSampler,
    DecodeState,
    Forward,
    Kind,
    ModelFacts,
    Prediction,
    SpeculativeSampler,
    ThresholdSampler,
    uniform,
)
from samplers.speculative import Draft

TOYS = 1000
FULL = frozenset({"full", "blocks"})

# ---- the worked example: four slots, ids a b c d x ------------------------------------------------------------------

A, B, C, D, X, M = range(6)
FIVE = ModelFacts(6, M, frozenset(), attentions=FULL)
EXAMPLE: dict[tuple[int, ...], dict[int, tuple[int, float]]] = {
    (M, M, M, M): {0: (A, 0.90), 1: (B, 0.80), 2: (C, 0.70), 3: (D, 0.60)},
    (A, M, M, M): {1: (B, 0.85), 2: (C, 0.75), 3: (D, 0.50)},
    (A, B, M, M): {2: (X, 0.65), 3: (D, 0.95)},
    (A, B, C, M): {3: (D, 0.90)},
    (A, B, M, D): {2: (X, 0.99)},
}


def said_in_the_example(tokens: Mapping[int, int], slot: int) -> Sequence[float]:
    shown = tuple(tokens[i] for i in range(4))
    token, probability = EXAMPLE[shown].get(slot, (tokens[slot], 0.99))  # what is filled is echoed
    return [math.log(probability if i == token else (1 - probability) / 5) for i in range(6)]


def example(sampler: BlockDiffusionSampler) -> tuple[str, list[list[int]], Any]:
    """The answer, the slots that each forward decided in their order, and the outcome."""
    adapter = TableAdapter(FIVE, said_in_the_example)
    (outcome,) = Engine(adapter, sampler).decode([Task(0, [], 4, traced=True)], 4)
    assert outcome.state is not None and outcome.failure is None, outcome.error
    decided = [[slot for slot, _, _ in record["changed"]] for record in outcome.trace]
    return "".join("abcdx_"[token] for token in outcome.state.tokens), decided, outcome


def test_the_worked_example_takes_three_forwards_in_place_of_four() -> None:
    """1. MMMM: a. 2. aMMM with abMM and abcM: b as drafted, then d; abcM is wrong. 3. abMd alone: x."""
    answer, decided, outcome = example(SpeculativeSampler(block_size=4, steps=4, draft_width=4))
    assert (answer, decided) == ("abxd", [[0], [1, 3], [2]])
    assert outcome.counts()["nfe_verify"] == 1 and outcome.counts()["token_forwards"] == 4 + 3 * 4 + 4
    step_by_step, in_order, _ = example(ConfidenceSampler(block_size=4, steps=4))
    assert (step_by_step, in_order) == ("abxd", [[0], [1], [3], [2]])


def test_the_worked_example_in_the_naming_with_the_known_successor() -> None:
    """There a round commits the successor it began with and the drafts it found right; the last mask is free: 2, 2."""
    _, decided, _ = example(SpeculativeSampler(block_size=4, steps=4, draft_width=4))
    known = [1, 1]  # of the forwards before each round: each one's last step
    assert [known[0] + len(decided[1]) - 1, known[1] + len(decided[2])] == [2, 2]


def test_without_verification_the_worked_example_goes_wrong() -> None:
    assert example(AcceptsAll(block_size=4, steps=4, draft_width=4))[0] == "abcd"
    assert example(OneState(block_size=4, steps=4, draft_width=4))[0] == "abcd"
    assert example(ThresholdSampler(block_size=4, steps=4, threshold=0.69))[0] == "abcd"


def test_the_spatial_rule_is_not_lossless() -> None:
    """aMMM says b and c, as the deepest draft abcM has it; that copy says d."""
    sampler = SpeculativeSampler(block_size=4, steps=4, draft_width=4, acceptance="spatial")
    assert example(sampler)[:2] == ("abcd", [[0], [1, 2, 3]])


# ---- wrong rules -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AcceptsAll(SpeculativeSampler):
    """Negative control: drafts are not verified."""

    method_name: ClassVar[str] = "accepts_all"

    def follow(
        self, state: DecodeState, copies: Sequence[Prediction], drafts: Sequence[Draft], step: int
    ) -> tuple[int, int]:
        for slot, token in drafts[-1].items() if drafts else ():
            state.commit(slot, token)
        self.update_state(state, copies[-1], step)
        return len(drafts), 1


@dataclass(frozen=True, kw_only=True)
class OneState(SpeculativeSampler):
    """Negative control: all drafts in one state, the leading ones kept that it says again at their own slots."""

    method_name: ClassVar[str] = "one_state"

    def follow(
        self, state: DecodeState, copies: Sequence[Prediction], drafts: Sequence[Draft], step: int
    ) -> tuple[int, int]:
        for slot, token in drafts[-1].items() if drafts else ():
            if copies[-1].token[slot] != token:
                break
            state.commit(slot, token)
        self.update_state(state, copies[-1], step)
        return len(drafts), 1


@dataclass(frozen=True, kw_only=True)
class Backwards(SpeculativeSampler):
    """The drafts of a forward in another order."""

    method_name: ClassVar[str] = "backwards"

    def drafts(self, state: DecodeState, block: range, prediction: Prediction, step: int) -> Iterator[Draft]:
        known = list(islice(super().drafts(state, block, prediction, step), self.draft_width - 1))
        yield from reversed(known)


@dataclass(frozen=True, kw_only=True)
class Garbage(SpeculativeSampler):
    """Drafts that nobody thought about: any slots of the block, any ids, the mask's and whole blocks too."""

    method_name: ClassVar[str] = "garbage"

    def drafts(self, state: DecodeState, block: range, prediction: Prediction, step: int) -> Iterator[Draft]:
        draw = random.Random(step * 31 + state.steps)
        slots = [slot for slot in block if slot >= state.prompt_length]
        for _ in range(self.draft_width):
            chosen = sorted(draw.sample(slots, draw.randint(1, len(slots))))
            yield {slot: draw.randrange(state.model.vocab_size) for slot in chosen}


# ---- random models in plain Python -----------------------------------------------------------------------------------


@dataclass
class Toy:
    """A random model of up to ten slots: logits of a slot depend on all that it sees, on the slot most.

    Keys are what a slot held when it was stored, so a frozen cache goes stale as a real one's does.
    """

    seed: int
    facts: ModelFacts
    forwards: list[Forward] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)

    def decode(self, sampler: BlockDiffusionSampler, prompt: Sequence[int], asked: int) -> DecodeState:
        """Drive a sampler as the engine does."""
        self.forwards, self.stored = [], {}
        length = sampler.canvas_length(len(prompt), asked, self.facts)
        state = DecodeState.masked(list(prompt), asked, self.facts, self.seed, length)
        decoding = sampler.decode(state)
        forward = next(decoding, None)
        while forward is not None:
            self.forwards.append(forward)
            prediction = self.run(state, forward)
            state.forwards += 1
            state.steps += bool(forward.want)
            try:
                forward = decoding.send(prediction)
            except StopIteration:
                break
        return state

    def run(self, state: DecodeState, forward: Forward) -> Prediction:
        own = {slot: state.tokens[slot] for slot in forward.window}
        copies = [
            self.said(state, forward, {**own, **content}, forward.draw + k)
            for k, content in enumerate(forward.variants or ({},))
        ]
        assert not (forward.store and len(copies) > 1)
        self.stored |= {slot: own[slot] for slot in forward.store}
        return replace(copies[0], copies=copies if len(copies) > 1 else ())

    def said(self, state: DecodeState, forward: Forward, shown: Mapping[int, int], draw: int) -> Prediction:
        seen = {**{slot: self.stored[slot] for slot in forward.context}, **shown}
        prediction = Prediction(list(forward.want), {}, {}, {}, {})
        attend = forward.attend
        for slot in forward.want:
            visible = seen
            if attend is not None:
                end = attend.first + ((slot - attend.first) // attend.size + 1) * attend.size
                visible = {other: token for other, token in seen.items() if other < end}
            self.say(state, prediction, forward, slot, self.logits(visible, slot), draw)
        return prediction

    def say(
        self, state: DecodeState, prediction: Prediction, forward: Forward, slot: int, logits: list[float], draw: int
    ) -> None:
        probability = softmax(logits)
        token = max(range(len(logits)), key=logits.__getitem__)
        if heat := forward.law.temperature:
            reached = accumulate(softmax([logit / heat for logit in logits]))
            token = min(bisect_left(list(reached), uniform(state.stream, slot, draw)), len(logits) - 1)
        prediction.token[slot], prediction.confidence[slot] = token, probability[token]
        assert prediction.margin is not None and prediction.entropy is not None
        best, second = sorted(probability, reverse=True)[:2]
        prediction.margin[slot] = best - second
        prediction.entropy[slot] = -sum(p * math.log(p) for p in probability)

    def logits(self, visible: Mapping[int, int], slot: int) -> list[float]:
        """The mask id is the last one, and never said."""
        key = self.seed
        for other, token in visible.items():
            key += scramble(other * 64 + token)
        own, around = scramble(self.seed * 97 + slot), scramble(key * 16 + slot)
        words = range(self.facts.vocab_size - 1)
        return [6 * part(own, word) + 1.5 * part(around, word) for word in words]


def scramble(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return (x ^ x >> 29) * 0x94D049BB133111EB & (1 << 64) - 1


def part(x: int, word: int) -> float:
    """Eight of the 64 bits, cubed so that one word stands out more often than not."""
    return ((x >> 8 * word & 0xFF) / 256) ** 3


def softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@dataclass
class Case:
    """A toy, what it is asked, and the sampler step by step and speculating."""

    toy: Toy
    prompt: list[int]
    asked: int
    reference: BlockDiffusionSampler
    speculative: SpeculativeSampler

    def by(self, sampler: BlockDiffusionSampler) -> tuple[DecodeState, list[Forward]]:
        return self.toy.decode(sampler, self.prompt, self.asked), self.toy.forwards

    def names(self) -> list[str]:
        """Of the kinds of run that this one is, but for those that draft nothing."""
        own = self.speculative
        kinds = [self.reference.method_name, f"cache={own.cache}", f"temperature={own.temperature}"]
        return kinds if own.draft_width > 1 and own.block_size > 2 and own.order != "random" else []


def case(seed: int, cls: type[SpeculativeSampler] = SpeculativeSampler, **changes: Any) -> Case:
    draw = random.Random(seed)
    attention, cache = draw.choice(
        [("full", "none"), ("full", "prefix"), ("full", "dual"), ("blocks", "none"), ("blocks", "block")]
    )
    shift, vocabulary = draw.randint(0, 1), draw.randint(3, 8)
    origin = draw.choice(["prompt", "zero"])
    mask = vocabulary  # the words and the mask
    facts = ModelFacts(vocabulary + 1, mask, frozenset({0}), shift, attention, FULL, origin)
    block, blocks = draw.choice([(1, 3), (2, 5), (3, 3), (4, 2), (5, 2), (8, 1), (9, 1), (10, 1)])
    prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(shift, 3))]
    asked = block * blocks
    options: dict[str, Any] = {"block_size": block, "cache": cache, "early_stop": draw.random() < 0.3}
    options["order"] = draw.choice(["probability"] * 4 + ["margin", "entropy", "random", "left_to_right"])
    options["temperature"] = draw.choice([0.0, 0.0, 0.7])
    options["steps"] = blocks * draw.choice([block, block, max(1, block // 2)])
    options |= {name: value for name, value in changes.items() if name in SpeculativeSampler.options()}
    threshold = changes.get("threshold", draw.choice([None, 0.35, 0.6, 0.9]))
    own = {"draft_width": draw.randint(1, 6), "adaptive": draw.random() < 0.5, **changes, "threshold": threshold}
    own["adaptive"] = own["adaptive"] and own["draft_width"] > 1
    shared = {name: value for name, value in options.items() if name in BlockDiffusionSampler.options()}
    rule = ConfidenceSampler(**shared) if threshold is None else ThresholdSampler(**shared, threshold=threshold)
    return Case(Toy(seed, facts), prompt, asked, rule, cls(**{**shared, **own}))


def same(one: DecodeState, other: DecodeState) -> bool:
    """Tokens, the order of commits, the confidence of each, and the number of steps."""
    return (one.tokens, one.changes, one.confidences, one.steps) == (
        other.tokens,
        other.changes,
        other.confidences,
        other.steps,
    )


def test_a_thousand_random_models_decode_the_same_tokens_in_the_same_order_with_no_more_forwards() -> None:
    made, saved = Counter[str](), Counter[str]()
    for seed in range(TOYS):
        at = case(seed)
        (expected, step_by_step), (state, forwards) = at.by(at.reference), at.by(at.speculative)
        assert same(state, expected), at
        assert len(forwards) <= len(step_by_step), at
        for name in at.names():
            made[name] += len(step_by_step)
            saved[name] += len(step_by_step) - len(forwards)
    few = {name: (saved[name], made[name]) for name in made if saved[name] < 0.02 * made[name]}
    assert not few, f"too few drafts were right for the comparison to say much: {few}"


def test_sampled_runs_draw_with_the_numbers_of_the_steps() -> None:
    """A draft that one step reaches and that was to be two steps' has drawn with a wrong number: it is not taken."""
    for seed in range(600):
        at = case(seed, temperature=0.3, threshold=0.6, draft_width=6)
        assert same(at.by(at.reference)[0], at.by(at.speculative)[0]), at


@pytest.mark.parametrize("cls", [AcceptsAll, OneState])
def test_rules_that_do_not_verify_every_state_differ_on_random_models(cls: type[SpeculativeSampler]) -> None:
    cases = [case(seed, cls, draft_width=4, temperature=0.0, threshold=None) for seed in range(200)]
    differing = sum(at.by(at.reference)[0].tokens != at.by(at.speculative)[0].tokens for at in cases)
    assert differing > 50


def test_a_width_of_one_is_step_by_step_call_for_call() -> None:
    for seed in range(100):
        at = case(seed, draft_width=1)
        forwards, step_by_step = at.by(at.speculative)[1], at.by(at.reference)[1]
        assert forwards == [forward for forward in step_by_step if forward.want or forward.store], at


def test_the_order_of_the_copies_changes_nothing() -> None:
    for seed in range(100):
        at, other = case(seed, temperature=0.0, adaptive=False), case(seed, Backwards, temperature=0.0, adaptive=False)
        (expected, forwards), (state, turned) = at.by(at.speculative), other.by(other.speculative)
        assert same(state, expected) and len(forwards) == len(turned), at


def test_drafts_of_any_kind_change_nothing_but_the_number_of_forwards() -> None:
    for seed in range(200):
        at = case(seed, Garbage)
        (expected, step_by_step), (state, forwards) = at.by(at.reference), at.by(at.speculative)
        assert same(state, expected) and len(forwards) <= len(step_by_step), at


def test_drafts_reach_across_no_border_and_are_never_stored() -> None:
    verified = 0
    for seed in range(200):
        at = case(seed)
        state, forwards = at.by(at.speculative)
        for forward in forwards:
            assert len(forward.variants) <= at.speculative.draft_width
            assert (forward.kind is Kind.VERIFY) == (len(forward.variants) > 1)
            touched = {slot for content in forward.variants for slot in content}
            home = [b for b in state.blocks(at.speculative.block_size) if touched <= set(b)]
            assert home and (not forward.variants or not forward.store)
            verified += len(forward.variants) > 1
    assert verified > 100


def test_an_adaptive_width_runs_fewer_copies_than_a_fixed_one() -> None:
    runs = {
        adaptive: [case(seed, draft_width=6, adaptive=adaptive) for seed in range(200)] for adaptive in (False, True)
    }
    copies = {
        adaptive: sum(f.copies for at in cases for f in at.by(at.speculative)[1]) for adaptive, cases in runs.items()
    }
    assert copies[True] < copies[False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_width": 0}, "sampler.draft_width=0 .* from 1 up"),
        ({"threshold": 1.1}, "sampler.threshold=1.1"),
        ({"acceptance": "tree"}, "sampler.acceptance=tree .* chain, spatial"),
        ({"cfg_scale": 1.0}, "sampler.cfg_scale=1.0 .* use 0"),
    ],
)
def test_settings_that_are_none_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SpeculativeSampler(**{"block_size": 4, "steps": 4, **options})


# ---- shipped models --------------------------------------------------------------------------------------------------

SHIPPED: list[tuple[str, dict[str, Any], float]] = [
    ("tiny/llada", {"block_size": 32}, 1.5),
    ("tiny/llada", {"block_size": 8, "cache": "prefix"}, 1.5),
    ("tiny/llada", {"block_size": 8, "cache": "dual"}, 1.5),
    ("tiny/dream", {"block_size": 8, "cache": "dual"}, 1.5),
    ("tiny/sdar", {"block_size": 8, "cache": "block"}, 1.5),
    ("tiny/llada", {"block_size": 32, "temperature": 2.0}, 1.2),
    ("tiny/llada", {"block_size": 32, "threshold": 0.9}, 1.0),
]


@pytest.mark.parametrize(("path", "options", "least"), SHIPPED, ids=str)
def test_on_the_shipped_models_the_same_is_decoded_with_fewer_forwards(
    path: str, options: dict[str, Any], least: float
) -> None:
    """As many rows in flight as prompts: copies of all of them share a call."""
    adapter = load(describe(ModelOptions("tiny", path=path, dtype="float32")), torch.device("cpu"))
    texts = [problem.question for problem in make_problems("test", 4, 2)]
    prompts = [adapter.codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
    rule = ThresholdSampler if "threshold" in options else ConfidenceSampler

    def decode(sampler: BlockDiffusionSampler) -> list[Any]:
        tasks = [Task(i, prompt, 32, i, traced=True) for i, prompt in enumerate(prompts)]
        outcomes = sorted(Engine(adapter, sampler, len(tasks)).decode(tasks, 160), key=lambda o: o.task.index)
        assert not any(outcome.error for outcome in outcomes)
        return outcomes

    expected, drafted = decode(rule(**options, steps=32)), decode(SpeculativeSampler(**options, steps=32))
    for one, other in zip(expected, drafted, strict=True):
        assert in_order(one) == in_order(other)
    made, saved = (sum(outcome.counts()["nfe"] for outcome in outcomes) for outcomes in (expected, drafted))
    assert made >= least * saved, (made, saved)


def in_order(outcome: Any) -> list[list[int]]:
    return [[slot, token] for record in outcome.trace for slot, token, _ in record["changed"]]


def test_an_adaptive_width_of_one_state_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sampler\.adaptive=True is for a draft_width of 2 or more, and has no effect"
    ):
        SpeculativeSampler(block_size=4, steps=4, draft_width=1, adaptive=True)
    assert SpeculativeSampler.idle({"draft_width": 1, "adaptive": False}) == {}
