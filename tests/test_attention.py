"""Every pattern is computed exactly, by the cheapest kernel that can."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import attention
from adapters.base import Request
from adapters.description import describe
from adapters.loading import load
from adapters.places import TINY, ModelOptions
from adapters.transformer import TransformerAdapter
from adapters.visibility import kernel_serves
from pipeline.engine import Engine, Task
from samplers import CAUSAL, FULL, Attend, AutoregressiveSampler
from tests.forwards import dense, ids, logits, pattern, placed, request, same
from tests.models import random_llama

CPU = torch.device("cpu")
PATTERNS = [FULL, Attend("blocks", 0, 4), Attend("blocks", 5, 4), Attend("blocks", 7, 3), Attend("blocks", 0, 32)]


@pytest.mark.parametrize("attend", [*PATTERNS, CAUSAL], ids=str)
def test_every_pattern_equals_a_dense_mask_alone_and_in_a_padded_group(attend: Attend) -> None:
    adapter = random_llama(causal=attend is CAUSAL)
    rows = [ids(18, 1), ids(15, 2), ids(18, 3)]
    placed(adapter, *rows)
    shift = adapter.facts.shift
    expected = [dense(adapter, row, pattern(attend, len(row))) for row in rows]
    requests = [request(i, range(len(row)), shift=shift, attend=attend) for i, row in enumerate(rows)]
    for i, one in enumerate(requests):
        assert same(logits(adapter, one)[0], expected[i])
    for group in (requests, requests[:2], requests[1:]):
        for one, said in zip(group, logits(adapter, *group)):
            assert same(said, expected[one.row])


def test_each_row_of_a_group_has_its_own_block_edges() -> None:
    adapter = placed(random_llama(), ids(16, 1), ids(16, 2))
    attends = [Attend("blocks", 3, 4), Attend("blocks", 6, 5)]
    said = logits(adapter, *(request(i, range(16), attend=attend) for i, attend in enumerate(attends)))
    for i, attend in enumerate(attends):
        assert same(said[i], dense(adapter, ids(16, i + 1), pattern(attend, 16)))


def test_the_common_paths_build_no_mask() -> None:
    full, causal = placed(random_llama(), *rows_of(12, 12, 9)), placed(random_llama(True), *rows_of(12, 9, 12))
    built = attention.masks_built
    full.forward([request(0, range(12)), request(1, range(12)), request(2, range(9))])
    one_block = {"attend": Attend("blocks", 0, 16)}
    full.forward([request(0, range(12), **one_block), request(1, range(12), **one_block)])
    full.forward([request(row, range(12), store=True) for row in (0, 1)])
    full.forward([request(row, range(8, 12), context=range(8)) for row in (0, 1)])  # prefix cache
    full.forward([request(row, range(4, 8), context=range(12), store=True) for row in (0, 1)])  # dual cache
    block = {"attend": Attend("blocks", 0, 4), "store": True}
    full.forward([request(row, range(4, 8), context=range(4), **block) for row in (1, 0)])
    full.forward(
        [request(0, range(8, 12), context=range(8), **block), request(1, range(4, 7), context=range(4), **block)]
    )
    causal.forward([request(row, range(8 - row), shift=1, attend=CAUSAL) for row in (0, 1, 2)])
    causal.forward([request(row, range(8 - row), shift=1, attend=CAUSAL, store=True) for row in (0, 1, 2)])  # prefill
    step = {"shift": 1, "attend": CAUSAL, "store": True}
    causal.forward([request(row, range(8 - row, 9 - row), context=range(8 - row), **step) for row in (2, 0)])
    assert attention.masks_built == built
    full.forward([request(row, range(8, 12), context=range(4)) for row in (0, 1)])  # a gap before the window
    full.forward([request(0, range(12), attend=Attend("blocks", 0, 4))])
    causal.forward([request(0, range(9, 12), context=range(9), **step)])
    assert attention.masks_built == built + 3


def rows_of(*lengths: int) -> list[list[int]]:
    return [ids(length, seed) for seed, length in enumerate(lengths)]


def test_causal_decoding_equals_transformers_generate_token_for_token() -> None:
    adapter = load(describe(ModelOptions("tiny_ar", path="tiny/ar")), CPU)
    texts = ["Tom has 4 bags of 6 pens. He loses 5. How many pens now?", "Anna", "9 + 33 =", "ümläute 🎈 and 7 pens?"]
    prompts = [adapter.codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
    theirs = AutoModelForCausalLM.from_pretrained(TINY / "ar", dtype=torch.float32).eval()
    for sampler in (AutoregressiveSampler(), AutoregressiveSampler(cache="none")):
        tasks = [Task(i, prompt, 40) for i, prompt in enumerate(prompts)]
        for outcome in Engine(adapter, sampler, max_rows=3).decode(tasks, 160):
            prompt, state = outcome.task.prompt, outcome.state
            generated = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
            assert state is not None and generated == state.tokens[: len(generated)]
            assert len(generated) - len(prompt) == outcome.counts()["nfe"]


# ------------------------------------------------------------------------------------------- a row among longer ones

WINDOWS = {0: range(7, 11), 2: range(8, 12), 3: range(9, 12), 4: range(12, 16)}  # by row: five rows, one of them idle
USES = ("no cache", "read", "stored", "partly stored", "overwritten", "overwritten unstored", "gap")


def prefilled(adapter: TransformerAdapter, attend: Attend, use: str) -> list[Request]:
    """Rows as a use of the cache finds them, and the step each then takes."""
    shift = adapter.facts.shift
    placed(adapter, *rows_of(14, 8, 17, 15, 20), slots=32)
    if use == "no cache":
        return [request(row, range(window.stop + 1), shift=shift, attend=attend) for row, window in WINDOWS.items()]
    whole = use.startswith("overwritten")
    contexts = {row: range(window.stop + 2 if whole else window.start) for row, window in WINDOWS.items()}
    adapter.forward([request(r, c, shift=shift, store=True, attend=attend) for r, c in contexts.items()])
    if use == "gap":
        contexts = {row: range(1, window.start - 2) for row, window in WINDOWS.items()}
    return [
        request(row, w, {w.start + 1: 3}, shift, attend=attend, context=contexts[row], store=kept(use, w))
        for row, w in WINDOWS.items()
    ]


def kept(use: str, window: range) -> range:
    return {"stored": window, "overwritten": window, "partly stored": window[1:2]}.get(use, range(0))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("attend", [FULL, CAUSAL, Attend("blocks", 0, 4), Attend("blocks", 5, 3)], ids=str)
def test_a_row_alone_equals_the_same_row_beside_longer_ones(attend: Attend, use: str) -> None:
    """Equal tokens and logits within 1e-5, for every pattern and use of the cache, unordered rows among idle ones.

    Weights are in float64 for the logits: in float32 such sharp ones turn rounding into more than that.
    """
    adapter = random_llama(causal=attend is CAUSAL)
    for dtype, tolerance in ((torch.float32, 5e-5), (torch.float64, 1e-5)):
        adapter.model.to(dtype)
        together = logits(adapter, *reversed(prefilled(adapter, attend, use)))[::-1]
        tokens = [said.token for said in adapter.forward(prefilled(adapter, attend, use))]
        for i in range(len(WINDOWS)):
            assert same(together[i], logits(adapter, prefilled(adapter, attend, use)[i])[0], tolerance)
            assert adapter.forward([prefilled(adapter, attend, use)[i]])[0].token == tokens[i]


# ------------------------------------------------------------------------------------------ the variable-length kernel


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the docstring of `torch.nn.attention.varlen.varlen_attn` promises, sequence by sequence; flash kernels are
    causal from the bottom right, and take single queries of grouped heads for one a sequence."""
    assert seqused_k is not None and {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    queries, keys, used = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist(), seqused_k.tolist()
    assert len(queries) == len(keys) == len(used) and cu_seq_q[0] == cu_seq_k[0] == 0
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    assert max(queries) <= max_q and max(used) <= max_k and all(u <= k for u, k in zip(used, keys, strict=True))
    assert not (max_q == 1 and groups > 1) or len(query) == len(queries)
    output = torch.full_like(query, torch.nan)
    for start, first, q, k in zip(cu_seq_q.tolist(), cu_seq_k.tolist(), queries, used):
        own, other = (t[first : first + k].repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + q], own) * (scale or query.shape[2] ** -0.5)
        if window_size == (-1, 0):
            hidden = torch.ones(q, k, dtype=torch.bool).triu(1 + k - q)
            scores = scores.masked_fill(hidden, -torch.inf)
        output[start : start + q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), other)
    return output


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The kernel's double in its place; hears whether each call was causal."""
    calls: list[bool] = []

    def spy(*tensors: Any, **more: Any) -> torch.Tensor:
        calls.append(more["window_size"] == (-1, 0))
        return plain_varlen(*tensors, **more)

    monkeypatch.setattr(attention, "varlen_attn", spy)
    return calls


@torch.inference_mode()
def poison(adapter: TransformerAdapter) -> None:
    """Slots never stored hold no number: whoever reads one is found out."""
    for row, stored in enumerate(adapter.store.stored):
        empty = torch.tensor([*stored, 0], dtype=torch.bool).logical_not()
        for pair in adapter.store.layers.values():
            for tensor in pair:
                tensor[row, empty] = torch.nan


def random_steps(adapter: TransformerAdapter, choose: random.Random) -> Callable[[], list[Request]]:
    """A group of random rows, windows, contexts and stores, as a function that prepares the store for it again."""
    rows = choose.sample(range(6), choose.randint(1, 5))
    attend = CAUSAL if adapter.facts.shift else choose.choice([FULL, Attend("blocks", 0, 8)])
    width, behind, store = choose.choice([1, 1, 4, 7]), choose.random() < 0.3 and attend is FULL, choose.random()
    cached, steps = choose.random() < 0.8, []
    for row in rows:
        start, length = 8 * choose.randint(1, 3), max(1, width - choose.choice([0, 0, 1]))
        window = range(start, start + length) if cached else range(length)
        context = range(window.stop + 3 if behind else start) if cached else range(0)
        kept = window if store < 0.4 else window[: choose.randint(0, length)]
        steps.append((row, window, context, kept))

    def prepare() -> list[Request]:
        placed(adapter, *rows_of(*[40] * 6))
        more = {"shift": adapter.facts.shift, "attend": attend}
        for row, _, context, _ in steps:
            if cached:
                adapter.forward([request(row, context, store=True, **more)])
        return [request(r, w, {w.start: 5}, store=kept, context=c, **more) for r, w, c, kept in steps]

    return prepare


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4], ids=["grouped heads", "own keys"])
def test_the_variable_length_kernel_equals_the_dense_path(packed: list[bool], causal: bool, heads: int) -> None:
    """Random groups: rows in any order, idle rows between, unlike lengths, stored or only read, one slot or several."""
    adapter, choose = random_llama(causal, num_key_value_heads=heads), random.Random(int(causal))
    adapter.model.double()
    for _ in range(25):
        prepare = random_steps(adapter, choose)
        adapter.packs = False
        expected = logits(adapter, *prepare())
        adapter.packs, steps = True, prepare()
        built = attention.masks_built
        poison(adapter)
        for ours, theirs in zip(logits(adapter, *steps), expected, strict=True):
            assert same(ours, theirs, 1e-5)
        assert attention.masks_built == built
    assert set(packed) == {causal, False} and len(packed) >= 20


def test_copies_of_windows_go_through_the_variable_length_kernel(packed: list[bool]) -> None:
    """Rows of unlike lengths and numbers of copies, an idle one between, windows inside what is stored and behind."""
    adapter = random_llama()
    adapter.model.double()
    for context in (range(12), range(20)):
        said = []
        for adapter.packs in (False, True):
            placed(adapter, *rows_of(*[24] * 4))
            adapter.forward([request(row, range(20), store=True) for row in range(4)])
            windows = {0: range(12, 16), 1: range(12, 15), 3: range(12, 16)}
            variants = {row: [{13: k} for k in range(3 - row % 3)] for row in windows}
            steps = [request(row, w, variants=variants[row], context=context) for row, w in windows.items()]
            said.append(adapter.forward(steps))
        for dense_one, ours in zip(*said, strict=True):
            for a, b in zip(dense_one.copies or [dense_one], ours.copies or [ours], strict=True):
                assert a.token == b.token and max(abs(a.confidence[s] - b.confidence[s]) for s in a.positions) < 1e-9
    assert packed == [False] * 2  # of two layers; where all copies see equally much, one plain call does


def test_what_the_kernel_cannot_express_is_masked(packed: list[bool]) -> None:
    full, causal = placed(random_llama(), *rows_of(20, 20)), placed(random_llama(True), *rows_of(20, 20))
    full.packs = causal.packs = True
    full.forward([request(row, range(16), store=True) for row in (0, 1)])
    causal.forward([request(row, range(16), shift=1, store=True, attend=CAUSAL) for row in (0, 1)])
    packed.clear()
    built = attention.masks_built
    full.forward([request(row, range(12, 16), context=range(9 + row)) for row in (0, 1)])  # a gap
    full.forward([request(row, range(12, 16), context=range(1 + row, 12)) for row in (0, 1)])  # not from slot 0
    several = {"attend": Attend("blocks", 0, 2)}
    full.forward([request(row, range(12, 16), context=range(12), **several) for row in (0, 1)])
    behind = {"shift": 1, "attend": CAUSAL}
    causal.forward([request(row, range(8, 12), context=range(15 + row), **behind) for row in (0, 1)])
    assert attention.masks_built == built + 4 and not packed


def test_the_kernel_is_for_half_precision_on_a_gpu_and_may_be_declined() -> None:
    adapter = random_llama()
    assert not kernel_serves(adapter.model) and not adapter.packs
    with pytest.raises(ValueError, match="attention_kernel=fast is not known: use auto or dense"):
        TransformerAdapter(adapter.model, adapter.facts, adapter.codec, attention_kernel="fast")


def test_what_the_attention_function_does_not_compute_is_refused() -> None:
    query = torch.zeros(1, 1, 3, 4)
    for more in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}, {"sliding_window": 2}):
        with pytest.raises(ValueError, match=r"not served yet|sees 2 slots only"):
            attention.attention(torch.nn.Identity(), query, query, query, None, 1.0, attention.Visibility(), **more)
