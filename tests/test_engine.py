"""The engine's promises: neighbours don't matter, what is counted was run, and one bad sample stays alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.attention import attention
from adapters.base import DeviceAdapter, Group, Request
from adapters.cache import KeyValueStore
from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.text import IdCodec
from adapters.toy import LogitsAdapter, TableAdapter, ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter
from adapters.visibility import visibility
from pipeline.engine import Engine, Outcome, Task
from pipeline.rows import decided
from samplers import (
    Attend,
    AutoregressiveSampler,
    ConfidenceSampler,
    DecodeState,
    Decoding,
    Forward,
    Kind,
    ModelFacts,
    Prediction,
    Sampler,
    ThresholdSampler,
    stream_key,
)
from tests.models import END, MASK, VOCABULARY, random_llama
from tests.shared import shared

CANVAS = 16
DIFFUSION: dict[str, Any] = {
    "confidence": lambda **law: ConfidenceSampler(block_size=8, steps=8, **law),
    "remasking": lambda **law: ConfidenceSampler(block_size=8, steps=8, remask_ratio=0.5, **law),
    "margin": lambda **law: ConfidenceSampler(block_size=4, steps=8, order="margin", eos="last", **law),
    "random": lambda **law: ConfidenceSampler(block_size=8, steps=8, order="random", eos="never", **law),
    "threshold": lambda **law: ThresholdSampler(block_size=8, steps=16, threshold=0.5, **law),
    "stopping": lambda **law: ThresholdSampler(block_size=4, steps=16, threshold=0.2, early_stop=True, **law),
}
CAUSAL: dict[str, Any] = {
    "autoregressive": AutoregressiveSampler,
    "uncached": lambda **law: AutoregressiveSampler(cache="none", **law),
}


def tasks(count: int = 9, canvas: int = CANVAS) -> list[Task]:
    """Prompts of 3 to 15 ids, so that groups are padded and rows end at different times."""
    draw = random.Random(0)
    prompts = [[draw.randrange(END) for _ in range(draw.randint(3, 15))] for _ in range(count)]
    return [Task(i, prompt, canvas, stream_key(7, i)) for i, prompt in enumerate(prompts)]


def decode(adapter: Any, sampler: Sampler, work: Sequence[Task], max_rows: int = 8) -> dict[int, Outcome]:
    facts = adapter.facts
    slots = max(len(t.prompt) + sampler.canvas_length(len(t.prompt), t.length, facts) for t in work)
    return {outcome.task.index: outcome for outcome in Engine(adapter, sampler, max_rows).decode(work, slots)}


def told(outcome: Outcome) -> tuple:
    """All that must not depend on neighbours."""
    assert outcome.state is not None and outcome.failure is None, outcome.error
    return outcome.state.tokens, outcome.state.committed_at, outcome.state.revised, outcome.log


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [*DIFFUSION, *CAUSAL])
def test_a_batch_equals_its_rows_whatever_their_number_and_order(name: str, temperature: float) -> None:
    adapter = random_llama(causal=name in CAUSAL)
    law = {} if temperature == 0 else {"temperature": temperature, "top_p": 0.95, "top_k": 40}
    sampler = {**DIFFUSION, **CAUSAL}[name](**law)
    work = tasks()
    alone = decode(adapter, sampler, work, max_rows=1)
    assert len({tuple(outcome.state.tokens[-CANVAS:]) for outcome in alone.values() if outcome.state}) == len(work)
    shuffled = random.Random(1).sample(work, len(work))
    for order, max_rows in ((work, 3), (work, 8), (shuffled, 3), (shuffled, 8)):
        together = decode(adapter, sampler, order, max_rows)
        assert {i: told(outcome) for i, outcome in together.items()} == {i: told(o) for i, o in alone.items()}


def test_a_batch_equals_its_rows_on_the_golden_llada() -> None:
    description = describe(ModelOptions("golden", path=str(shared("golden", "llada", "model"))))
    adapter = load(description, torch.device("cpu"))
    work = [replace(task, prompt=[id_ * 4 for id_ in task.prompt]) for task in tasks()]
    for temperature in (0.0, 0.7):
        sampler = ThresholdSampler(block_size=8, steps=16, threshold=0.9, temperature=temperature)
        alone, together = (decode(adapter, sampler, work, max_rows) for max_rows in (1, 8))
        assert {i: told(o) for i, o in together.items()} == {i: told(o) for i, o in alone.items()}


def test_temperature_draws_differ_between_samples_and_seeds_but_repeat() -> None:
    """DEC-03's other half: no row's draw is copied to its neighbours."""
    adapter, sampler = random_llama(), DIFFUSION["confidence"](temperature=1.0)
    same = [Task(i, [1, 2, 3], CANVAS, stream_key(0, i)) for i in range(4)]
    first, again = (decode(adapter, sampler, same) for _ in range(2))
    drawn = [tuple(told(first[i])[0]) for i in range(4)]
    assert drawn == [tuple(told(again[i])[0]) for i in range(4)]
    assert len(set(drawn)) == 4
    reseeded = decode(adapter, sampler, [replace(same[0], stream=stream_key(1, 0))])
    assert tuple(told(reseeded[0])[0]) != drawn[0]


class SumAdapter(TransformerAdapter):
    """DEC-03's stub: everywhere it predicts (sum of the attended prompt ids) mod 7; what is attended in vain adds 9.

    Its one "layer" attends evenly, through the attention function of the real models: the mean of the ids seen, and of
    the row's first slot, give their sum and number.
    """

    def __init__(self) -> None:
        self.facts = ModelFacts(11, 10, frozenset(), attention="full")
        DeviceAdapter.__init__(self, self.facts, IdCodec(11), torch.device("cpu"))

    def open(self, rows: int, slots: int) -> None:
        DeviceAdapter.open(self, rows, slots)

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        DeviceAdapter.place(self, row, tokens, stream)

    def hidden(self, group: Group) -> torch.Tensor:
        ids = torch.where(group.ids == 10, 0, group.ids) * (group.positions < group.lengths[:, None] - 8)
        seen = torch.stack((ids, group.positions == 0), -1).double()[:, None]
        even = torch.zeros_like(seen)
        shown = visibility(group, self.facts.attention, KeyValueStore(0, 0).lines(group), packs=False)
        mean = attention(torch.nn.Identity(), even, even, seen, None, 1.0, shown)[0][:, :, 0]
        number = (1 / mean[..., 1]).round()
        in_vain = number - group.lengths[:, None]
        total = (mean[..., 0] * number).round() + 9 * in_vain
        return 50 * torch.nn.functional.one_hot((total % 7).long(), 11).float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_pads_are_not_attended(temperature: float) -> None:
    """DEC-03: prompts [5] and [1, 2, 3, 4] give 5 and 3, alone and together; with pads attended the first gives 4."""
    adapter = SumAdapter()
    sampler = ThresholdSampler(block_size=8, steps=8, temperature=temperature)
    work = [Task(0, [5], 8, stream_key(0, 0)), Task(1, [1, 2, 3, 4], 8, stream_key(0, 1))]
    for max_rows in (1, 2):
        outcomes = decode(adapter, sampler, work, max_rows)
        answers = [told(outcomes[i])[0][-8:] for i in (0, 1)]
        assert answers == [[5] * 8, [3] * 8]


class Calls:
    """An adapter that also notes every row it was really asked to run."""

    def __init__(self, adapter: Any) -> None:
        self.adapter, self.rows = adapter, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        self.rows += [len(request.forward.window) for request in requests]
        return self.adapter.forward(requests)


def _adapters(causal: bool) -> list[Any]:
    facts = ModelFacts(VOCABULARY, None if causal else MASK, frozenset({END}), shift=int(causal))
    facts = replace(facts, attentions=frozenset({"full", "causal"}))
    table = TableAdapter(facts, lambda seen, slot: [float((slot * 7 + i * 11) % 13) for i in range(VOCABULARY)])
    return [ToyMaskedLMAdapter(), table, random_llama(causal)]


@pytest.mark.parametrize("name", [*DIFFUSION, *CAUSAL])
def test_every_forward_counted_was_run_and_every_one_run_is_counted(name: str) -> None:
    for adapter in _adapters(causal=name in CAUSAL):
        calls = Calls(adapter)
        outcomes = decode(calls, {**DIFFUSION, **CAUSAL}[name](), tasks(), max_rows=3).values()
        counts = [outcome.counts() for outcome in outcomes]
        assert [outcome.state.forwards for outcome in outcomes if outcome.state] == [c["nfe"] for c in counts]
        assert sum(c["nfe"] for c in counts) == len(calls.rows) > 0
        assert sum(c["token_forwards"] for c in counts) == sum(calls.rows)
        for count in counts:
            assert count["nfe"] == sum(count[f"nfe_{kind}"] for kind in Kind) and count["nfe_draft"] == 0
            assert count["nfe_prefill"] == (name in CAUSAL and adapter.facts.shift)


def test_no_sampler_leaves_a_mask_or_touches_the_prompt_on_a_real_network() -> None:
    for name, sampler in DIFFUSION.items():
        for i, outcome in decode(random_llama(), sampler(temperature=0.7), tasks(), max_rows=4).items():
            state = outcome.state
            assert state is not None and state.tokens[: state.prompt_length] == tasks()[i].prompt
            decided = [slot for slot in state.canvas if not state.mask[slot]]
            assert name == "stopping" or decided == list(state.canvas)
            assert all(state.tokens[slot] != MASK and state.committed_at[slot] > 0 for slot in decided)


def test_a_freed_row_takes_the_next_task_at_once() -> None:
    """Three rows, one of them long: the engine makes as many rounds as the long one needs, not the sum of batches."""
    adapter = Calls(ToyMaskedLMAdapter())
    rounds = []
    engine = Engine(adapter, AutoregressiveSampler(), max_rows=2, ticked=lambda: rounds.append(1))
    list(engine.decode([Task(0, [5], 12), *(Task(i, [5], 3) for i in range(1, 5))], 13))
    assert len(rounds) == 12 and len(adapter.rows) == 24


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_outcomes_come_once_each_and_tasks_are_read_lazily(max_rows: int) -> None:
    taken: list[int] = []

    def lazily() -> Any:
        for i in range(5):
            taken.append(i)
            yield Task(i, [5], 4)

    outcomes = Engine(ToyMaskedLMAdapter(), AutoregressiveSampler(), max_rows).decode(lazily(), 5)
    first = next(outcomes)
    assert len(taken) == max_rows
    assert sorted([first.task.index, *(outcome.task.index for outcome in outcomes)]) == list(range(5))


def test_windows_of_a_group_waste_at_most_a_quarter() -> None:
    class Watching(ToyMaskedLMAdapter):
        def forward(self, requests: Sequence[Request]) -> list[Prediction]:
            lengths = [len(request.forward.window) for request in requests]
            assert min(lengths) >= 0.75 * max(lengths)
            return super().forward(requests)

    work = [Task(i, [5] * (1 + 3 * i), 8) for i in range(12)]
    assert len(decode(Watching(), ThresholdSampler(block_size=8, steps=8), work, max_rows=12)) == 12


class Scripted(Sampler):
    """Yields the given forwards, whatever it hears."""

    method_name = "scripted"
    attentions = frozenset({"full"})

    def __init__(self, *forwards: Forward) -> None:
        super().__init__()
        object.__setattr__(self, "forwards", forwards)

    def decode(self, state: DecodeState) -> Decoding:
        for forward in self.forwards:  # type: ignore[attr-defined]  # noqa: UP028 - tuples take no answers
            yield forward


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (Forward(range(0)), "empty window"),
        (Forward(range(2, 40)), "row of 8 slots"),
        (Forward(range(-1, 4)), "row of 8 slots"),
        (Forward(range(0, 8, 2)), "row of 8 slots"),
        (Forward(range(4, 8), context=range(9)), "row of 8 slots"),
        (Forward(range(4, 8), [3]), "lie outside range(4, 8)"),
        (Forward(range(4, 8), [5, 8]), "lie outside range(4, 8)"),
        (Forward(range(8), attend=Attend("causal")), "causal attention of a model that serves full"),
    ],
)
def test_a_forward_that_cannot_be_run_fails_its_sample_in_words(forward: Forward, said: str) -> None:
    facts = ModelFacts(VOCABULARY, MASK, frozenset({END}))
    fine = Forward(range(8), [4])
    for script in ((forward,), (fine, forward)):
        adapter = TableAdapter(facts, lambda seen, slot: [0.0] * VOCABULARY)
        (outcome,) = Engine(adapter, Scripted(*script)).decode([Task(0, [1, 2, 3, 4], 4)], 8)
        assert outcome.failure == "failed" and outcome.error is not None and said in outcome.error
        assert outcome.counts()["nfe"] == adapter.calls == len(script) - 1


@dataclass(frozen=True, kw_only=True)
class Clumsy(ThresholdSampler):
    """Breaks one rule in the second forward of the sequence whose prompt says so."""

    how: str = ""

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None:
        if step == 1 and state.tokens[0] == 7:
            getattr(self, self.how)(state)
        super().update_state(state, prediction, step)

    def prompt(self, state: DecodeState) -> None:
        state.commit(1, 5)

    def behind(self, state: DecodeState) -> None:
        state.commit(8, 5)

    def before(self, state: DecodeState) -> None:
        state.remask(-1)

    def mask(self, state: DecodeState) -> None:
        state.commit(4, MASK)

    def crash(self, state: DecodeState) -> None:
        raise KeyError("lost")

    def doubt(self, state: DecodeState) -> None:
        assert state.steps < 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("prompt", "the sampler committed 5 to slot 1, which is part of the prompt: the canvas is slots 4 to 7 ("),
        ("behind", "the sampler committed 5 to slot 8, which does not exist: the canvas is slots 4 to 7 ("),
        ("before", "the sampler took back slot -1, which does not exist: the canvas is slots 4 to 7 ("),
        ("mask", f"the sampler committed {MASK} to slot 4: not an id that an answer can hold ("),
        ("crash", "Clumsy raised KeyError: 'lost' ("),
        ("doubt", "Clumsy raised AssertionError"),
    ],
)
def test_what_a_sampler_must_not_do_fails_its_sample_by_file_and_line(how: str, said: str) -> None:
    adapter = TableAdapter(ModelFacts(VOCABULARY, MASK, frozenset({END})), lambda seen, slot: [0.0] * VOCABULARY)
    sampler = Clumsy(block_size=4, steps=4, threshold=1.0, how=how)
    outcomes = decode(adapter, sampler, [Task(i, [i, 2, 3, 4], 4) for i in (6, 7, 8)], max_rows=2)
    assert [outcomes[i].failure for i in (6, 7, 8)] == [None, "failed", None]
    assert (outcomes[7].error or "").startswith(said) and outcomes[7].counts()["nfe"] == 2
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if f"def {how}(" in text) + 1
    assert (outcomes[7].error or "").endswith(f"(test_engine.py line {line}, in {how})")


class Silent(Sampler):
    method_name = "silent"
    attentions = frozenset({"full"})

    def decode(self, state: DecodeState) -> Decoding:
        return
        yield


class Returning(Silent):
    def decode(self, state: DecodeState) -> Decoding:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (Silent(), "the sampler ended and left slot 2 undecided"),
        (Returning(), "Returning.decode gave no generator: it must yield its forwards"),
        (Scripted("forward"), "the sampler yielded 'forward', which is no samplers.Forward"),  # type: ignore[arg-type]
        (Scripted(Forward([2, 3])), "a Forward whose window is [2, 3]: it must be a range"),  # type: ignore[arg-type]
    ],
)
def test_a_sampler_that_makes_no_forward_decodes_nothing_and_says_so(sampler: Sampler, said: str) -> None:
    adapter = TableAdapter(ModelFacts(VOCABULARY, MASK, frozenset({END})), lambda seen, slot: [0.0] * VOCABULARY)
    outcomes = decode(adapter, sampler, [Task(0, [1, 2], 4), Task(1, [1, 2], 0)])
    assert outcomes[0].failure == "failed" and said in (outcomes[0].error or "") and adapter.calls == 0
    assert outcomes[1].failure is None or not isinstance(sampler, Silent) or isinstance(sampler, Returning)


def test_blocks_must_be_told_to_a_block_causal_model() -> None:
    facts = ModelFacts(9, 8, frozenset(), attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")
    adapter = TableAdapter(facts, lambda seen, slot: [0.0] * 9)
    for attend, said in ((None, "where the blocks"), (Attend("blocks"), "blocks of 0 slots")):
        (outcome,) = Engine(adapter, Scripted(Forward(range(4), attend=attend))).decode([Task(0, [1], 3)], 4)
        assert outcome.error is not None and said in outcome.error


def test_blocks_counted_from_zero_are_whole_where_fewer_tokens_are_asked_for() -> None:
    seen: list[Forward] = []

    class Watching(TableAdapter):
        def hidden(self, group: Group) -> torch.Tensor:
            seen.extend(group.forwards)
            return super().hidden(group)

    facts = ModelFacts(9, 8, frozenset(), attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")
    adapter = Watching(facts, lambda seen, slot: [0.0] * 9)
    outcome = decode(adapter, ThresholdSampler(block_size=4, steps=8, threshold=0.0), [Task(0, [1] * 5, 8)])[0]
    assert [len(forward.window) for forward in seen] == [8, 12, 16]
    assert {forward.attend for forward in seen} == {Attend("blocks", 0, 4)}
    assert told(outcome)[0] == [1] * 5 + [0] * 11 and decided(outcome.state) == [0] * 8


def test_logits_that_are_not_finite_fail_their_sample_only() -> None:
    """Also the sequence that takes over the failed one's row must not meet what is left of it in the cache."""
    for causal, sampler in ((False, DIFFUSION["threshold"]()), (True, AutoregressiveSampler())):
        adapter = random_llama(causal)
        work = [Task(i, [1 + i, 2, 3, 4 + i], CANVAS) for i in range(6)]
        expected = {i: told(outcome) for i, outcome in decode(adapter, sampler, work, max_rows=2).items()}
        poison = next(i for i in range(END) if not any(i in tokens for tokens, *_ in expected.values()))
        with torch.no_grad():
            adapter.body.embed_tokens.weight[poison] = torch.nan
        spoilt = [replace(task, prompt=[*task.prompt, poison, poison]) if task.index == 1 else task for task in work]
        outcomes = decode(adapter, sampler, spoilt, max_rows=2)
        assert outcomes[1].failure == "failed" and outcomes[1].error == "forward 1 gave logits that are not finite"
        assert {i: told(o) for i, o in outcomes.items() if i != 1} == {i: e for i, e in expected.items() if i != 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_infinite_or_undefined_logit_is_seen(value: float, temperature: float) -> None:
    facts = ModelFacts(9, 8, frozenset())
    for bad in (0, 5):
        table = {i: [value if (i, v) == (2, bad) else 1.0 for v in range(9)] for i in range(4)}
        sampler = ThresholdSampler(block_size=4, steps=4, temperature=temperature)
        (outcome,) = Engine(TableAdapter(facts, table), sampler).decode([Task(0, [], 4)], 4)
        assert outcome.failure == "failed" and outcome.counts()["nfe"] == 1


def test_a_prompt_too_long_for_the_model_fails_without_a_forward_and_the_others_go_on() -> None:
    adapter = Calls(random_llama())
    work = [Task(0, [1] * 113, CANVAS), Task(1, [1] * 112, CANVAS), Task(2, [1], CANVAS)]
    outcomes = decode(adapter, DIFFUSION["threshold"](), work, max_rows=2)
    assert outcomes[0].failure == "too_long" and outcomes[0].state is None and not outcomes[0].log
    assert outcomes[0].error == "prompt of 113 and canvas of 16 tokens exceed the model's 128 positions"
    assert [outcomes[i].failure for i in (1, 2)] == [None, None]


@pytest.mark.parametrize("sampler", [AutoregressiveSampler(), ThresholdSampler(block_size=4, steps=4)])
def test_an_empty_prompt_is_refused_where_the_first_token_needs_one(sampler: Sampler) -> None:
    facts = ModelFacts(9, 8, frozenset(), shift=1, attentions=frozenset({"full", "causal"}))
    (outcome,) = Engine(TableAdapter(facts, lambda seen, slot: [0.0] * 9), sampler).decode([Task(0, [], 4)], 4)
    assert outcome.failure == "failed"
    assert outcome.error == "an empty prompt: this model needs at least one token to predict the next"
    (toy,) = Engine(ToyMaskedLMAdapter(), sampler).decode([Task(0, [], 4)], 4)
    assert toy.failure is None


def test_steps_that_leave_a_block_without_one_are_refused() -> None:
    """DEC-05 (c): 2 steps over 4 blocks; never 0 forwards and 64 masks."""
    outcome = decode(ToyMaskedLMAdapter(), ConfidenceSampler(block_size=16, steps=2), [Task(0, [], 64)])[0]
    assert outcome.failure == "failed" and outcome.counts()["nfe"] == 0
    assert outcome.error == "sampler.steps=2 is out of range: use at least one for each block of 16 slots"


@pytest.mark.parametrize(("length", "block", "steps", "forwards"), [(64, 16, 10, 8), (60, 16, 8, 8), (8, 16, 8, 8)])
def test_uneven_divisions_fill_every_mask_and_report_the_calls_made(
    length: int, block: int, steps: int, forwards: int
) -> None:
    """DEC-05 (b) and (d), and a block longer than the canvas: the command line refuses them, the sampler is exact."""
    calls = Calls(random_llama())
    outcome = decode(calls, ConfidenceSampler(block_size=block, steps=steps), [Task(0, [1, 2], length)])[0]
    assert outcome.counts()["nfe"] == len(calls.rows) == forwards
    assert outcome.state is not None and not any(outcome.state.mask) and len(outcome.state.canvas) == length


def test_a_slot_taken_back_has_no_commit_time_until_it_is_decided_again() -> None:
    state = DecodeState.masked([1], 2, ModelFacts(9, 8, frozenset()))
    state.forwards = 1
    state.commit(1, 4)
    state.forwards = 2
    state.remask(1)
    assert state.committed_at == [-1, -1, -1]
    state.forwards = 3
    state.commit(1, 4)
    assert state.committed_at == [-1, 3, -1] and state.revised == 0
    state.forwards = 4
    state.commit(1, 4)  # surer of the same token: it was there before
    assert state.committed_at[1] == 3


def test_time_in_the_model_is_part_of_a_samples_time() -> None:
    engine = Engine(random_llama(), DIFFUSION["threshold"](), max_rows=1)
    outcomes = list(engine.decode(tasks(3), 40))
    assert 0 < engine.forward_seconds < sum(outcome.seconds for outcome in outcomes)


def test_a_warm_up_leaves_no_trace() -> None:
    adapter, sampler = random_llama(), DIFFUSION["threshold"](temperature=0.7)
    engine = Engine(adapter, sampler, max_rows=3)
    engine.warm_up(tasks(), 40)
    assert engine.forward_seconds == 0
    warm = {outcome.task.index: told(outcome) for outcome in engine.decode(tasks(), 40)}
    assert warm == {i: told(outcome) for i, outcome in decode(adapter, sampler, tasks()).items()}


def test_the_head_of_a_table_is_not_overwritten() -> None:
    class Constant(LogitsAdapter):
        def hidden(self, group: Group) -> torch.Tensor:
            return logits.expand(*group.ids.shape, 9)

    logits = torch.arange(9.0)
    sampler = ThresholdSampler(block_size=4, steps=4, eos="last", temperature=0.5)
    decode(Constant(ModelFacts(9, 8, frozenset({7})), IdCodec(9), torch.device("cpu")), sampler, [Task(0, [], 4)])
    assert logits.tolist() == list(range(9))
