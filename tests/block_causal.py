"""Block-causal models for tests, blocks counted from position 0: a script of predictions, and a random network."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapters.toy import TableAdapter
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import ModelFacts, QuotaSampler
from tests.models import MASK, random_llama

M, END, SIZE = 11, 10, 12  # mask, end token and vocabulary of the scripts

FACTS = ModelFacts(SIZE, M, frozenset({END}), attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")


def row(token: int, probability: float) -> list[float]:
    """Logits by which a token has that probability, the mask none, and the others share the rest."""
    rest = math.log((1 - probability) / (SIZE - 2)) if probability < 1 else -math.inf
    return [math.log(probability) if i == token else -math.inf if i == M else rest for i in range(SIZE)]


def scripted(steps: Sequence[tuple[Sequence[int], Sequence[float]]], first: int = 0) -> TableAdapter:
    """Forward n says ``steps[n]``: tokens and probabilities of the slots from ``first`` on."""

    def table(seen: Mapping[int, int], slot: int) -> list[float]:
        tokens, probabilities = steps[adapter.calls - 1]
        return row(tokens[slot - first], probabilities[slot - first]) if slot >= first else row(1, 0.9)

    adapter = TableAdapter(FACTS, table)
    return adapter


def network(origin: str = "zero") -> TransformerAdapter:
    """A random block-causal network: what it predicts depends sharply on every token it sees."""
    adapter = random_llama()
    adapter.facts = replace(
        adapter.facts, attention="blocks", attentions=frozenset({"blocks"}), block_origin=origin, max_positions=None
    )
    return adapter


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(MASK - 1) for _ in range(length)] for length in lengths]


def decode(
    adapter: Any, sampler: QuotaSampler, given: Sequence[Sequence[int]], length: int, max_rows: int = 1
) -> list[Outcome]:
    """Decoded sequences, traced, in the order of their prompts."""
    tasks = [Task(i, list(prompt), length, stream=i, traced=True) for i, prompt in enumerate(given)]
    longest = max(len(p) + sampler.canvas_length(len(p), length, adapter.facts) for p in given)
    outcomes = sorted(Engine(adapter, sampler, max_rows).decode(tasks, longest), key=lambda o: o.task.index)
    for outcome in outcomes:
        assert outcome.state is not None and outcome.failure is None, outcome.error
    return outcomes


def tokens(outcome: Outcome) -> list[int]:
    assert outcome.state is not None
    return outcome.state.tokens


def canvases(outcome: Outcome) -> list[list[int]]:
    """The generated slots after each forward."""
    prompt = len(outcome.task.prompt)
    canvas, seen = [M] * (len(tokens(outcome)) - prompt), []
    for record in outcome.trace:
        for slot, token, _ in record["changed"]:
            canvas[slot - prompt] = token
        seen.append(list(canvas))
    return seen


def kinds(outcome: Outcome) -> list[str]:
    return [run.kind.value for run in outcome.log]
