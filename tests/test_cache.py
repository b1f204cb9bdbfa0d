"""The store of keys and values: what is stored is read, what is only read is left alone, and nothing is copied."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.base import Request
from adapters.cache import Move
from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.transformer import TransformerAdapter
from samplers import CAUSAL, FULL, Attend
from tests.forwards import dense, ids, logits, pattern, placed, request, same
from tests.models import random_llama
from tests.shared import shared

CPU = torch.device("cpu")


def held(adapter: TransformerAdapter) -> list[torch.Tensor]:
    """Keys and values of all stored slots."""
    rows = [torch.tensor(list(stored), dtype=torch.bool) for stored in adapter.store.stored]
    layers = adapter.store.layers.values()
    return [tensor[row, :-1][mask] for pair in layers for tensor in pair for row, mask in enumerate(rows)]


def test_prefix_and_dual_cache_give_the_authors_logits() -> None:
    """golden/README.md section 1: the cache comes from a full forward; then some tokens change."""
    golden = load_file(shared("golden", "llada", "forward.safetensors"))
    before, after = golden["ids"][0].tolist(), golden["ids_after"][0].tolist()
    changed = {slot: token for slot, token in enumerate(after) if token != before[slot]}
    assert changed
    adapter = load(describe(ModelOptions("golden", path=str(shared("golden", "llada", "model")))), CPU)
    assert isinstance(adapter, TransformerAdapter)
    for window, context, store, name in (
        (range(21, 44), range(21), False, "prefix_logits"),
        (range(21, 29), range(44), True, "dual_logits"),
        (range(21, 29), range(44), False, "dual_logits"),
    ):
        placed(adapter, before)
        assert same(logits(adapter, request(0, range(44), store=True))[0], golden["logits"][0], 1e-5)
        assert torch.equal(adapter.store.layers[0][1][:, :44].transpose(1, 2), golden["cache_v0"])
        said = logits(adapter, request(0, window, changed, context=context, store=store))[0]
        assert same(said, golden[name][0], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(12, 12), (14, 11), (9, 12)])
def test_reading_the_cache_without_writing_equals_writing_and_leaves_it_as_it_was(
    causal: bool, lengths: tuple[int, int]
) -> None:
    """Windows of 4 slots behind prefixes of equal and of different length, alone and together."""
    rows, shift = [ids(length, length) for length in lengths], int(causal)
    attend = CAUSAL if causal else FULL

    def steps(store: bool) -> list[Request]:
        windows = [range(length - 4, length) for length in lengths]
        return [
            request(i, w, {w.start + 1: 3}, shift, context=range(w.start), store=store, attend=attend)
            for i, w in enumerate(windows)
        ]

    adapter = random_llama(causal)

    def prefilled() -> TransformerAdapter:
        placed(adapter, *rows)
        prefixes = [range(length - 4) for length in lengths]
        adapter.forward([request(i, p, shift=shift, store=True, attend=attend) for i, p in enumerate(prefixes)])
        return adapter

    alone = [logits(prefilled(), step)[0] for step in steps(store=True)]
    cache = held(prefilled())
    reading = logits(adapter, *steps(store=False))
    assert all(torch.equal(a, b) for a, b in zip(held(adapter), cache))
    writing = logits(prefilled(), *steps(store=True))
    assert [len(tensor) for tensor in held(adapter)[:2]] == list(lengths)
    for i in (0, 1):
        assert same(reading[i], alone[i]) and same(writing[i], alone[i])


def test_windows_of_different_length_read_the_cache_alike_alone_and_padded() -> None:
    adapter, rows = random_llama(), [ids(16, 1), ids(15, 2)]
    windows = [range(8, 16), range(9, 15)]
    for store in (False, True):
        for attend in (FULL, Attend("blocks", 8, 3)):
            steps = [request(i, w, context=range(8), store=store, attend=attend) for i, w in enumerate(windows)]
            said = []
            for group in ([steps[0]], [steps[1]], steps):
                placed(adapter, *rows)
                adapter.forward([request(i, range(8), store=True) for i in (0, 1)])
                said.append(logits(adapter, *group))
            assert same(said[2][0], said[0][0]) and same(said[2][1], said[1][0])


def test_cached_causal_steps_equal_one_dense_pass() -> None:
    adapter, tokens = random_llama(causal=True), ids(14, 5)
    placed(adapter, tokens)
    expected = dense(adapter, tokens, pattern(CAUSAL, 14))
    for window in (range(5), range(5, 6), range(6, 10), range(10, 14)):
        context = range(window.start)
        said = logits(adapter, request(0, window, shift=1, context=context, store=True, attend=CAUSAL))[0]
        assert same(said, expected[window.start : window.stop])


def test_only_the_context_is_visible_besides_the_window() -> None:
    """Cached slots outside the context must not matter, whether before it or behind it."""
    adapter = random_llama()
    for spoilt in (range(3), range(9, 12)):
        said = []
        for value in (1, 2):
            tokens = ids(16, 6)
            for slot in spoilt:
                tokens[slot] = value
            placed(adapter, tokens)
            for slot in range(16):
                adapter.forward([request(0, range(slot, slot + 1), store=True)])
            said.append(logits(adapter, request(0, range(12, 16), context=range(3, 9)))[0])
        assert torch.equal(*said)


def test_a_reused_row_never_sees_the_old_sequences_keys() -> None:
    adapter = random_llama(causal=True)
    long, short = ids(20, 1), ids(6, 2)

    def decode_short() -> torch.Tensor:
        adapter.forward([request(0, range(5), shift=1, store=True, attend=CAUSAL)])
        step = request(0, range(5, 6), shift=1, context=range(5), store=True, attend=CAUSAL)
        other = request(1, range(19, 20), shift=1, context=range(19), store=True, attend=CAUSAL)
        return logits(adapter, step, other)[0]  # beside a longer row, so that reads reach the old slots

    placed(adapter, short, long)
    adapter.forward([request(1, range(19), shift=1, store=True, attend=CAUSAL)])
    fresh = decode_short()
    placed(adapter, long, long)
    adapter.forward([request(row, range(19), shift=1, store=True, attend=CAUSAL) for row in (0, 1)])
    adapter.place(0, short, 0)
    assert all((tensor[0] == 0).all() for pair in adapter.store.layers.values() for tensor in pair)
    assert torch.equal(decode_short(), fresh)


# ---------------------------------------------------------------------------------------------- exact or approximate


@pytest.mark.parametrize("attend", [Attend("blocks", 0, 4), Attend("blocks", 6, 4)], ids=str)
def test_cached_block_causal_decoding_equals_recomputation(attend: Attend) -> None:
    """Each block is denoised against the cache, then stored: no later token can change what was kept."""
    adapter, tokens = random_llama(), ids(22, 5)
    placed(adapter, tokens)
    expected = dense(adapter, tokens, pattern(attend, 22))
    edges = sorted({0, *range(attend.first, 22, attend.size), 22})
    for start, stop in pairwise(edges):
        window = {"window": range(start, stop), "context": range(start), "attend": attend}
        adapter.forward([request(0, changed={start: 1}, **window)])  # a step that only reads, of other tokens
        said = logits(adapter, request(0, changed={start: tokens[start]}, store=True, **window))[0]
        assert same(said, expected[start:stop])


def test_under_full_attention_stored_keys_are_an_approximation() -> None:
    adapter, tokens = placed(random_llama(), ids(16, 1)), ids(16, 1)
    adapter.forward([request(0, range(16), store=True)])
    said = logits(adapter, request(0, range(8, 12), {9: 3}, context=range(16)))[0]
    exact = dense(adapter, [*tokens[:9], 3, *tokens[10:]], pattern(FULL, 16))[8:12]
    assert not same(said, exact, 1e-2)


# ---------------------------------------------------------------------------------------------------------- operations


def test_a_part_of_a_window_is_stored_and_the_rest_left_as_it_was() -> None:
    adapter = placed(random_llama(), ids(16, 1), ids(16, 2))
    adapter.forward([request(row, range(12), store=True) for row in (0, 1)])
    before = [pair[0].clone() for pair in adapter.store.layers.values()]
    said = logits(adapter, request(1, range(8, 14), {9: 3, 10: 4}, context=range(8), store=range(9, 11)))[0]
    assert adapter.store.stored[1] == bytes([1] * 12 + [0] * 52)
    for pair, old in zip(adapter.store.layers.values(), before, strict=True):
        changed = (pair[0] != old).any(-1).any(-1)[:, :12].nonzero().tolist()
        assert changed == [[1, 9], [1, 10]]
    adapter.forward([request(1, range(8, 14), context=range(8), store=range(12, 14))])
    assert adapter.store.stored[1] == bytes([1] * 14 + [0] * 50)
    assert same(said, logits(adapter, request(1, range(8, 14), context=range(8)))[0], 1e-5)


def test_rows_that_store_and_rows_that_only_read_share_a_call() -> None:
    def prepared() -> TransformerAdapter:
        placed(adapter, ids(16, 1), ids(16, 2), ids(16, 3))
        adapter.forward([request(row, range(14), store=True) for row in (0, 1, 2)])
        return adapter

    adapter, window = random_llama(), range(8, 12)
    stores = (window, range(0), range(9, 11))
    steps = [request(row, window, {9: 3}, context=range(8), store=stores[row]) for row in (0, 1, 2)]
    alone = [logits(prepared(), step)[0] for step in steps]
    together = logits(prepared(), *steps)
    kept = held(adapter)
    assert all(same(a, b, 1e-5) for a, b in zip(alone, together, strict=True))
    for row, step in enumerate(steps):
        prepared().forward([step])
        assert all(same(a, b, 1e-5) for a, b in zip(held(adapter)[row::3], kept[row::3], strict=True))


def test_a_context_that_was_never_stored_is_our_own_mistake() -> None:
    adapter = placed(random_llama(), ids(16, 1))
    adapter.forward([request(0, range(8), store=range(6))])
    with pytest.raises(AssertionError, match="never stored"):
        adapter.forward([request(0, range(8, 12), context=range(8))])
    adapter.forward([request(0, range(6, 12), context=range(6), store=True)])
    adapter.store.drop(0, 7)
    with pytest.raises(AssertionError, match="never stored"):
        adapter.forward([request(0, range(10, 12), context=range(10))])
    adapter.forward([request(0, range(7, 12), context=range(7))])
    adapter.place(0, ids(16, 2), 0)
    with pytest.raises(AssertionError, match="never stored"):
        adapter.forward([request(0, range(7, 12), context=range(7))])


def test_a_kept_path_closes_up_and_the_rest_is_dropped() -> None:
    """Slots 6, 9 and 8 are kept, in this order, and end where the next window begins; row 0 is not touched."""
    adapter = placed(random_llama(), ids(16, 1), ids(16, 2))
    adapter.forward([request(row, range(12), store=True) for row in (0, 1)])
    before = [[tensor.clone() for tensor in pair] for pair in adapter.store.layers.values()]
    adapter.forward([request(1, range(8, 10), context=range(8), keep=(6, 9, 8))])
    for pair, old in zip(adapter.store.layers.values(), before, strict=True):
        for now, then in zip(pair, old, strict=True):
            assert torch.equal(now[1, :8], then[1, [0, 1, 2, 3, 4, 6, 9, 8]])
            assert torch.equal(now[0, :12], then[0, :12])
    assert adapter.store.stored[1] == bytes([1] * 8 + [0] * 56) and sum(adapter.store.stored[0]) == 12


def test_a_crop_moves_nothing_and_decoding_goes_on_from_it() -> None:
    """Five drafts are stored, two accepted: what follows equals a decoding that never saw the other three."""
    adapter, tokens = random_llama(causal=True), ids(14, 5)
    step = {"shift": 1, "attend": CAUSAL, "store": True}
    placed(adapter, tokens)
    adapter.forward([request(0, range(6), **step)])
    drafts = dict.fromkeys(range(8, 11), 7)
    adapter.forward([request(0, range(6, 11), drafts, context=range(6), **step)])
    back = {slot: tokens[slot] for slot in drafts}
    for keep in ((6, 7), ()):
        said = logits(adapter, request(0, range(8, 12), back, context=range(8), keep=keep, **step))[0]
        assert same(said, dense(adapter, tokens, pattern(CAUSAL, 14))[8:12])
    with pytest.raises(AssertionError, match="did not store"):
        adapter.store.keep([Move(0, (12,), 12)])


def test_paths_of_several_rows_close_up_at_once_from_slots_behind_the_rows() -> None:
    """Moves that overlap, a crop that moves nothing, one to nothing, and a row that keeps all; rows of 8 slots."""
    adapter = placed(random_llama(), *(ids(8, row) for row in range(4)), slots=20)
    spare = {slot: 2 * slot for slot in range(8, 20)}
    steps = [request(row, range(20), variants=[spare], store=True) for row in range(4)]
    adapter.forward(steps)
    before = [[tensor.clone() for tensor in pair] for pair in adapter.store.layers.values()]
    paths = [(10, 12, 11, 19), (6, 7, 8), (), None]
    starts = [12, 9, 7, 12]
    adapter.forward(
        [
            request(row, range(start, start + 1), context=range(start), keep=keep)
            for row, (start, keep) in enumerate(zip(starts, paths, strict=True))
        ]
    )
    kept = [[*range(8), 10, 12, 11, 19], list(range(9)), list(range(7)), list(range(20))]
    for row, slots in enumerate(kept):
        assert adapter.store.stored[row] == bytes([1] * len(slots) + [0] * (20 - len(slots)))
        for pair, old in zip(adapter.store.layers.values(), before, strict=True):
            for now, then in zip(pair, old, strict=True):
                assert torch.equal(now[row, : len(slots)], then[row, slots])


# ----------------------------------------------------------------------------------------------------- bytes moved

HEAD = 24  # a size that no other axis has


class Moved(TorchDispatchMode):
    """Adds up the bytes that operations write: fresh outputs, and what in-place ones are given."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.heads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # composite operations, attention above all, are looked into
            parts = function.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        output = function(*args, **(kwargs or {}))
        if not function.is_view:
            for tensor in written(function, args, output):
                self.all += bytes_of(tensor)
                self.heads += bytes_of(tensor) * (HEAD in tensor.shape)
        return output


def written(function: Any, args: Any, output: Any) -> list[torch.Tensor]:
    if function._schema.is_mutable:  # what it is given, or, if it is given nothing, the view it fills
        given = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        return [max(given, key=bytes_of)] if given else [args[0]]
    outputs = output if isinstance(output, (list, tuple)) else [output]
    return [tensor for tensor in outputs if isinstance(tensor, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def moved(adapter: TransformerAdapter, cached: int, rows: list[int], use: str) -> Moved:
    """A step of a window of 4 behind ``cached`` stored slots."""
    causal, tokens = adapter.facts.shift == 1, ids(cached + 8, 1)
    more: dict[str, Any] = {"shift": int(causal), "attend": CAUSAL if causal else FULL}
    placed(adapter, *[tokens] * 5, slots=cached + 16)
    ragged = use == "unlike lengths"
    for row in range(5):
        adapter.forward([request(row, range(cached + 8 - (row if ragged else 0)), store=True, **more)])
    steps = []
    for row in rows:
        start = cached - (row if ragged else 0)
        window = range(start, start + (1 if causal else 4))
        context = range(window.stop + 4) if use == "overwritten" else range(2 * (use == "masked"), start)
        store = use in ("stored", "overwritten")
        steps.append(request(row, window, context=context, store=store, **more))
    with Moved() as counted:
        adapter.forward(steps)
    return counted


@pytest.mark.parametrize("use", ["read", "stored", "overwritten", "unlike lengths", "masked"])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3], [1, 3, 4], [4, 0, 2]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_step_moves_bytes_by_its_window_never_by_the_cache(causal: bool, rows: list[int], use: str) -> None:
    """All bytes, or, where a mask is needed, all that have the shape of heads."""
    adapter = random_llama(causal, head_dim=HEAD, max_position_embeddings=1024)
    short, long = (moved(adapter, cached, rows, use) for cached in (32, 512))
    assert short.heads > 0 and long.heads == short.heads
    if use != "masked":
        assert long.all == short.all
