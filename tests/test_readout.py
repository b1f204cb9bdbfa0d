"""The read-out against float64 references, and the memory of its logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from adapters.base import Request
from adapters.readout import GREEDY_COPIES, SAMPLED_COPIES, ReadOut
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Task
from samplers import ConfidenceSampler, Forward, Law, uniform
from tests.forwards import ids, placed
from tests.models import random_llama


def read(
    rows: torch.Tensor,
    law: Law | None = None,
    ask: Sequence[str] = (),
    mask_id: int | None = None,
    confidence_dtype: str = "float32",
) -> Any:
    """Columns of a read-out whose head gives the rows themselves; the draws are numbered by row."""
    forward = Forward(range(1), law=law or Law(), ask=frozenset(ask))
    counters = torch.arange(len(rows))
    out = ReadOut(mask_id, rows.shape[1], 256, confidence_dtype)
    return out(rows.clone(), lambda hidden: hidden, forward, counters * 0, counters, counters)


def random_rows(count: int = 64, vocabulary: int = 500, scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(3))


def test_statistics_equal_float64_references() -> None:
    rows = random_rows()
    token, confidence, finite, margin, entropy = read(rows, ask=("margin", "entropy"))
    law = rows.double().softmax(-1)
    best = law.topk(2).values
    assert token == law.argmax(-1).tolist() and all(finite)
    assert torch.allclose(torch.tensor(confidence).double(), best[:, 0], atol=1e-6, rtol=1e-5)
    assert torch.allclose(torch.tensor(margin).double(), best[:, 0] - best[:, 1], atol=1e-6, rtol=1e-5)
    assert torch.allclose(torch.tensor(entropy).double(), -(law * law.log()).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_certain_row_has_confidence_and_margin_1_and_entropy_0() -> None:
    row = torch.full((1, 9), -torch.inf)
    row[0, 4] = 3.0
    assert read(row, ask=("margin", "entropy")) == [[4.0], [1.0], [1.0], [1.0], [0.0]]
    assert read(row, Law(temperature=0.7))[:2] == [[4.0], [1.0]]


def test_equal_logits_go_to_the_lowest_id_that_may_be_drawn() -> None:
    rows = torch.zeros(1, 9)
    assert read(rows)[0] == [0]
    assert read(rows, Law(banned=(0, 1)))[0] == [2]
    assert read(rows, mask_id=0)[0] == [1]
    rows[0, [5, 7]] = 1.0
    assert read(rows)[0] == [5]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_banned_ids_leave_the_law_and_unsure_ids_only_the_confidence(temperature: float) -> None:
    rows = random_rows(400, 12, scale=2.0)
    banned, unsure = (2, 5), (7, 9)
    columns = read(rows, Law(temperature, banned=banned, unsure=unsure), ask=("entropy",), mask_id=11)
    token = torch.tensor(columns[0]).long()
    assert not set(token.tolist()) & {*banned, 11} and set(token.tolist()) >= set(unsure)
    law = rows.double()
    law[:, [*banned, *unsure]] = -torch.inf
    law = law.softmax(-1)  # the mask id is never drawn, yet part of the softmax, as in LLaDA
    assert torch.allclose(torch.tensor(columns[1]).double(), law.gather(1, token[:, None])[:, 0], atol=1e-6)
    assert all(columns[1][i] == 0 for i in range(400) if token[i].item() in unsure)
    assert torch.allclose(torch.tensor(columns[3]).double(), torch.special.entr(law).sum(-1), atol=1e-5)


def rounded(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=torch.float64).to(dtype).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confidence_in_the_models_dtype_equals_a_hand_computation_rounded_step_by_step(dtype: torch.dtype) -> None:
    """Each law value, each logarithm, each product and each sum is rounded."""
    rows = random_rows(200, 40).to(dtype)
    asked = ("margin", "entropy")
    token, confidence, finite, margin, entropy = read(rows, ask=asked, confidence_dtype="model")
    exact = read(rows, ask=asked)
    assert token == exact[0] == rows.argmax(-1).tolist() and all(finite)
    for i, row in enumerate(rows.double()):
        law = [rounded(p, dtype) for p in row.softmax(-1).tolist()]
        first, second = sorted(law)[:-3:-1]
        terms = [rounded(p * rounded(math.log(p), dtype), dtype) for p in law if p]
        unit = torch.finfo(dtype).eps  # one rounding of a value in the middle of two may go either way
        assert confidence[i] == pytest.approx(law[int(token[i])], rel=unit)
        assert margin[i] == pytest.approx(rounded(first - second, dtype), rel=unit, abs=unit)
        assert entropy[i] == pytest.approx(rounded(-sum(terms), dtype), rel=2 * unit)
    assert sum(a != b for a, b in zip(confidence, exact[1])) > 190


def test_of_a_float32_model_both_confidences_are_the_same() -> None:
    exact, own = (read(random_rows(), ask=("margin", "entropy"), confidence_dtype=d) for d in ("float32", "model"))
    assert torch.allclose(torch.tensor(own), torch.tensor(exact), atol=1e-5)


def test_a_bfloat16_models_own_confidence_saturates_and_float32_tells_apart() -> None:
    """Softmax of (7, 0) is 0.99909: of bfloat16's neighbours 0.99609 and 1 the second is nearer."""
    rows = torch.tensor([[7.0, 0.0], [9.0, 0.0]], dtype=torch.bfloat16)
    assert read(rows, ask=("margin",), confidence_dtype="model") == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    (sure, surer), (low, high) = read(rows)[1], read(rows, ask=("margin",))[3]
    assert sure == pytest.approx(1 / (1 + math.exp(-7)), abs=1e-6) and sure < surer < 1 and low < high < 1


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_told_in_either_dtype(spoilt: float) -> None:
    rows = torch.tensor([[1.0, 2.0, -math.inf], [1.0, spoilt, 0.0]], dtype=torch.bfloat16)
    for dtype in ("float32", "model"):
        assert read(rows, ask=("entropy",), confidence_dtype=dtype)[2] == [1.0, 0.0]
    assert read(rows[:1], ask=("entropy",), confidence_dtype="model")[3][0] == pytest.approx(0.582, abs=0.01)


def inverse_cdf(row: torch.Tensor, law: Law, number: float) -> int:
    """The draw written out in float64: temper, keep the top k, keep the nucleus, add up by id."""
    logit = (row.double() / law.temperature).tolist()
    if law.top_k is not None:
        least = sorted(logit, reverse=True)[min(law.top_k, len(logit)) - 1]
        logit = [x if x >= least else -math.inf for x in logit]
    weight = [math.exp(x - max(logit)) for x in logit]
    if law.top_p is not None:
        mass, kept = 0.0, set()
        for i in sorted(range(len(weight)), key=lambda i: -weight[i]):
            if mass >= law.top_p * sum(weight):
                break
            mass += weight[i]
            kept.add(i)
        weight = [w if i in kept else 0.0 for i, w in enumerate(weight)]
    target, total = number * sum(weight), 0.0
    for i, w in enumerate(weight):
        total += w
        if total >= target and w:
            return i
    raise AssertionError


@pytest.mark.parametrize(
    "law",
    [Law(1.0), Law(0.7), Law(0.7, top_k=3), Law(1.3, top_p=0.8), Law(0.9, top_k=20, top_p=0.6), Law(2.0, top_k=1)],
    ids=str,
)
def test_draws_equal_an_inverse_cdf_written_out_in_float64(law: Law) -> None:
    rows = random_rows(300, 40, scale=2.0)
    drawn = read(rows, law)[0]
    assert drawn == [inverse_cdf(row, law, uniform(0, i, i)) for i, row in enumerate(rows)]


def test_laws_at_the_edge_are_harmless() -> None:
    rows = random_rows(50, 12)
    greedy, free = read(rows)[0], read(rows, Law(0.8))[0]
    assert read(rows, Law(0.8, top_k=12))[0] == read(rows, Law(0.8, top_k=10**6))[0] == free
    assert read(rows, Law(0.8, top_p=1.0))[0] == free
    for law in (Law(1e-6), Law(1e-38), Law(0.8, top_k=1), Law(0.8, top_p=1e-9)):
        assert read(rows, law)[0] == greedy, law
    assert read(1e4 * rows, Law(1e-38))[0] == greedy
    assert len(set(read(torch.zeros(200, 12), Law(1e3))[0])) == 12


@pytest.mark.parametrize("law", [Law(), Law(0.7, top_p=0.9), Law(0.7, top_k=5)], ids=str)
def test_chunking_changes_nothing(law: Law) -> None:
    """1 MiB holds 2 or 9 slots of 9,600 ids; 256 MiB hold all 100 at once. The head's own rounding is left out."""
    rows, counters = random_rows(100, 9600), torch.arange(100)
    forward = Forward(range(1), law=law, ask=frozenset({"margin", "entropy"}))
    sizes: list[int] = []
    with torch.inference_mode():
        small, large = (
            ReadOut(0, 9600, mib)(
                rows, lambda part: (sizes.append(len(part)), part.clone())[1], forward, counters, counters, counters
            )
            for mib in (1, 256)
        )
    assert len(sizes) > 3 and sizes[-1] == 100
    assert small == large


def best(rows: torch.Tensor, count: int, mask_id: int | None = None, **more: Any) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each slot with their log-probabilities."""
    counters = torch.arange(len(rows))
    out = ReadOut(mask_id, rows.shape[1], 256, more.pop("confidence_dtype", "float32"))
    forward = Forward(range(1), best=count, **more)
    columns = out(rows.clone(), lambda hidden: hidden, forward, counters * 0, counters, counters)[3:]
    count = len(columns) // 2
    assert all(id_ == int(id_) for column in columns[:count] for id_ in column)
    return [[(int(columns[k][n]), columns[count + k][n]) for k in range(count)] for n in range(len(rows))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_ids_come_in_order_and_equal_ones_by_id(dtype: torch.dtype) -> None:
    """Values of few levels, so that many are equal, within those told and at the last of them."""
    rows = (2 * random_rows(80, 300)).round().to(dtype)
    for count in (1, 7, 64, 300, 1000):
        for row, said in zip(rows.double(), best(rows, count)):
            order = sorted(range(300), key=lambda id_: (-row[id_].item(), id_))[:count]
            assert [id_ for id_, _ in said] == order
            exact = row.log_softmax(-1)[order].tolist()
            assert [value for _, value in said] == pytest.approx(exact, abs=1e-5)
    assert [id_ for id_, _ in best(torch.zeros(1, 9, dtype=dtype), 4)[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize("confidence_dtype", ["float32", "model"])
def test_the_likeliest_ids_are_of_the_raw_law_without_banned_ids_and_the_mask(confidence_dtype: str) -> None:
    rows = random_rows(50, 12).bfloat16()
    plain = rows.double()
    plain[:, [2, 5]] = -torch.inf
    expected = plain.log_softmax(-1)  # the mask counts, as in the confidence
    law = Law(0.7, top_k=2, banned=(2, 5), unsure=(7,), judged="filtered")
    for row, said in zip(expected, best(rows, 12, 11, law=law, confidence_dtype=confidence_dtype)):
        ids = [id_ for id_, value in said if value > -math.inf]
        assert ids == [id_ for id_ in row.argsort(descending=True).tolist() if id_ not in (2, 5, 11)]
        assert [value for _, value in said[:9]] == pytest.approx(row[ids].tolist(), abs=1e-5)
    greedy = read(rows, Law(banned=(2, 5)), mask_id=11)[0]
    assert greedy == [said[0][0] for said in best(rows, 1, 11, law=Law(banned=(2, 5)))]


def test_the_likeliest_ids_of_no_numbers_are_told_without_a_crash() -> None:
    rows = torch.tensor([[math.nan] * 5, [math.nan, 1.0, 2.0, 3.0, 4.0]])
    assert [len(said) for said in best(rows, 3)] == [3, 3]


class LogitsMemory(TorchDispatchMode):
    """Bytes of tensors whose last dimension is the vocabulary: the largest, and the most alive at once.

    Parameters live outside it; storages are counted once, however many views there are.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.alive, self.peak, self.largest = vocabulary, WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocabulary:
                storage = tensor.untyped_storage()
                self.alive[storage] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                self.peak = max(self.peak, sum(self.alive.values()))
        return result


@contextmanager
def watched_logits(adapter: TransformerAdapter) -> Iterator[tuple[LogitsMemory, list[int]]]:
    rows: list[int] = []
    hook = adapter.head_module.register_forward_hook(lambda module, given, said: rows.append(said.shape[0]))
    with LogitsMemory(adapter.facts.vocab_size) as memory:
        yield memory, rows
    hook.remove()


LAWS: list[dict[str, Any]] = [
    {},
    {"order": "margin"},
    {"order": "entropy"},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "order": "entropy"},
]


@pytest.mark.parametrize("confidence_dtype", ["float32", "model"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_logits_stay_within_their_budget(law: dict[str, Any], confidence_dtype: str) -> None:
    """A vocabulary of 20,000 and 1 MiB: 4 slots at once when greedy, 1 when sampling, of the 64 wanted."""
    adapter = random_llama(vocab_size=20_000)
    adapter.read_out.bytes, adapter.read_out.confidence_dtype = 2**20, confidence_dtype
    sampler = ConfidenceSampler(block_size=32, steps=2, **law)
    with watched_logits(adapter) as (memory, rows):
        outcomes = list(Engine(adapter, sampler, max_rows=2).decode([Task(i, [1, 2], 32) for i in (0, 1)], 34))
    copies = SAMPLED_COPIES if law.get("temperature") else GREEDY_COPIES
    assert [outcome.failure for outcome in outcomes] == [None, None] and sum(rows) == 2 * (32 + 16)
    assert max(rows) * 20_000 * 4 * copies <= 2**20
    assert 0 < memory.largest <= memory.peak <= 2**20


SPECULATION: list[dict[str, Any]] = [
    {"best": 64},
    {"best": 64, "law": Law(0.7, top_k=50, top_p=0.9)},
    {"judged_drafts": True, "proposed": range(11, 29)},
    {"judged_drafts": True, "proposed": range(11, 29), "law": Law(0.7, top_k=50, top_p=0.9)},
]


@pytest.mark.parametrize("asked", SPECULATION, ids=str)
def test_what_drafts_need_stays_within_the_budget_of_logits(asked: dict[str, Any]) -> None:
    """The laws that drafts were drawn from, float32, lie outside of it: rows times slots of a draft."""
    adapter = random_llama(causal=True, vocab_size=20_000)
    adapter.read_out.bytes = 2**22
    placed(adapter, ids(30, 1), ids(30, 2))
    window, want = range(10, 29), range(11, 30)
    law = asked.get("law", Law())
    adapter.forward([Request(row, Forward(window, want, law=law, carry=True), [], []) for row in (0, 1)])
    assert adapter.laws.table is not None and adapter.laws.table.shape == (2, 19, 20_000)
    with watched_logits(adapter) as (memory, rows):
        adapter.forward([Request(row, Forward(window, want, **asked), [], []) for row in (0, 1)])
    assert max(rows) == 5 and 0 < memory.peak <= 2**22


@pytest.mark.slow
def test_157_million_parameters_and_126464_ids_decode_within_64_mib_of_logits() -> None:
    """64 steps on a canvas of 128 (issue 2, done when 7)."""
    vocabulary = 126_464
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    adapter = random_llama(vocab_size=vocabulary, num_attention_heads=8, num_key_value_heads=8, **wide)
    parameters = sum(parameter.numel() for parameter in adapter.model.parameters())
    assert 150e6 < parameters < 165e6
    adapter.read_out.bytes = 64 * 2**20
    adapter.facts = adapter.facts.__class__(vocabulary, vocabulary - 1, frozenset({vocabulary - 2}))
    sampler = ConfidenceSampler(block_size=128, steps=64)
    with watched_logits(adapter) as (memory, rows):
        (outcome,) = Engine(adapter, sampler, max_rows=1).decode([Task(0, [1, 2, 3], 128)], 131)
    assert outcome.failure is None and outcome.counts()["nfe"] == 64
    assert outcome.state is not None and not any(outcome.state.mask)
    assert sum(rows) == sum(range(2, 129, 2))
    assert max(rows) * vocabulary * 4 * GREEDY_COPIES <= 64 * 2**20
    assert max(rows) * vocabulary * 4 <= memory.largest <= memory.peak <= 64 * 2**20
