"""Trees of drafts on a causal network: a node equals its chain, and what is kept of a tree equals a recomputation."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from adapters.base import Request
from adapters.checks import CheckedStore
from adapters.mixing import MixingAdapter
from adapters.toy import TableAdapter
from adapters.transformer import TransformerAdapter
from pipeline.possible import unwanted
from samplers import CAUSAL, Attend, DecodeState, Forward, Kind, ModelFacts
from tests.forwards import dense, ids, logits, pattern, placed, request, same
from tests.models import END, random_llama

CHAIN = {"shift": 1, "attend": CAUSAL, "store": True}


@dataclass(frozen=True)
class Tree:
    """Tokens by place, place 0 the anchor; the anchor's slot is ``start``."""

    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def window(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    def path(self, place: int) -> list[int]:
        """Places from the anchor to this one."""
        return [*(self.path(self.parents[place]) if place else []), place]

    def request(self, row: int, **more: Any) -> Request:
        places = [self.start + len(self.path(place)) - 1 for place in range(len(self.tokens))]
        content = dict(zip(self.window, self.tokens))
        attend = Attend("tree", parents=self.parents)
        own = {"context": range(self.start), "variants": [content], "positions": places, "attend": attend}
        own["kind"] = Kind.VERIFY
        return request(row, self.window, **{"shift": 1, "store": True, **own, **more})

    def chain(self, tokens: list[int], place: int) -> list[int]:
        """The row as a sequence that ends with a node."""
        return [*tokens[: self.start], *(self.tokens[p] for p in self.path(place))]


def random_tree(start: int, nodes: int, seed: int) -> Tree:
    choose = random.Random(seed)
    parents = [0, *(choose.randrange(place) for place in range(1, nodes + 1))]
    return Tree(start, tuple(choose.randrange(END) for _ in parents), tuple(parents))


def target() -> TransformerAdapter:
    adapter = random_llama(causal=True)
    adapter.model.double()
    return adapter


def prefilled(adapter: TransformerAdapter, *trees: Tree) -> list[list[int]]:
    """Rows that end with the anchor, whose keys are the first that are not stored: the trees lie behind them."""
    rows = [ids(tree.start, 10 + row) for row, tree in enumerate(trees)]
    placed(adapter, *([*tokens, tree.tokens[0]] for tokens, tree in zip(rows, trees, strict=True)))
    adapter.forward([request(row, range(tree.start), **CHAIN) for row, tree in enumerate(trees)])
    return rows


TREES = [
    Tree(6, (3, 5, 7, 7, 9), (0, 0, 0, 1, 2)),  # two branches of two, some tokens alike
    Tree(6, (3, 5, 7, 9, 11), (0, 0, 1, 2, 3)),  # a chain
    Tree(8, (3, 5, 7, 9), (0, 0, 0, 0)),  # leaves alone
    Tree(7, (4,), (0,)),  # no draft
    random_tree(9, 23, 1),
    random_tree(6, 12, 2),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.parents))
def test_a_nodes_logits_equal_those_of_its_chain(tree: Tree) -> None:
    adapter = target()
    (tokens,) = prefilled(adapter, tree)
    said = logits(adapter, tree.request(0))[0]
    for place in range(len(tree.tokens)):
        chain = tree.chain(tokens, place)
        assert same(said[place], dense_last(adapter, chain), 1e-5)  # transformers' mask is in float32


def dense_last(adapter: TransformerAdapter, tokens: list[int]) -> torch.Tensor:
    return dense(adapter, tokens, pattern(CAUSAL, len(tokens)))[-1].to(adapter.model.dtype)


def chained(adapter: TransformerAdapter, tokens: list[int]) -> torch.Tensor:
    """Logits behind the last of them, from scratch, by the adapter's own causal path."""
    return adapter.logits(tokens, [len(tokens) - 1], CAUSAL)[0]


def test_trees_of_unlike_rows_share_a_forward_and_change_nothing_in_one_another() -> None:
    adapter, trees = target(), TREES[3:]
    rows = prefilled(adapter, *trees)
    together = logits(adapter, *(tree.request(row) for row, tree in enumerate(trees)))
    scratch = target()
    for tree, tokens, said in zip(trees, rows, together, strict=True):
        for place in range(len(tree.tokens)):
            assert same(said[place].float(), chained(scratch, tree.chain(tokens, place)), 1e-5)


def test_without_a_cache_a_tree_is_run_behind_nothing() -> None:
    adapter = target()
    tree = random_tree(0, 9, 4)
    placed(adapter, [tree.tokens[0]], [1, 2])
    said = logits(adapter, tree.request(0, store=False), random_tree(0, 4, 5).request(1, store=False))[0]
    for place in range(len(tree.tokens)):
        assert same(said[place].float(), chained(target(), tree.chain([], place)), 1e-5)


def test_a_tree_that_is_a_chain_equals_a_causal_window() -> None:
    adapter, tree = target(), TREES[1]
    prefilled(adapter, tree)
    said = logits(adapter, tree.request(0))[0]
    stored = [pair[0][0, :11].clone() for pair in adapter.store.layers.values()]
    prefilled(adapter, tree)
    drafts = [dict(zip(tree.window, tree.tokens))]
    (causal,) = logits(adapter, request(0, tree.window, context=range(6), variants=drafts, **CHAIN))
    assert same(said, causal, 1e-10)
    assert all(same(pair[0][0, :11], old, 1e-10) for pair, old in zip(adapter.store.layers.values(), stored))


def test_siblings_and_cousins_are_not_seen() -> None:
    """Negative control: under causal attention the same window says something else."""
    adapter, tree = target(), TREES[0]
    prefilled(adapter, tree)
    said = logits(adapter, tree.request(0))[0]
    prefilled(adapter, tree)
    wrong = logits(adapter, tree.request(0, attend=CAUSAL))[0]
    assert same(said[:2], wrong[:2], 1e-10) and not same(said[2:], wrong[2:], 1e-2)


# ------------------------------------------------------------------------------------------------------- what is kept


def test_a_kept_path_then_the_next_forward_equal_a_recomputation() -> None:
    """Three rounds on three rows at once: each keeps a random path of its tree, drafts anew, and forgets nothing."""
    adapter, choose, scratch = target(), random.Random(5), target()
    adapter.checks = True
    trees = [random_tree(6 + row, 11, 20 + row) for row in range(3)]
    rows = prefilled(adapter, *trees)
    adapter.forward([tree.request(row) for row, tree in enumerate(trees)])
    for turn in range(3):
        requests, grown = [], []
        for row, tree in enumerate(trees):
            kept = tree.path(choose.randrange(len(tree.tokens)))
            rows[row] = tree.chain(rows[row], kept[-1])
            fresh = random_tree(len(rows[row]), choose.choice([3, 8, 8]), 100 * turn + row)
            keep = [tree.start + place for place in kept]
            changed = dict(enumerate([*rows[row], fresh.tokens[0]]))
            step = fresh.request(row, keep=keep)
            requests.append(Request(row, step.forward, list(changed), list(changed.values())))
            grown.append(fresh)
        together = logits(adapter, *requests)
        for row, (tree, said) in enumerate(zip(grown, together, strict=True)):
            for place in (0, len(tree.tokens) - 1):
                assert same(said[place].float(), chained(scratch, tree.chain(rows[row], place)), 1e-5)
            assert sum(adapter.store.stored[row]) == tree.window.stop
        trees = grown
    assert isinstance(adapter.store, CheckedStore) and adapter.store.verified == 12


def test_a_path_moved_to_the_wrong_place_shows() -> None:
    """Negative control: one node of another branch among those kept."""
    adapter, tree = target(), TREES[0]
    (tokens,) = prefilled(adapter, tree)
    adapter.forward([tree.request(0)])
    row = [*tokens, 3, 7, 9]  # the anchor, then places 2 and 4
    for keep, right in (((6, 8, 10), True), ((6, 7, 10), False)):
        prefilled(adapter, tree)
        adapter.forward([tree.request(0)])
        changed = dict(enumerate([*row, 1]))
        said = logits(adapter, request(0, range(9, 10), changed, context=range(9), keep=keep, **CHAIN))[0]
        assert same(said[0].float(), chained(target(), [*row, 1]), 1e-5) is right


@pytest.mark.parametrize("parents", [(0, 0), (1, 0, 0), (0, 0, 2), (0, 2, 1), ()], ids=str)
def test_what_is_no_tree_over_its_window_is_refused(parents: tuple[int, ...]) -> None:
    facts = random_llama(causal=True).facts
    forward = Forward(range(2, 5), [3], context=range(2), attend=Attend("tree", parents=parents))
    state = DecodeState.masked([1, 2, 3], 4, facts)
    assert "as a tree over range(2, 5)" in (unwanted(forward, state, facts) or "")
    assert unwanted(replace(forward, attend=Attend("tree", parents=(0, 0, 1))), state, facts) is None


SLIPS = [
    pytest.param({"keep": (6, 8, 10)}, None, id="right"),
    pytest.param({"keep": (6, 7, 10)}, "no path of its tree", id="another branch"),
    pytest.param({"keep": (6, 8, 10), "changed": {7: 5}}, "stores keys of tokens", id="another token"),
    pytest.param({"keep": None}, "stores slots", id="nothing dropped"),
]


@pytest.mark.parametrize(("slip", "said"), SLIPS)
def test_the_checks_of_the_store_find_a_slip(slip: dict[str, Any], said: str | None) -> None:
    """The anchor 3 at slot 6, then 7 and 9 of places 2 and 4, were committed."""
    adapter, tree = target(), TREES[0]
    adapter.checks = True
    (tokens,) = prefilled(adapter, tree)
    adapter.forward([tree.request(0)])
    changed = dict(enumerate([*tokens, 3, 7, 9, 1])) | slip.get("changed", {})
    step = {**CHAIN, "kind": Kind.VERIFY, "context": range(9 if slip["keep"] else 6), "keep": slip["keep"]}
    if said is None:
        adapter.forward([request(0, range(9, 12), changed, **step)])
        return
    with pytest.raises(AssertionError, match=said):
        adapter.forward([request(0, range(9, 12), changed, **step)])


def test_the_checks_find_a_position_that_is_not_the_slots() -> None:
    adapter, tree = target(), TREES[0]
    adapter.checks = True
    (tokens,) = prefilled(adapter, tree)
    adapter.forward([tree.request(0, positions=range(6, 11))])
    changed = dict(enumerate([*tokens, 3, 7, 9, 1]))
    step = {**CHAIN, "kind": Kind.VERIFY, "context": range(9), "keep": (6, 8, 10)}
    with pytest.raises(AssertionError, match="slot 7: its keys are of position 8"):
        adapter.forward([request(0, range(9, 12), changed, **step)])


def test_the_network_of_whole_numbers_takes_trees_and_copies_as_the_real_one() -> None:
    """Each node, and each copy, bit for bit as alone; then a path is kept, and goes on as if it were all there was."""
    facts = ModelFacts(60, None, frozenset(), shift=1, attention="causal", attentions=frozenset({"causal"}))
    adapter, tree = MixingAdapter(facts), random_tree(6, 7, 3)
    tokens = [*ids(6, 1), tree.tokens[0]]

    def confidences(*requests: Request, row: list[int] = tokens) -> list[dict[int, float]]:
        adapter.open(1, 32)
        adapter.place(0, row, 0)
        adapter.forward([request(0, range(6), **CHAIN)])
        return [adapter.forward([one])[0].confidence for one in requests]

    (said,) = confidences(tree.request(0))
    chains = [tree.chain(tokens, place) for place in range(len(tree.tokens))]
    step = {**CHAIN, "context": range(6)}
    for place, chain in enumerate(chains):
        (alone,) = confidences(request(0, range(6, len(chain)), **step), row=chain)
        assert said[tree.start + place + 1] == alone[len(chain)]
    path = tree.path(max(range(len(chains)), key=lambda place: len(chains[place])))
    stop = 6 + len(path)
    row = [*tokens[:6], *(tree.tokens[place] for place in path), 5]
    behind = request(0, range(stop, stop + 1), dict(enumerate(row)), context=range(stop), **CHAIN)
    kept = replace(behind, forward=replace(behind.forward, keep=[6 + place for place in path]))
    assert confidences(tree.request(0), kept)[1] == confidences(request(0, range(6, stop), **step), behind, row=row)[1]
    copies = [{7: 1, 8: 2}, {7: 1, 8: 3}]
    together = request(0, range(6, 9), variants=copies, **{**step, "store": False})
    confidences()
    both = adapter.forward([together])[0].copies
    for own, copy in zip(copies, both, strict=True):
        assert [copy.confidence] == confidences(request(0, range(6, 9), variants=[own], **step))


def test_a_table_sees_a_tree_as_so_many_chains() -> None:
    """Logits of `TableAdapter` are by what a node sees, at its position."""
    facts = ModelFacts(4, None, frozenset({3}), shift=1, attention="causal", attentions=frozenset({"causal"}))
    heard: list[tuple[dict[int, int], int]] = []

    def table(tokens: Any, slot: int) -> list[float]:
        heard.append((dict(tokens), slot))
        return [0.0, 1.0, 2.0, 3.0]

    adapter = TableAdapter(facts, table)
    adapter.open(1, 9)
    adapter.place(0, [0, 1], 0)
    attend, positions = Attend("tree", parents=(0, 0, 0, 1)), (1, 2, 2, 3)
    content = {2: 0, 3: 1, 4: 2}
    forward = Forward(range(1, 5), [2, 5], variants=[content], positions=positions, attend=attend)
    adapter.forward([Request(0, forward, [], [])])
    assert heard == [({1: 1}, 2), ({1: 1, 2: 0}, 3), ({1: 1, 2: 1}, 3), ({1: 1, 2: 0, 3: 2}, 4)]
