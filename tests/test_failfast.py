"""A masked model drafts for a causal one: whatever it says the target's output stands; how far it drafts, by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from pipeline.data.arithmetic import make_problems
from pipeline.engine import Engine, Task
from samplers import (
    AutoregressiveSampler,
    DecodeState,
    FailFastSampler,
    Forward,
    ModelFacts,
    Prediction,
    Role,
    Sampler,
    uniform,
)
from samplers.failfast import Heard
from samplers.forward import Kind
from tests.drafting import Tokens, argmax, drawn, filtered, greedy, random_law

VOCABULARY, END, MASK = 7, 5, 6
Said = Callable[[Mapping[int, int], int], tuple[int, float]]  # a drafter: by what is seen and the slot


def facts(draft: ModelFacts | None = None) -> ModelFacts:
    causal = frozenset({"causal"})
    return ModelFacts(VOCABULARY, None, frozenset({END}), shift=1, attention="causal", attentions=causal, draft=draft)


FULL = ModelFacts(VOCABULARY, MASK, frozenset({END}))
BLOCKS = replace(FULL, attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero", trained_block=4)


@dataclass
class Duo:
    """A target whose law hangs on all tokens before, and a drafter; both remember what their keys were made of."""

    drafter: Said
    draft: ModelFacts = FULL
    seed: int = 0
    forwards: list[Forward] = field(default_factory=list)
    keys: dict[int, int] = field(default_factory=dict)
    drafter_keys: dict[int, int] = field(default_factory=dict)

    def law(self, tokens: Tokens) -> tuple[float, ...]:
        return (*random_law(self.seed, MASK, 3.0)(tokens), 0.0)

    def decode(self, sampler: Sampler, prompt: Sequence[int], asked: int, stream: int = 0) -> DecodeState:
        self.forwards, self.keys, self.drafter_keys = [], {}, {}
        state = DecodeState.masked(list(prompt), asked, facts(self.draft), stream)
        spare, decoding = sampler.spare_slots(state.model), sampler.decode(state)
        forward = next(decoding, None)
        while forward is not None:
            self.forwards.append(forward)
            assert forward.window.stop <= len(state.tokens) + (spare if forward.role is Role.DRAFT else 0)
            said = self.drafted(state, forward) if forward.role is Role.DRAFT else self.verified(state, forward)
            state.forwards += 1
            try:
                forward = decoding.send(said)
            except StopIteration:
                forward = None
        return state

    def verified(self, state: DecodeState, forward: Forward) -> Prediction:
        if forward.keep is not None:
            self.keys = {slot: token for slot, token in self.keys.items() if slot < forward.window.start}
        content = forward.variants[0] if forward.variants else {}
        shown = {slot: content.get(slot, state.tokens[slot]) for slot in forward.window}
        seen = {**{slot: self.keys[slot] for slot in forward.context}, **shown}
        for slot in forward.context:
            assert not state.mask[slot] and self.keys[slot] == state.tokens[slot], "a key of a token that was rejected"
        said = Prediction(forward.want, {}, {})
        for slot in forward.want:
            law = self.law(tuple(seen[i] for i in range(slot)))
            said.token[slot] = drawn(filtered(law, forward.law), uniform(state.stream, slot, forward.draw))
            said.confidence[slot] = law[said.token[slot]]
        self.keys |= {slot: shown[slot] for slot in forward.store}
        return said

    def drafted(self, state: DecodeState, forward: Forward) -> Prediction:
        (content,) = forward.variants
        shown = {slot: content[slot] if slot in content else state.tokens[slot] for slot in forward.window}
        assert all(not state.mask[slot] for slot in forward.window if slot not in content)
        for slot in forward.context:
            assert not state.mask[slot] and self.drafter_keys[slot] == state.tokens[slot]
        seen = {**{slot: state.tokens[slot] for slot in forward.context}, **shown}
        assert list(seen) == list(range(forward.window.stop)), "the drafter sees all of the text"
        if forward.attend is not None:
            assert all(shown[slot] == state.tokens[slot] for slot in forward.store)
            assert (forward.window.stop - forward.attend.first) % forward.attend.size == 0, "whole blocks"
        said = Prediction(forward.want, {}, {})
        for slot in forward.want:
            assert shown[slot] == MASK and slot - self.draft.shift in forward.window
            said.token[slot], said.confidence[slot] = self.drafter(seen, slot)
        self.drafter_keys |= {slot: shown[slot] for slot in forward.store}
        return said

    def plain(self, prompt: Sequence[int], asked: int) -> list[int]:
        tokens = greedy(self.law, tuple(prompt), asked)[len(prompt) :]
        return list(tokens[: tokens.index(END) + 1] if END in tokens else tokens)


def answer(state: DecodeState) -> list[int]:
    return [state.tokens[slot] for slot in state.canvas if not state.mask[slot]]


def by_seed(seed: int) -> Said:
    return lambda seen, slot: (int(uniform(seed, slot, sum(seen.values())) * MASK), uniform(seed, slot, len(seen)))


def oracle(duo: Duo) -> Said:
    """What the target would say, in chunks of three surely, then one time unsurely."""

    def said(seen: Mapping[int, int], slot: int) -> tuple[int, float]:
        known = [seen[i] for i in range(slot) if i in seen]
        text = tuple(known[: known.index(MASK)] if MASK in known else known)
        return greedy(duo.law, text, slot - len(text) + 1)[slot], 0.9

    return said


def adversary(duo: Duo) -> Said:
    return lambda seen, slot: ((oracle(duo)(seen, slot)[0] + 1) % MASK, 0.9)


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "oracle", "adversary"])
def test_the_output_is_the_targets_own_whatever_is_drafted(kind: str) -> None:
    rounds = 0
    for seed in range(150):
        draw = random.Random(seed)
        duo = Duo(by_seed(seed), draw.choice([FULL, BLOCKS, replace(BLOCKS, block_origin="prompt")]), seed)
        duo.draft = replace(duo.draft, shift=draw.randint(0, 1))
        if kind != "random":
            duo.drafter = (oracle if kind == "oracle" else adversary)(duo)
        sampler = FailFastSampler(
            draft_width=draw.randint(1, 9),
            draft_chunk=draw.randint(1, 4),
            draft_confidence=draw.random(),
            threshold=draw.random(),
        )
        prompt = [draw.randrange(END) for _ in range(draw.randint(1, 6))]
        asked = draw.choice([1, 2, 5, 12])
        state = duo.decode(sampler, prompt, asked)
        assert answer(state) == duo.plain(prompt, asked)
        target = sum(forward.role is Role.TARGET for forward in duo.forwards)
        assert target <= len(answer(state)) and (kind != "adversary" or target == len(answer(state)))
        rounds += len(answer(state)) - target
    assert (rounds == 0) == (kind == "adversary")


def test_without_drafts_it_is_plain_decoding_call_for_call() -> None:
    for seed in range(20):
        duo = Duo(by_seed(seed), seed=seed)
        for temperature in (0.0, 0.8):
            duo.decode(FailFastSampler(draft_width=0, temperature=temperature), [1, 2], 8)
            forwards = duo.forwards
            duo.decode(AutoregressiveSampler(temperature=temperature), [1, 2], 8)
            assert [(f.window, list(f.want), f.context, f.store, f.draw, f.kind) for f in forwards] == [
                (f.window, list(f.want), f.context, f.store, f.draw, f.kind) for f in duo.forwards
            ]


def test_above_temperature_0_the_law_is_the_targets() -> None:
    """The first two tokens of 4,000 runs; drafts that are all kept would be far off."""
    duo, runs, prompt = Duo(by_seed(3), seed=3), 4000, (1,)
    duo.drafter = oracle(duo)
    sampler = FailFastSampler(draft_width=3, draft_chunk=3, temperature=1.0)
    seen = Counter(tuple(answer(duo.decode(sampler, prompt, 3, stream))[:2]) for stream in range(runs))
    law = duo.law(prompt)
    expected = {
        (first, second): law[first] * second_law
        for first in range(VOCABULARY)
        if first != END
        for second, second_law in enumerate(duo.law((*prompt, first)))
    } | {(END,): law[END]}
    distance = sum(abs(seen[pair] / runs - share) for pair, share in expected.items()) / 2
    assert distance < 0.04 and seen.keys() <= expected.keys()
    assert argmax(law) != END and seen.most_common(1)[0][1] < runs / 2


# ---- how far it drafts -----------------------------------------------------------------------------------------------


def proposals(duo: Duo) -> list[int]:
    return [len(forward.proposed) for forward in duo.forwards if forward.kind is Kind.VERIFY]


def drafting_forwards(duo: Duo) -> list[list[int]]:
    return [list(forward.want) for forward in duo.forwards if forward.role is Role.DRAFT]


def by_confidence(confidence: Mapping[int, float], token: int = 0) -> Duo:
    return Duo(lambda seen, slot: (token, confidence.get(slot, 0.9)), seed=1)


def test_drafting_goes_on_chunk_by_chunk_until_a_token_is_unsure() -> None:
    """Prompt 0, slot 1 by the target. Chunks 2..4 and 5..7: slot 6 is unsure, so 7 is the last; all are verified."""
    duo = by_confidence({6: 0.44})
    duo.decode(FailFastSampler(draft_chunk=3, draft_confidence=0.45, draft_width=12), [0], 30)
    assert drafting_forwards(duo)[:2] == [[2, 3, 4], [5, 6, 7]] and proposals(duo)[0] == 6
    duo = by_confidence({6: 0.45})
    duo.decode(FailFastSampler(draft_chunk=3, draft_confidence=0.45, draft_width=8), [0], 30)
    assert drafting_forwards(duo)[:3] == [[2, 3, 4], [5, 6, 7], [8, 9]] and proposals(duo)[0] == 8


def test_a_chunk_takes_the_forwards_that_its_threshold_asks_for() -> None:
    """Slots 2..5 at .9, .02, .04, .9: first 2 and 5; of the rest the surer one, 4; then 3. One is unsure: no more."""
    duo = by_confidence({3: 0.02, 4: 0.04})
    duo.decode(FailFastSampler(draft_chunk=4, draft_width=20), [0], 30)
    assert drafting_forwards(duo)[:3] == [[2, 3, 4, 5], [3, 4], [3]] and proposals(duo)[0] == 4
    shown = [forward.variants[0] for forward in duo.forwards if forward.role is Role.DRAFT][:3]
    assert [content[slot] for content in shown for slot in range(2, 6)] == [MASK] * 4 + [
        0,
        MASK,
        MASK,
        0,
        0,
        MASK,
        0,
        0,
    ]
    careful = by_confidence({})
    careful.decode(FailFastSampler(draft_chunk=3, draft_width=3, threshold=1.0), [0], 30)
    assert [len(want) for want in drafting_forwards(careful)[:3]] == [3, 2, 1]


def test_nothing_is_drafted_behind_an_end_token_or_the_canvas() -> None:
    duo = Duo(lambda seen, slot: (END if slot == 3 else 0, 0.9), seed=1)
    duo.decode(FailFastSampler(draft_chunk=4, draft_width=20), [0], 30)
    assert proposals(duo)[0] == 2 and len(drafting_forwards(duo)[0]) == 4
    short = by_confidence({})
    short.decode(FailFastSampler(draft_chunk=4), [0], 4)
    assert drafting_forwards(short)[0] == [2, 3], "the target's own token fills slot 4"
    assert all(forward.want[-1] <= 4 for forward in short.forwards if forward.role is Role.TARGET)


def test_a_drafter_with_full_attention_sees_masks_as_far_as_a_round_may_go() -> None:
    duo = by_confidence({2: 0.1})
    duo.decode(FailFastSampler(draft_chunk=3, draft_width=8), [0], 30)
    first = next(forward for forward in duo.forwards if forward.role is Role.DRAFT)
    assert first.window == range(10) and not first.store and list(first.variants[0]) == list(range(2, 10))


def test_a_drafter_that_attends_by_blocks_runs_a_known_block_once() -> None:
    """Blocks of 4 from 0, prompt 0..5, slot 6 known: 0..3 are stored; the chunk 7, 8 needs blocks up to 12."""
    duo = Duo(lambda seen, slot: (0, 0.1), BLOCKS, seed=1)
    duo.decode(FailFastSampler(draft_chunk=2, draft_width=4), [0, 1, 2, 3, 4, 0], 12)
    drafts = [forward for forward in duo.forwards if forward.role is Role.DRAFT]
    assert (drafts[0].window, drafts[0].context, drafts[0].store) == (range(12), range(0), range(4))
    stored = [slot for forward in drafts for slot in forward.store]
    assert stored == sorted(set(stored)) and all(forward.window.start == len(forward.context) for forward in drafts)


def test_a_slot_that_is_read_one_row_before_has_that_row_in_the_window() -> None:
    """Where the first slot of a block is left open by a round's first forward, which stored all before it."""
    begun = 0
    for seed in range(50):
        duo = Duo(by_seed(seed), replace(BLOCKS, shift=1), seed)
        duo.decode(FailFastSampler(draft_width=9, draft_chunk=3, draft_confidence=0.1, threshold=0.6), [1, 2, 3], 12)
        drafts = [forward for forward in duo.forwards if forward.role is Role.DRAFT]
        begun += sum(min(forward.want) == forward.window.start + 1 and forward.context.stop > 0 for forward in drafts)
    assert begun > 5


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_width": -1}, "sampler.draft_width=-1"),
        ({"draft_chunk": 0}, "sampler.draft_chunk=0"),
        ({"draft_confidence": 1.5}, "sampler.draft_confidence=1.5"),
        ({"threshold": -0.1}, "sampler.threshold=-0.1"),
        ({"eos": "last"}, "sampler.eos=last"),
    ],
)
def test_settings_that_are_none_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FailFastSampler(**options)


def test_models_without_a_masked_drafter_are_refused() -> None:
    sampler = FailFastSampler()
    for draft, said in (
        (None, "comes with a drafter"),
        (replace(FULL, trained_block=8), "use sampler=dflash"),
        (replace(BLOCKS, trained_block=None), "how long they are"),
    ):
        with pytest.raises(ValueError, match=said):
            sampler.refuse_misfit(facts(draft))
    sampler.refuse_misfit(facts(FULL))
    FailFastSampler(draft_width=0).refuse_misfit(facts())
    with pytest.raises(ValueError, match="use an autoregressive model"):
        FailFastSampler.check(replace(facts(FULL), shift=0))


# ---- shipped models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Uncached(FailFastSampler):
    """The drafter runs all of the text each time."""

    def drafting(self, state: DecodeState, reach: range, want: Sequence[int], heard: Heard) -> Forward:
        heard.stored = 0
        return super().drafting(state, reach, want, heard)


@pytest.mark.parametrize("draft", ["tiny/llada", "tiny/dream", "tiny/sdar"])
def test_on_the_shipped_models_the_output_is_plain_decodings_in_fewer_forwards(draft: str) -> None:
    adapter = load(describe(ModelOptions("pair", path="tiny/ar", draft=draft, dtype="float32")), torch.device("cpu"))
    adapter.checks = True
    texts = [problem.question for problem in make_problems("test", 3, 4)]
    prompts = [adapter.codec.encode_chat([{"role": "user", "content": text}]) for text in texts]

    def decode(sampler: Sampler, rows: int) -> list[Any]:
        tasks = [Task(i, prompt, 64, i, traced=True) for i, prompt in enumerate(prompts)]
        outcomes = sorted(Engine(adapter, sampler, rows).decode(tasks, 256), key=lambda outcome: outcome.task.index)
        assert not any(outcome.error for outcome in outcomes)
        return outcomes

    plain, drafted = decode(AutoregressiveSampler(), 4), decode(FailFastSampler(draft_width=16), 4)
    assert [o.state.tokens for o in drafted] == [o.state.tokens for o in plain]
    made, saved = (sum(o.counts()["nfe"] for o in outcomes) for outcomes in (plain, drafted))
    assert saved < made
    alone = decode(Uncached(draft_width=16), 1)
    assert [[r["changed"] for r in o.trace] for o in alone] == [[r["changed"] for r in o.trace] for o in drafted]
    assert [o.drafts() for o in alone] == [o.drafts() for o in drafted]
