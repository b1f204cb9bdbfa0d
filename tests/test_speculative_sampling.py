"""Above temperature 0, what is decoded has the target's law, whatever drafts it; each rule beside one that must fail.

The exact law of the first tokens is enumerated from a table and held against the tokens of many runs: chi-square, as a
standard normal number by Wilson and Hilferty (1931), on several tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from adapters import drafts
from adapters.mixing import MixingAdapter
from pipeline.engine import Engine, Task
from samplers import CAUSAL, DFlashSampler, Law, ModelFacts, stream_key
from tests.drafting import (
    DrafterLaw,
    Pair,
    Probabilities,
    TargetLaw,
    Tokens,
    argmax,
    decoded,
    drawn,
    filtered,
    leviathan,
    pair,
    random_law,
    resampled_from_p,
    surely,
)

V, WIDTH, PROMPT = 3, 2, (0,)
DRAWN = DFlashSampler(temperature=1.0, sampled_drafts=True)
MATCHED = DFlashSampler(temperature=1.0)
TREE = DFlashSampler(temperature=1.0, tree="ddtree", node_budget=4)


def marginals(seed: int) -> DrafterLaw:
    """A law for each depth behind the last known token."""
    law = random_law(seed, V)
    return lambda tokens, depth: law((tokens[-1], depth))


def exact(target: TargetLaw, length: int, how: Law) -> dict[Tokens, float]:
    """Of every sequence of so many tokens behind the prompt."""
    laws = {}
    for tokens in product(range(V), repeat=length):
        steps = (filtered(target((*PROMPT, *tokens[:n])), how)[tokens[n]] for n in range(length))
        laws[tokens] = math.prod(steps)
    return laws


def normal(seen: Counter[Tokens], law: dict[Tokens, float]) -> float:
    """Pearson's chi-square over cells of 5 or more expected, the rest pooled, as a standard normal number."""
    runs = seen.total()
    assert all(law[tokens] > 0 for tokens in seen), "a sequence that the target never says"
    cells = [(seen[tokens], p * runs) for tokens, p in law.items() if p * runs >= 5]
    few = (runs - sum(n for n, _ in cells), runs - sum(e for _, e in cells))
    cells += [few] if few[1] >= 5 else []
    square, freedom = sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1
    return ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def z(sampler: DFlashSampler, model: Pair, length: int = 4, runs: int = 500, seed: int = 0) -> float:
    """How far the tokens of many runs are from the target's law."""
    how = Law(sampler.temperature, sampler.top_k, sampler.top_p)
    streams = range(seed << 20, (seed << 20) + runs)
    seen = Counter(decoded(sampler, model, list(PROMPT), length, stream) for stream in streams)
    return normal(seen, exact(model.target, length, how))


def tables(count: int, **more: Any) -> Iterator[tuple[int, Pair]]:
    for seed in range(count):
        yield seed, with_drafter(random_law(1000 + seed, V), marginals(2000 + seed), **more)


def with_drafter(target: TargetLaw, drafter: DrafterLaw, **more: Any) -> Pair:
    model = pair(target, drafter, WIDTH + 1)
    for name, value in more.items():
        setattr(model, name, value)
    return model


def spread(sampler: DFlashSampler, models: Iterator[tuple[int, Pair]], **more: Any) -> list[float]:
    return [z(sampler, model, seed=seed, **more) for seed, model in models]


def accepted(model: Pair, sampler: DFlashSampler, runs: int = 200) -> list[bool]:
    """Verdicts on drafts that were reached: behind none that was rejected."""
    verdicts: list[bool] = []
    judged = model.judge

    def noting(p: Any, q: Any, draft: int, accepting: float, drawing: float) -> tuple[bool, int]:
        verdict = judged(p, q, draft, accepting, drawing)
        verdicts.append(verdict[0])
        return verdict

    model.judge = noting
    for stream in range(runs):
        decoded(sampler, model, list(PROMPT), 3, stream)  # the last slot is not drafted
    model.judge = judged
    return verdicts


# ---- every rule is exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "count"), [(DRAWN, 20), (MATCHED, 20), (TREE, 8)], ids=["drawn", "matched", "tree"]
)
def test_tokens_have_the_targets_law(sampler: DFlashSampler, count: int) -> None:
    found = spread(sampler, tables(count))
    assert all(abs(value) < 4 for value in found), found
    assert abs(sum(found) / len(found)) < 4 / math.sqrt(len(found)), "as a whole, too"


@pytest.mark.parametrize("sampler", [DRAWN, MATCHED], ids=["drawn", "matched"])
def test_two_rounds_together_have_it(sampler: DFlashSampler) -> None:
    """Six tokens: the first is the prefill's, a round decides three at most."""
    found = spread(sampler, tables(2), length=6, runs=1500)
    assert all(abs(value) < 4 for value in found), found


def test_under_top_p_with_drafts_outside_the_nucleus() -> None:
    """The target's nucleus is its two likeliest ids; what drafts are drawn from is cut in the same way."""
    sampler = DFlashSampler(temperature=1.0, sampled_drafts=True, top_p=0.6)
    outside = 0
    found = []
    for seed, model in tables(6):
        how = Law(1.0, top_p=0.6)
        p, q = (filtered(law, how) for law in (model.target((0, 0)), model.drafter((0, 0), 1)))
        outside += any(b > 0 and a == 0 for a, b in zip(p, q))
        found.append(z(sampler, model, seed=seed))
    assert outside >= 2 and all(abs(value) < 4 for value in found), found


def test_with_temperature_and_top_k() -> None:
    sampler = DFlashSampler(temperature=0.6, sampled_drafts=True, top_k=2)
    assert all(abs(value) < 4 for value in spread(sampler, tables(4)))


def test_with_ids_that_are_never_drafted() -> None:
    def drafter(tokens: Tokens, depth: int) -> Probabilities:
        return (0.7, 0.3, 0.0) if (tokens[-1] + depth) % 2 else (0.0, 0.0, 1.0)

    found = [z(DRAWN, with_drafter(random_law(40 + seed, V), drafter), seed=seed) for seed in range(5)]
    assert all(abs(value) < 4 for value in found), found


def test_drafts_of_the_targets_own_law_are_all_accepted() -> None:
    target = random_law(7, V)
    model = with_drafter(
        lambda tokens: target((len(tokens),)), lambda tokens, depth: target((len(tokens) + depth - 1,))
    )
    verdicts = accepted(model, DRAWN)
    assert len(verdicts) >= 200 and all(verdicts)
    assert abs(z(DRAWN, model)) < 4


def test_drafts_that_the_target_never_says_are_all_rejected() -> None:
    model = with_drafter(lambda tokens: (0.6, 0.4, 0.0), lambda tokens, depth: surely(2, V))
    assert not any(accepted(model, DRAWN))
    for sampler in (DRAWN, MATCHED, TREE):
        seen = Counter(decoded(sampler, model, [0], 4, stream) for stream in range(600))
        law = {tokens: p for tokens, p in exact(model.target, 4, Law(1.0)).items() if p}
        assert abs(normal(seen, law)) < 4


def test_acceptance_is_what_the_laws_have_in_common() -> None:
    """p = (.5 .3 .2), q = (.2 .5 .3): beta is .7, what is left of p is its first id; argmax drafts match with .3."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
    assert sum(map(min, p, q)) == pytest.approx(0.7)
    assert leviathan(p, q, 1, 0.99, 0.99) == (False, 0) and leviathan(p, q, 1, 0.59, 0.5)[0]
    model = with_drafter(lambda tokens: p, lambda tokens, depth: q)
    verdicts = accepted(model, DRAWN, 3000)
    share = sum(verdicts) / len(verdicts)
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / len(verdicts))


# ---- what must fail --------------------------------------------------------------------------------------------------


def blunt(law: Probabilities) -> Probabilities:
    return (1 / V,) * V


def likeliest(drafter: DrafterLaw) -> DrafterLaw:
    return lambda tokens, depth: surely(argmax(drafter(tokens, depth)), V)


@pytest.mark.parametrize(
    ("faults", "sure"),
    [
        ({"judge": resampled_from_p}, False),
        ({"kept_as": blunt}, False),
        ({"judge": resampled_from_p}, True),
        ({"kept_as": blunt}, True),
    ],
    ids=["residual of p", "q not the one drawn from", "argmax, residual of p", "argmax with a soft q"],
)
def test_wrong_rules_are_told_from_the_targets_law(faults: dict[str, Callable[..., Any]], sure: bool) -> None:
    """Negative controls, over few tables."""
    found = []
    for seed, model in tables(3, **faults):
        model.drafter = likeliest(model.drafter) if sure else model.drafter
        found.append(z(DRAWN, model, runs=800, seed=seed))
    assert sum(found) / len(found) > 4 and sum(value > 4 for value in found) >= 2, found


def test_a_fault_in_the_second_round_alone_is_told() -> None:
    """Negative control of the test of two rounds: from slot 4 on the residual is the target's law."""

    class Late(Pair):
        def _said(self, row: Any, forward: Any, laws: Any) -> Any:
            self.judge = resampled_from_p if forward.window.start > 2 else leviathan
            return super()._said(row, forward, laws)

    found = []
    for seed, model in tables(2):
        late = Late(model.target, likeliest(model.drafter), model.facts)
        found.append(z(DRAWN, late, length=6, runs=1500, seed=seed))
    assert min(found) > 4, found


# ---- on the device -----------------------------------------------------------------------------------------------


def test_the_adapters_judge_as_this_pair_does() -> None:
    laws = [random_law(seed, 5, 3.0) for seed in (1, 2)]
    numbers = random_law(3, 3)
    p, q = ([law((n,)) for n in range(300)] for law in laws)
    q[:20], q[20:40] = p[:20], [(0.0, 0.5, 0.0, 0.5, 0.0)] * 20
    us = [(numbers((n,))[0], numbers((n,))[1]) for n in range(300)]
    tokens_of_q = [drawn(law, 0.5) for law in q]
    tensors = (torch.tensor(part, dtype=torch.float64) for part in (p, q))
    first, second = (torch.tensor([u[i] for u in us], dtype=torch.float64) for i in (0, 1))
    verdicts, tokens = drafts.judge(*tensors, torch.tensor(tokens_of_q), first, second)
    ours = [leviathan(*case, *u) for case, u in zip(zip(p, q, tokens_of_q), us)]
    assert list(zip(verdicts.tolist(), tokens.tolist())) == ours


def whole_numbers() -> MixingAdapter:
    """A network and its drafter of few ids, and a mask that neither says."""
    causal = {"attention": "causal", "attentions": frozenset({"causal"}), "shift": 1}
    drafter = ModelFacts(V + 1, V, frozenset(), trained_block=WIDTH + 1)
    return MixingAdapter(ModelFacts(V + 1, V, frozenset(), draft=drafter, **causal), 5)


def on_the_device(sampler: DFlashSampler, runs: int = 700) -> float:
    """As `z`, through the engine and the adapters, many rows at a time."""
    adapter = whole_numbers()
    laws: dict[Tokens, float] = {}
    for tokens in product(range(V), repeat=3):
        logits = adapter.logits((*PROMPT, *tokens[:2]), range(3), CAUSAL)[:, :V].double().softmax(-1)
        laws[tokens] = math.prod(float(logits[place, token]) for place, token in enumerate(tokens))
    tasks = [Task(i, list(PROMPT), 3, stream=stream_key(1, i)) for i in range(runs)]
    states = [outcome.state for outcome in Engine(adapter, sampler, 50).decode(tasks, 4)]
    return normal(Counter(tuple(state.tokens[1:]) for state in states if state), laws)


@pytest.mark.parametrize("sampler", [DRAWN, TREE], ids=["drawn", "tree"])
def test_the_adapters_keep_the_law_too(sampler: DFlashSampler) -> None:
    assert abs(on_the_device(sampler)) < 4


def test_adapters_that_judge_by_another_law_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the drafter's laws count as if every id were alike."""
    right = drafts.judge
    monkeypatch.setattr(drafts, "judge", lambda law, drafted, *rest: right(law, torch.full_like(drafted, 1 / V), *rest))
    assert on_the_device(DRAWN) > 4
