"""A target and its drafter in plain Python: laws by rule, and a cache that remembers what its keys were computed from.

It answers what `samplers.DFlashSampler` asks for, and fails where a forward reads what would be wrong in a network: a
key that stands for another token or another past, features that the drafter was not given, a draft of something else.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any

from adapters.base import Request
from adapters.text import IdCodec
from pipeline.engine import Engine, Outcome, Task
from samplers import DecodeState, Forward, Law, ModelFacts, NGram, Prediction, Role, Sampler, uniform
from samplers.forward import Kind

Probabilities = tuple[float, ...]
Tokens = tuple[int, ...]
TargetLaw = Callable[[Tokens], Probabilities]  # of the next token, by all before it
DrafterLaw = Callable[[Tokens, int], Probabilities]  # by all known tokens, and the depth, from 1
Judge = Callable[[Probabilities, Probabilities, int, float, float], tuple[bool, int]]

ACCEPTING = 0x2545F4914F6CDD1D  # added to a stream, as the adapters have it
MOST_UNLIKELY = -math.inf


# ---- laws ------------------------------------------------------------------------------------------------------------


@cache
def filtered(law: Probabilities, how: Law) -> Probabilities:
    """Tempered, cut, and made to sum to 1; at temperature 0 the likeliest id has all."""
    kept = [0.0 if i in how.banned else p for i, p in enumerate(law)]
    if how.temperature == 0:
        best = max(range(len(kept)), key=lambda i: (kept[i], -i))
        return tuple(float(i == best) for i in range(len(kept)))
    kept = [p ** (1 / how.temperature) for p in kept]
    order = sorted(range(len(kept)), key=lambda i: (-kept[i], i))
    if how.top_k is not None and how.top_k < len(kept):
        least = kept[order[how.top_k - 1]]
        kept = [p if p >= least else 0.0 for p in kept]
    total = sum(kept)
    if how.top_p is not None:
        before = accumulate((kept[i] / total for i in order), initial=0.0)
        for i, mass in zip(order, before):
            kept[i] = kept[i] if mass < how.top_p else 0.0
    total = sum(kept)
    return tuple(p / total for p in kept)


@cache
def _sums(law: Probabilities) -> list[float]:
    return list(accumulate(law))


def drawn(law: Probabilities, u: float) -> int:
    """Inverse CDF in the order of ids; the law need not sum to 1."""
    sums = _sums(law)
    return bisect_left(sums, u * sums[-1])


def leviathan(p: Probabilities, q: Probabilities, draft: int, accepting: float, drawing: float) -> tuple[bool, int]:
    """Whether a draft of law q is accepted under p, and what is drawn if not."""
    rest = tuple(max(0.0, a - b) for a, b in zip(p, q))
    return accepting * q[draft] < p[draft], drawn(rest if sum(rest) else p, drawing)


def resampled_from_p(p: Probabilities, q: Probabilities, draft: int, accepting: float, drawing: float) -> Any:
    """Negative control: after a rejection the target's law, not what it has above the drafter's."""
    return accepting * q[draft] < p[draft], drawn(p, drawing)


def random_law(seed: int, vocabulary: int, sharpness: float = 1.0) -> TargetLaw:
    """A law for every sequence of tokens, by its own random numbers."""

    @cache
    def law(tokens: Tokens) -> Probabilities:
        place = 0
        for token in tokens:
            place = (place * 1009 + token + 1) % (1 << 61)
        weights = [uniform(seed, place, token) ** sharpness for token in range(vocabulary)]
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    return law


def argmax(law: Probabilities) -> int:
    return max(range(len(law)), key=lambda i: (law[i], -i))


def surely(token: int, vocabulary: int) -> Probabilities:
    return tuple(float(i == token) for i in range(vocabulary))


def greedy(target: TargetLaw, tokens: Tokens, count: int) -> Tokens:
    """What plain greedy decoding makes of it, end tokens or not."""
    for _ in range(count):
        tokens = (*tokens, argmax(target(tokens)))
    return tokens


def oracle(target: TargetLaw) -> DrafterLaw:
    """A drafter that is always right."""
    return lambda tokens, depth: surely(greedy(target, tokens, depth)[-1], len(target(tokens)))


def adversary(target: TargetLaw) -> DrafterLaw:
    """A drafter that is never right where the tokens before it are."""

    def law(tokens: Tokens, depth: int) -> Probabilities:
        right = greedy(target, tokens, depth)[-1]
        return surely((right + 1) % len(target(tokens)), len(target(tokens)))

    return law


# ---- the pair --------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """A sequence in flight.

    Attributes:
        keys: of the target, by slot: all tokens that went into them, their own last.
        heard: those of the last window, by slot, until the drafter is given them.
        features: what the drafter was given, by slot.
        drafts: the laws that drafts were drawn from, by slot.
    """

    tokens: list[int]
    stream: int
    keys: dict[int, Tokens] = field(default_factory=dict)
    heard: dict[int, Tokens] = field(default_factory=dict)
    features: dict[int, Tokens] = field(default_factory=dict)
    drafts: dict[int, Probabilities] = field(default_factory=dict)


@dataclass
class Pair:
    """See the module. An adapter, as the engine sees it.

    Attributes:
        judge: how drafts are judged; another one than Leviathan's is a negative control.
        kept_as: what is kept as the law that drafts were drawn from; another one is a negative control.
    """

    target: TargetLaw
    drafter: DrafterLaw
    facts: ModelFacts
    judge: Judge = leviathan
    kept_as: Callable[[Probabilities], Probabilities] = lambda law: law
    forwards: list[Forward] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codec: Any = IdCodec(self.facts.vocab_size)
        self.rows: dict[int, _Row] = {}

    def open(self, rows: int, slots: int) -> None:
        self.rows = {}

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        self.rows[row] = _Row(list(tokens), stream)

    def synchronize(self) -> None:
        pass

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        for request in requests:
            for slot, token in zip(request.changed, request.tokens, strict=True):
                self.rows[request.row].tokens[slot] = token
        return [self.answer(self.rows[request.row], request.forward) for request in requests]

    def answer(self, row: _Row, forward: Forward) -> Prediction:
        self.forwards.append(forward)
        if forward.role is Role.DRAFT:
            return self._draft(row, forward)
        return self._run(row, forward)

    def _draft(self, row: _Row, forward: Forward) -> Prediction:
        facts, window = self.facts.draft, forward.window
        assert facts is not None and forward.kind is Kind.DRAFT and not forward.store
        path = list(row.heard) if forward.keep is None else list(forward.keep)
        for slot, source in zip(range(window.start - len(path), window.start), path, strict=True):
            row.features[slot] = row.heard[source]
        row.heard = {}
        known = tuple(row.tokens[: window.start + 1])
        assert forward.context == range(window.start) == range(len(row.features)), "the drafter's cache is the context"
        assert all(row.features[slot] == known[: slot + 1] for slot in forward.context), "features of another path"
        (shown,) = forward.variants
        assert shown == dict.fromkeys(window[1:], facts.mask_id)
        laws = {slot: self.drafter(known, slot - window.start) for slot in forward.want}
        if forward.carry:
            row.drafts = {slot: self.kept_as(filtered(law, forward.law)) for slot, law in laws.items()}
        return self._said(row, forward, laws)

    def _run(self, row: _Row, forward: Forward) -> Prediction:
        window, context = forward.window, forward.context
        self._keep(row, forward)
        before = tuple(row.keys[slot][-1] for slot in context)
        assert context == range(window.start) and before == tuple(row.tokens[: window.start]), "keys of other tokens"
        assert all(row.keys[slot] == before[: slot + 1] for slot in context), "keys of another past"
        content = forward.variants[0] if forward.variants else {}
        seen: list[Tokens] = []
        for place, slot in enumerate(window):
            token = content[slot] if slot in content else row.tokens[slot]
            position = slot if forward.positions is None else list(forward.positions)[place]
            parent = forward.attend.parents[place] if forward.attend and forward.attend.parents else place - 1
            seen.append((*(seen[parent] if place else before), token))
            assert len(seen[-1]) == position + 1, "a position that is not the depth"
        stored = {slot: seen[slot - window.start] for slot in forward.store}
        row.keys.update(stored)
        if stored:
            row.heard = stored
        laws = {slot: self.target(seen[slot - 1 - window.start]) for slot in forward.want}
        return self._said(row, forward, laws)

    def _keep(self, row: _Row, forward: Forward) -> None:
        if forward.keep is None:
            return
        end, kept = forward.window.start, [row.keys[slot] for slot in forward.keep]
        row.keys = {slot: key for slot, key in row.keys.items() if slot < end - len(kept)}
        row.keys.update(zip(range(end - len(kept), end), kept))

    def _said(self, row: _Row, forward: Forward, laws: dict[int, Probabilities]) -> Prediction:
        said = Prediction(forward.want, {}, {})
        content = forward.variants[0] if forward.variants else {}
        for slot, raw in laws.items():
            law, u = filtered(raw, forward.law), uniform(row.stream, slot, forward.draw)
            if forward.judged_drafts and slot in forward.proposed:
                accepting = uniform(row.stream + ACCEPTING, slot, forward.draw)
                said.accepted[slot], said.token[slot] = self.judge(law, row.drafts[slot], content[slot], accepting, u)
            else:
                said.token[slot] = drawn(law, u)
            said.confidence[slot] = raw[said.token[slot]]
            if forward.rivals:
                said.rivals[slot] = {token: raw[token] for token in forward.rivals.get(slot, ())}
            if forward.best:
                ranked = sorted(range(len(raw)), key=lambda i: (-raw[i], i))[: forward.best]
                said.best[slot] = [(i, math.log(raw[i]) if raw[i] else MOST_UNLIKELY) for i in ranked]
        return said


def pair(target: TargetLaw, drafter: DrafterLaw, block: int, ends: Sequence[int] = (), vocabulary: int = 0) -> Pair:
    """Its vocabulary is the target's, unless one is given; the mask is the drafter's last id."""
    size = vocabulary or len(target((0,)))
    attentions = frozenset({"causal"})
    facts = ModelFacts(size, None, frozenset(ends), shift=1, attention="causal", attentions=attentions)
    drafts = replace(facts, mask_id=size - 1, shift=0, attention="full", attentions=frozenset({"full"}))
    return Pair(target, drafter, replace(facts, draft=replace(drafts, trained_block=block)))


def run(sampler: Sampler, model: Any, prompt: Sequence[int], length: int, **more: Any) -> Outcome:
    """Through the engine, which refuses what it cannot run; ``ngram`` is the state's."""
    (outcome,) = run_all(sampler, model, [prompt], length, **more)
    return outcome


def run_all(
    sampler: Sampler,
    model: Any,
    prompts: Sequence[Sequence[int]],
    length: int,
    rows: int = 1,
    ngram: NGram | None = None,
) -> list[Outcome]:
    tasks = [Task(i, list(prompt), length, 977 + i, traced=True) for i, prompt in enumerate(prompts)]
    engine = Engine(model, sampler, rows, ngrams=None if ngram is None else lambda prompt: ngram)
    outcomes = sorted(engine.decode(tasks, max(map(len, prompts)) + length), key=lambda outcome: outcome.task.index)
    assert not [outcome.error for outcome in outcomes if outcome.failure]
    return outcomes


def answer(outcome: Outcome) -> list[int]:
    """What was decided, up to the first undecided slot."""
    state = outcome.state
    assert state is not None
    decided = [slot for slot in state.canvas if not state.mask[slot]]
    assert decided == list(range(state.prompt_length, state.prompt_length + len(decided)))
    return [state.tokens[slot] for slot in decided]


def decoded(sampler: Sampler, model: Pair, prompt: list[int], length: int, stream: int) -> Tokens:
    """Without the engine, for many runs: the canvas."""
    state = DecodeState.masked(prompt, length, model.facts, stream)
    row, decoding = _Row(state.tokens, stream), sampler.decode(state)
    forward = next(decoding)
    try:
        while True:
            said = model.answer(row, forward)
            state.forwards += 1
            forward = decoding.send(said)
    except StopIteration:
        return tuple(state.tokens[len(prompt) :])
