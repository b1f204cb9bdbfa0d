"""Speculative sampling on the device: what is emitted has the target's law, whatever law the drafts had."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from adapters import drafts
from adapters.base import Group, Request
from adapters.drafts import judge
from adapters.drawing import drawn, law_of, uniforms
from adapters.text import IdCodec
from adapters.toy import CPU, LogitsAdapter
from samplers import Forward, Law, ModelFacts, Prediction

Judge = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ROUNDS = 6000


def noise(count: int, seed: int) -> torch.Tensor:
    counters = torch.arange(count)
    return uniforms(torch.full_like(counters, seed), counters, counters * 0)


def emitted(law: torch.Tensor, drafted: torch.Tensor, seed: int, rule: Judge = judge) -> torch.Tensor:
    """Tokens of rows of p and q (n, V): drafts are drawn and judged."""
    tokens, accepting, drawing = (noise(len(law), 3 * seed + i) for i in range(3))
    draft = drawn(drafted, tokens)
    accepted, token = rule(law, drafted, draft, accepting, drawing)
    return draft.where(accepted, token)


def chi_square(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Standard score of counts against a law, by Wilson and Hilferty; cells below 5 expected are pooled."""
    expected = law.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(law)).double()
    rare = expected < 5
    cells = [(c, e) for c, e in zip(counts[~rare].tolist(), expected[~rare].tolist())]
    if expected[rare].sum() >= 5:
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    else:
        assert counts[rare].sum() < 20
    freedom = len(cells) - 1
    if not freedom:
        return 0.0
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def laws(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q over 6 ids."""
    generator = torch.Generator().manual_seed(seed)
    p, q = 1.5 * torch.randn(2, 1, 6, generator=generator)
    if kind == "nucleus":  # mass of q outside p's
        return law_of(p, Law(1.0, top_p=0.6)), law_of(q, Law(1.0))
    if kind == "both cut":
        return law_of(p, Law(0.7, top_p=0.8)), law_of(q, Law(0.7, top_p=0.8))
    if kind == "zeros":
        q[0, [1, 4]] = -torch.inf
    if kind == "argmax":
        return law_of(p, Law(1.0)), law_of(q, Law())
    if kind == "disjoint":
        p[0, :3], q[0, 3:] = -torch.inf, -torch.inf
    return law_of(p, Law(1.0)), law_of(q, Law(1.0))


KINDS = ("plain", "nucleus", "both cut", "zeros", "argmax", "disjoint")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_emitted_has_the_targets_law(kind: str) -> None:
    scores = []
    for seed in range(20):
        p, q = laws(seed, kind)
        tokens = emitted(p.expand(ROUNDS, -1), q.expand(ROUNDS, -1), seed)
        assert p[0, tokens].gt(0).all()
        scores.append(chi_square(tokens, p[0]))
    assert max(map(abs, scores)) < 4 and abs(sum(scores) / len(scores)) < 1, scores


def redrawn_from_p(
    law: torch.Tensor, drafted: torch.Tensor, tokens: torch.Tensor, accepting: torch.Tensor, drawing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return judge(law, drafted, tokens, accepting, drawing)[0], drawn(law, drawing)


def redrawn_by_the_same_uniform(
    law: torch.Tensor, drafted: torch.Tensor, tokens: torch.Tensor, accepting: torch.Tensor, drawing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return judge(law, drafted, tokens, accepting, accepting)


@pytest.mark.parametrize("rule", [redrawn_from_p, redrawn_by_the_same_uniform])
def test_a_wrong_rule_is_found_out(rule: Judge) -> None:
    found = [
        chi_square(emitted(p.expand(ROUNDS, -1), q.expand(ROUNDS, -1), seed, rule), p[0])
        for seed in range(20)
        for p, q in [laws(seed, "plain")]
    ]
    assert sum(score > 4 for score in found) > 15, found


def test_the_worked_example_of_three_ids() -> None:
    """p = (.5, .3, .2), q = (.2, .5, .3): .7 are accepted, and all that is drawn besides is id 0."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).expand(60_000, -1), torch.tensor([[0.2, 0.5, 0.3]]).expand(60_000, -1)
    draft = drawn(q, noise(60_000, 1))
    accepted, token = judge(p, q, draft, noise(60_000, 2), noise(60_000, 3))
    assert accepted.double().mean().item() == pytest.approx(0.7, abs=0.008)
    assert token.unique().tolist() == [0]


def test_equal_laws_accept_always_and_disjoint_ones_never() -> None:
    p, _ = laws(1, "plain")
    counters = noise(ROUNDS, 1)
    worst = torch.tensor([1 - 2.0**-53] * ROUNDS, dtype=torch.float64)
    p = p.expand(ROUNDS, -1)
    accepted, token = judge(p, p, drawn(p, counters), worst, counters)
    assert accepted.all() and chi_square(token, p[0]) < 4  # were one rejected, p is drawn from
    p, q = laws(1, "disjoint")
    p, q = p.expand(ROUNDS, -1), q.expand(ROUNDS, -1)
    assert not judge(p, q, drawn(q, counters), noise(ROUNDS, 2), noise(ROUNDS, 3))[0].any()


# ------------------------------------------------------------------------------------------------- through an adapter

VOCABULARY, ANCHOR, DEPTH = 4, 0, 2


class Pair(LogitsAdapter):
    """A target whose law depends on the last two tokens, and a drafter whose law depends on the last known one only."""

    def __init__(self, seed: int) -> None:
        facts = ModelFacts(VOCABULARY, None, frozenset(), shift=1, attention="causal", attentions=frozenset({"causal"}))
        super().__init__(facts, IdCodec(VOCABULARY), CPU)
        generator = torch.Generator().manual_seed(seed)
        self.target = 1.5 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)
        self.drafter = 1.5 * torch.randn(VOCABULARY, DEPTH, VOCABULARY, generator=generator)

    def hidden(self, group: Group) -> torch.Tensor:
        if group.forwards[0].carry:
            return self.drafter[group.ids[:, 0]]
        before = torch.cat((group.ids[:, :1], group.ids[:, :-1]), 1)
        return self.target[before, group.ids]


def rounds(adapter: Pair, law: Law, rows: int, length: int) -> torch.Tensor:
    """(rows, length) tokens: drafts of two, judged; the slot before a window's first goes along as its first."""
    adapter.open(rows, length + DEPTH + 2)
    lines = [[ANCHOR, ANCHOR] for _ in range(rows)]
    for row, line in enumerate(lines):
        adapter.place(row, line, 977 * row + 5)
    turn = 0
    while any(len(line) < length + 2 for line in lines):
        going = [row for row, line in enumerate(lines) if len(line) < length + 2]
        drafted = adapter.forward([draft_of(row, lines[row], law, turn) for row in going])
        verify = [verify_of(row, lines[row], law, turn, said) for row, said in zip(going, drafted)]
        for row, step, said in zip(going, verify, adapter.forward(verify)):
            lines[row] += committed(step, said)
        turn += 1
    return torch.tensor([line[2 : length + 2] for line in lines])


def draft_of(row: int, line: list[int], law: Law, turn: int) -> Request:
    end = len(line)
    window = range(end - 1, end + DEPTH - 1)
    changed = list(range(end))[-3:]
    return Request(row, Forward(window, range(end, end + DEPTH), law=law, draw=turn, carry=True), changed, line[-3:])


def verify_of(row: int, line: list[int], law: Law, turn: int, drafted: Prediction) -> Request:
    end = len(line)
    window, proposed = range(end - 2, end + DEPTH), range(end, end + DEPTH)
    more = {"variants": [drafted.token], "proposed": proposed, "judged_drafts": True}
    return Request(row, Forward(window, range(end, end + DEPTH + 1), law=law, draw=turn, **more), [], [])


def committed(step: Request, said: Prediction) -> list[int]:
    """Accepted drafts, then the token drawn at the first that is not, or at the slot behind them."""
    tokens, (drafted,) = [], step.forward.variants
    assert list(said.accepted) == list(step.forward.proposed)
    for slot in said.positions:
        if not said.accepted.get(slot, False):
            return [*tokens, said.token[slot]]
        tokens.append(drafted[slot])
    raise AssertionError("a slot without a draft is never accepted")


def joint(adapter: Pair, law: Law, length: int) -> torch.Tensor:
    """The law of all sequences of that length, in the order of their digits."""
    p = law_of(adapter.target.flatten(0, 1).double(), law).view(adapter.target.shape)
    probabilities = torch.ones(1, dtype=torch.float64)
    last = torch.tensor([[ANCHOR, ANCHOR]])
    for _ in range(length):
        step = p[last[:, 0], last[:, 1]]
        probabilities = (probabilities[:, None] * step).flatten()
        last = torch.stack((last[:, 1].repeat_interleave(VOCABULARY), torch.arange(VOCABULARY).repeat(len(last))), 1)
    return probabilities


LAWS = [Law(1.0), Law(0.8, top_p=0.8), Law(1.2, top_k=2)]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_two_rounds_and_more_have_the_targets_joint_law(law: Law) -> None:
    """Four tokens take two rounds at least, with a bonus between."""
    scores = []
    for seed in range(3):
        adapter = Pair(seed)
        tokens = rounds(adapter, law, 1500, 4)
        digits = (tokens * VOCABULARY ** torch.arange(3, -1, -1)).sum(1)
        expected = joint(adapter, law, 4)
        assert expected[digits].gt(0).all()
        scores.append(chi_square(digits, expected))
    assert max(map(abs, scores)) < 4, scores


def test_a_wrong_residual_shows_in_the_joint_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "judge", redrawn_from_p)
    adapter = Pair(0)
    tokens = rounds(adapter, Law(1.0), 1500, 4)
    digits = (tokens * VOCABULARY ** torch.arange(3, -1, -1)).sum(1)
    assert chi_square(digits, joint(adapter, Law(1.0), 4)) > 6


@pytest.mark.parametrize("shared", ["ACCEPTING", "DRAFTING"])
def test_random_numbers_that_are_used_twice_show_in_the_joint_law(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    """Draft and target draw with the same number here: only the streams keep them apart."""
    monkeypatch.setattr(drafts, shared, 0)
    adapter = Pair(0)
    tokens = rounds(adapter, Law(1.0), 1500, 4)
    digits = (tokens * VOCABULARY ** torch.arange(3, -1, -1)).sum(1)
    assert chi_square(digits, joint(adapter, Law(1.0), 4)) > 5


def test_greedy_drafts_are_accepted_where_they_are_the_targets_own() -> None:
    adapter = Pair(0)
    tokens = rounds(adapter, Law(), 3, 12)
    row = [ANCHOR, ANCHOR]
    for _ in range(12):
        row.append(int(adapter.target[row[-2], row[-1]].argmax()))
    assert tokens.tolist() == [row[2:]] * 3
