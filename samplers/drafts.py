"""Drafts behind a row's last known token: where they come from but for a model, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from samplers.forward import Prediction
from samplers.state import DecodeState
from samplers.trees import Candidates, Edge, Node


def walk(start: int, nodes: Sequence[Node], said: Prediction) -> tuple[list[int], list[Edge]]:
    """Follow what the target says from the last known token, in slot ``start``, through the drafts.

    Returns:
        Places of the path in the window, and the tokens said along it with their confidence: one more than drafts were
        right, but where the path ends with the canvas.
    """
    children = {(node.parent, node.token): place for place, node in enumerate(nodes, 1)}
    path: list[int] = [0]
    emitted: list[Edge] = []
    while (slot := start + path[-1] + 1) in said.token:
        token, confidence = said.token[slot], said.confidence[slot]
        if said.accepted.get(slot):
            token = nodes[path[-1]].token
            confidence = said.rivals[slot][token]
        emitted.append((token, confidence))
        child = children.get((path[-1], token))
        if child is None:
            break
        path.append(child)
    return path, emitted


def commit(state: DecodeState, first: int, emitted: Sequence[Edge]) -> bool:
    """Commit tokens from slot ``first`` on, none behind the canvas or an end token; returns whether there is one."""
    ends = state.model.end_ids
    for slot, (token, confidence) in enumerate(emitted, first):
        if slot > state.prompt_length and state.tokens[slot - 1] in ends:
            return True
        if slot == len(state.tokens):
            return False
        state.commit(slot, token, confidence)
        if token in ends:
            return True
    return False


def continued(state: DecodeState, window: range, wanted: int) -> Candidates:
    """The n-gram model's likeliest tokens behind its likeliest ones; as many depths as it knows."""
    assert state.ngram is not None, "sampler.drafter=ngram needs an n-gram model"
    text = state.tokens[: window.start + 1]
    candidates = []
    for _ in window[1:]:
        if not (best := state.ngram.likeliest(text, wanted)):
            break
        candidates.append(best)
        text.append(best[0][0])
    return candidates


def at_random(state: DecodeState, window: range, wanted: int) -> Candidates:
    """Ids drawn alike for all, apart from the token draws, with probabilities drawn as well."""
    size, first = state.model.vocab_size, -1 - 2 * wanted * state.forwards
    candidates = []
    for slot in window[1:]:
        draws = [(state.uniform(slot, first - 2 * n), state.uniform(slot, first - 2 * n - 1)) for n in range(wanted)]
        drawn = {int(at * size): weight for at, weight in draws}
        total = sum(drawn.values())
        edges = ((token, math.log(weight / total)) for token, weight in drawn.items())
        candidates.append(sorted(edges, key=lambda edge: (-edge[1], edge[0])))
    return candidates
