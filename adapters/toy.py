"""Models without weights: the deterministic toy of the sketch, and a table of logits for tests worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from adapters.base import DeviceAdapter, Group
from adapters.text import IdCodec
from samplers import Forward, ModelFacts

CPU = torch.device("cpu")
ANY_ATTENTION = frozenset({"full", "blocks", "causal", "tree"})


class LogitsAdapter(DeviceAdapter):
    """Base of models whose "hidden state" already is the row of logits; without embeddings, mixtures go unseen."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class ToyMaskedLMAdapter(LogitsAdapter):
    """Predicts ``3 + slot % (vocab_size - 3)`` everywhere; a decided slot also likes what it holds.

    Validates sampler mechanics without weights; no answer of it is ever right.
    """

    def __init__(self, vocab_size: int = 128, mask_id: int = 0, end_id: int = 2) -> None:
        facts = ModelFacts(vocab_size, mask_id, frozenset({end_id}), attentions=ANY_ATTENTION)
        super().__init__(facts, IdCodec(vocab_size), CPU)
        self.mask_id = mask_id

    def hidden(self, group: Group) -> torch.Tensor:
        vocabulary = self.facts.vocab_size
        logits = torch.full((*group.ids.shape, vocabulary), -8.0)
        target = 3 + group.rotary % (vocabulary - 3)
        logits.scatter_(-1, target[..., None], 6.25)
        held = torch.where(group.ids.eq(self.mask_id), target, group.ids)
        liked = logits.gather(-1, held[..., None]).clamp(min=5.75)
        return logits.scatter_(-1, held[..., None], liked)


class TableAdapter(LogitsAdapter):
    """Logits by rule: ``table(tokens, slot)`` returns a row, given the window's ids by slot.

    A node of a tree is given what it sees of the window, by position, as if it stood in a chain.
    ``table`` may be a mapping from slot to row instead, for predictions that never change. `calls` counts the calls of
    `forward` rows, so that a test can hold the engine's count against what was really run.
    """

    def __init__(
        self,
        facts: ModelFacts,
        table: Callable[[Mapping[int, int], int], Sequence[float]] | Mapping[int, Sequence[float]],
    ) -> None:
        super().__init__(facts, IdCodec(facts.vocab_size), CPU)
        self.table = table if callable(table) else lambda tokens, slot: table[slot]
        self.calls = 0

    def hidden(self, group: Group) -> torch.Tensor:
        self.calls += len(set(group.lines))  # copies of a window are one
        logits = torch.zeros(*group.ids.shape, self.facts.vocab_size)
        for b, forward in enumerate(group.forwards):
            for w, tokens in enumerate(_seen(forward, group.ids[b].tolist())):
                slot = int(group.rotary[b, w]) + self.facts.shift
                logits[b, w] = torch.tensor(self.table(tokens, slot))
        return logits


def _seen(forward: Forward, ids: list[int]) -> list[dict[int, int]]:
    """What each slot of the window is shown of it, by position."""
    positions = list(forward.window if forward.positions is None else forward.positions)
    if forward.attend is None or forward.attend.pattern != "tree":
        return [dict(zip(positions, ids))] * len(positions)
    seen: list[dict[int, int]] = []
    for place, parent in enumerate(forward.attend.parents):  # parents come first
        seen.append({**(seen[parent] if place else {}), positions[place]: ids[place]})
    return seen
