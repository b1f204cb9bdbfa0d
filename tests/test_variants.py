"""Several contents of one window in one forward, and what a tree or a draft needs besides: each equals its own run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.base import Request, group_key
from adapters.transformer import TransformerAdapter
from samplers import CAUSAL, FULL, Attend, Forward, Law, Prediction
from tests.forwards import ids, logits, placed, request, same
from tests.models import MASK, random_llama

BLOCKS = Attend("blocks", 0, 4)
VARIANTS: tuple[dict[int, int], ...] = ({}, {9: 3}, {9: 3, 10: 4}, {8: 5, 11: MASK})


def exact(causal: bool = False) -> TransformerAdapter:
    adapter = random_llama(causal)
    adapter.model.double()
    return adapter


def prepared(adapter: TransformerAdapter, context: range, attend: Attend, rows: int = 1) -> TransformerAdapter:
    """Rows of 16 slots of which the context is stored; it may run over the window, as the dual cache's does."""
    placed(adapter, *(ids(16, row) for row in range(rows)))
    shift = adapter.facts.shift
    if context:
        whole = range(context.stop)
        adapter.forward([request(row, whole, shift=shift, store=True, attend=attend) for row in range(rows)])
    return adapter


def shown(tokens: list[int], content: dict[int, int]) -> dict[int, int]:
    return {slot: content.get(slot, tokens[slot]) for slot in range(8, 12)}


USES = [
    pytest.param(False, range(0), range(16), FULL, id="no cache"),
    pytest.param(False, range(8), range(8, 12), FULL, id="prefix cache"),
    pytest.param(False, range(16), range(8, 12), FULL, id="dual cache"),
    pytest.param(False, range(2, 6), range(8, 12), FULL, id="gap"),
    pytest.param(False, range(8), range(8, 12), BLOCKS, id="block cache"),
    pytest.param(False, range(4), range(4, 12), BLOCKS, id="two blocks"),
    pytest.param(True, range(8), range(8, 12), CAUSAL, id="causal"),
]


@pytest.mark.parametrize(("causal", "context", "window", "attend"), USES)
def test_variants_in_one_forward_equal_a_forward_each(
    causal: bool, context: range, window: range, attend: Attend
) -> None:
    adapter = prepared(exact(causal), context, attend, rows=2)
    more: dict[str, Any] = {"shift": adapter.facts.shift, "context": context, "attend": attend}
    apart = [
        [logits(adapter, request(row, window, shown(ids(16, row), content), **more))[0] for content in VARIANTS]
        for row in (0, 1)
    ]
    prepared(adapter, context, attend, rows=2)
    kept = [[tensor.clone() for tensor in pair] for pair in adapter.store.layers.values()]
    alone = request(0, window, variants=VARIANTS, **more)
    together = [alone, request(1, window, variants=VARIANTS[2:], **more)]
    heard = heard_by_member(adapter, [alone])
    assert all(same(a, b, 1e-10) for a, b in zip(heard, apart[0], strict=True))
    heard = heard_by_member(adapter, together)
    assert all(same(a, b, 1e-10) for a, b in zip(heard, apart[0] + apart[1][2:], strict=True))
    for pair, old in zip(adapter.store.layers.values(), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, old, strict=True))
    assert adapter.canvas[:, :16].tolist() == [ids(16, 0), ids(16, 1)]


def heard_by_member(adapter: TransformerAdapter, requests: list[Request]) -> list[torch.Tensor]:
    heard: list[torch.Tensor] = []
    hook = adapter.head_module.register_forward_hook(lambda module, given, said: heard.append(said.clone()))
    adapter.forward(requests)
    hook.remove()
    return list(torch.cat(heard).split([len(r.forward.want) for r in requests for _ in r.forward.variants]))


def test_windows_of_unlike_length_and_number_of_variants_share_a_forward() -> None:
    adapter = prepared(exact(), range(8), FULL, rows=3)
    windows = [range(8, 12), range(8, 11), range(7, 12)]
    variants = [[{9: k, windows[row][-1]: k + 20} for k in range(count)] for row, count in enumerate((3, 1, 2))]
    steps = [request(row, windows[row], context=range(7), variants=variants[row]) for row in range(3)]
    apart = [said for step in steps for said in heard_by_member(adapter, [step])]
    together = heard_by_member(adapter, steps)
    assert all(same(a, b, 1e-10) for a, b in zip(together, apart, strict=True))


def test_each_copy_has_a_prediction_and_draws_with_a_number_of_its_own() -> None:
    adapter = prepared(exact(), range(8), FULL, rows=2)
    law, window = Law(0.8), range(8, 12)
    plain = {"law": law, "context": range(8), "ask": frozenset({"entropy"})}
    several = [request(row, window, variants=[{9: 3}] * 3, draw=5, **plain) for row in (1, 0)]
    said = adapter.forward(several)
    for step, prediction in zip(several, said, strict=True):
        assert len(prediction.copies) == 3 and prediction.token == prediction.copies[0].token
        for k, copy in enumerate(prediction.copies):
            one = replace(step.forward, variants=[{9: 3}], draw=5 + k)
            (expected,) = adapter.forward([Request(step.row, one, [], [])])
            assert not expected.copies and like(copy, expected)
    assert len({tuple(copy.token.values()) for copy in said[0].copies}) > 1


def like(a: Prediction, b: Prediction) -> bool:
    assert a.entropy is not None and b.entropy is not None
    near = all(abs(a.confidence[s] - b.confidence[s]) + abs(a.entropy[s] - b.entropy[s]) < 1e-9 for s in a.positions)
    return a.token == b.token and near


def test_a_single_variant_is_stored_and_may_lie_behind_the_row() -> None:
    """A row of 12 slots, and drafts at 12 and 13, which the row does not have."""
    adapter, tokens = exact(causal=True), ids(14, 3)
    step: dict[str, Any] = {"shift": 1, "attend": CAUSAL, "store": True}
    placed(adapter, tokens)
    adapter.forward([request(0, range(8), **step)])
    expected = logits(adapter, request(0, range(8, 14), context=range(8), **step))[0]
    kept = [pair[0][:, :14].clone() for pair in adapter.store.layers.values()]
    placed(adapter, tokens[:12])
    adapter.forward([request(0, range(8), **step)])
    drafts = {slot: tokens[slot] for slot in range(9, 14)}
    said = logits(adapter, request(0, range(8, 14), context=range(8), variants=[drafts], **step))[0]
    assert same(said, expected, 1e-10)
    for pair, old in zip(adapter.store.layers.values(), kept, strict=True):
        assert same(pair[0][:, :14], old, 1e-10)
    assert adapter.canvas[0, 12:].eq(0).all()


def test_a_kept_path_is_moved_once_whatever_the_number_of_copies() -> None:
    adapter = prepared(exact(), range(16), FULL)
    before = [pair[0].clone() for pair in adapter.store.layers.values()]
    adapter.forward([request(0, range(8, 10), context=range(8), keep=(7, 9, 8), variants=[{}, {8: 1}])])
    for pair, old in zip(adapter.store.layers.values(), before, strict=True):
        assert torch.equal(pair[0][0, :8], old[0, [0, 1, 2, 3, 4, 7, 9, 8]])


def test_what_is_only_read_in_several_copies_and_what_is_stored_do_not_share_a_call() -> None:
    window = range(8, 12)
    plain, stored = Forward(window, context=range(8)), Forward(window, context=range(8), store=window)
    copies = replace(plain, variants=[{8: 1}, {8: 2}])
    assert group_key(plain) == group_key(stored) == group_key(replace(stored, variants=[{8: 1}]))
    assert group_key(copies) == group_key(replace(plain, variants=[{8: 1}])) != group_key(stored)


def test_positions_of_a_windows_own_turn_its_keys() -> None:
    """Three slots behind the row, told to stand at 4, 5 and 6, equal those slots."""
    adapter, tokens = exact(causal=True), ids(7, 3)
    step: dict[str, Any] = {"shift": 1, "attend": CAUSAL, "store": True, "context": range(4)}
    placed(adapter, tokens, ids(9, 4))
    adapter.forward([request(row, range(4), **{**step, "context": range(0)}) for row in (0, 1)])
    expected = logits(adapter, request(0, range(4, 7), **step))[0]
    drafts = [dict(zip(range(10, 13), tokens[4:]))]
    moved = request(0, range(10, 13), variants=drafts, positions=(4, 5, 6), **step)
    other = request(1, range(4, 8), **step)  # told nothing, and longer
    alone, beside = logits(adapter, other)[0], logits(adapter, moved, other)
    assert same(beside[0], expected, 1e-10) and same(beside[1], alone, 1e-10)
    (plain,) = logits(adapter, request(0, range(10, 13), variants=drafts, **step))
    assert not same(plain, expected, 1e-2)
