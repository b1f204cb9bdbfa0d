"""Mixed embeddings: the authors' vectors, the rule's limits, and that a group is mixed row by row."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Embedding

from adapters.base import Request, group_key
from adapters.soft import embedded, mixed, pack
from adapters.toy import ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Task
from samplers import DMaxSampler, Forward, ModelFacts, Prediction, Soft, ThresholdSampler
from samplers.state import DecodeState
from tests.models import MASK, random_llama
from tests.shared import shared

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("weights", "parts", "mask", "mixture"),
    [  # worked vectors of the specification
        ((0.8,), [(1, 0)], (0, 1), (0.970141, 0.242535)),
        ((0.6,), [(3, 4)], (0, 2), (1.862992, 3.311986)),
        ((0.5, 0.3), [(1, 0), (0, 2)], (2, 0), (1.248074, 0.832050)),
    ],
)
def test_a_mixture_is_as_long_as_its_parts_on_average(weights: Any, parts: Any, mask: Any, mixture: Any) -> None:
    got = mixed(torch.tensor([parts]).float(), torch.tensor([weights]), torch.tensor(mask).float())
    assert got[0].tolist() == pytest.approx(mixture, abs=1e-6)


def test_a_sure_token_is_its_own_embedding() -> None:
    parts, mask = torch.randn(5, 1, 16), torch.randn(16)
    assert torch.allclose(mixed(parts, torch.ones(5, 1), mask), parts[:, 0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(mixed(parts, torch.zeros(5, 1), mask), mask.expand(5, 16), rtol=1e-6, atol=1e-6)


def test_weights_above_one_in_sum_leave_the_mask_nothing() -> None:
    parts = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    assert mixed(parts, torch.tensor([[0.7, 0.3 + 1e-4]]), torch.tensor([0.0, 9.0]))[0, 1] == 0


def test_norms_are_rounded_as_the_embeddings_are_and_products_are_not() -> None:
    """The trail of dtypes of the authors' code: bfloat16 norms, float32 probabilities and products, bfloat16 result."""
    generator = torch.Generator().manual_seed(3)
    parts, mask = (
        torch.randn(64, 1, 32, generator=generator).bfloat16(),
        torch.randn(32, generator=generator).bfloat16(),
    )
    p = torch.rand(64, 1, generator=generator)
    mixture = p * parts[:, 0] + (1 - p) * mask
    length = p * parts[:, 0].norm(dim=-1, keepdim=True) + (1 - p) * mask.norm()
    assert mixture.dtype == length.dtype == torch.float32
    by_hand = (mixture * (length / (mixture.norm(dim=-1, keepdim=True) + 1e-6))).bfloat16()
    assert torch.equal(mixed(parts, p.double(), mask), by_hand)


def test_tokens_and_embeddings_are_the_authors_bit_for_bit() -> None:
    """Four steps of their code on given logits: what is written, and what the next forward is shown."""
    told = json.loads(shared("golden", "units", "units.json").read_text())["dmax"]
    vectors = load_file(shared("golden", "units", "units.safetensors"))
    mask_id, threshold = told["mask_id"], told["threshold"]
    embedding = Embedding.from_pretrained(vectors["dmax_emb"])
    facts = ModelFacts(len(vectors["dmax_emb"]), mask_id, frozenset(), block_origin="zero")
    prompt = [token for token in vectors["dmax_x_init"][0].tolist() if token != mask_id]
    state = DecodeState.masked(prompt, 16 - len(prompt), facts)
    decoding = DMaxSampler(block_size=8, steps=16, threshold=threshold).decode(state)
    next(decoding)
    for k in range(4):
        logits = vectors[f"dmax_logits_{k}"][0]
        p, token = (logits - logits.logsumexp(-1, keepdim=True)).exp().max(-1)
        active = range(len(prompt), 8)
        said = {slot: int(token[slot]) for slot in active}, {slot: float(p[slot]) for slot in active}
        forward = decoding.send(Prediction(active, *said))
        assert state.tokens == vectors[f"dmax_x_{k}"][0].tolist()
        soft = pack([forward], CPU)
        assert soft is not None
        shown = embedded(torch.tensor([state.tokens[:8]]), soft, embedding, mask_id)
        assert torch.equal(shown, vectors[f"dmax_embeds_{k}"])


# ---- through the adapter ---------------------------------------------------------------------------------------------


def request(row: int, window: range, soft: dict[int, Soft]) -> Request:
    return Request(row, Forward(window, list(window), inputs=soft), [], [])


def placed(rows: list[list[int]]) -> TransformerAdapter:
    adapter = random_llama()
    adapter.open(len(rows), max(map(len, rows)))
    for row, tokens in enumerate(rows):
        adapter.place(row, tokens, 0)
    return adapter


def test_a_token_of_weight_one_is_as_good_as_the_token_itself() -> None:
    adapter = placed([[3, 4, MASK, MASK], [3, 4, 5, MASK]])
    soft = adapter.forward([request(0, range(4), {2: Soft((5,), (1.0,))})])[0]
    hard = adapter.forward([request(1, range(4), {})])[0]
    assert soft.token == hard.token
    assert list(soft.confidence.values()) == pytest.approx(list(hard.confidence.values()), abs=1e-5)


def test_what_lacks_is_the_masks() -> None:
    adapter = placed([[3, 4, 7, MASK], [3, 4, MASK, MASK]])
    soft = adapter.forward([request(0, range(4), {2: Soft((5,), (0.0,))})])[0]
    hard = adapter.forward([request(1, range(4), {})])[0]
    assert list(soft.confidence.values()) == pytest.approx(list(hard.confidence.values()), abs=1e-5)


def test_a_group_is_mixed_as_its_rows_are_alone() -> None:
    """Windows of several lengths and beginnings, mixtures of one to three ids, in one call and one by one."""
    draw = random.Random(0)
    rows = [[draw.randrange(MASK) for _ in range(12)] for _ in range(3)]
    windows = [range(12), range(2, 12), range(1, 10)]
    inputs: list[dict[int, Soft]] = []
    for row, window in enumerate(windows):
        slots = draw.sample(window, 3 + row)
        inputs.append({s: Soft(tuple(draw.sample(range(MASK), row + 1)), (0.3,) * (row + 1)) for s in slots})
    adapter = placed(rows)
    requests = [request(row, windows[row], inputs[row]) for row in range(3)]
    together = adapter.forward(requests)
    for wish, said in zip(requests, together):
        alone = adapter.forward([wish])[0]
        assert alone.token == said.token
        assert list(alone.confidence.values()) == pytest.approx(list(said.confidence.values()), abs=1e-5)
        plain = adapter.forward([request(wish.row, wish.forward.window, {})])[0]
        assert max(abs(plain.confidence[s] - said.confidence[s]) for s in said.positions) > 1e-3


def test_mixed_and_plain_windows_are_run_apart() -> None:
    plain, soft = Forward(range(4)), Forward(range(4), inputs={0: Soft((1,), (1.0,))})
    assert group_key(plain) != group_key(soft)
    assert group_key(soft) == group_key(replace(soft, inputs={3: Soft((2,), (0.5,))}))


def test_a_mixture_outside_the_window_fails_the_sample() -> None:
    class Astray(ThresholdSampler):
        method_name = "astray"

        def decode(self, state: DecodeState) -> Any:
            yield Forward(range(2), inputs={3: Soft((5,), (1.0,))})

    (outcome,) = Engine(ToyMaskedLMAdapter(), Astray(block_size=4, steps=4)).decode([Task(0, [5], 4)], 5)
    assert outcome.error == "the sampler mixed the inputs of slots [3], some of which lie outside range(0, 2)"
