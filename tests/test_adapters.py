"""The adapters' promises: attention, the store of keys and values, the read-out and its memory, text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from adapters import attention
from adapters.base import Request
from adapters.description import describe
from adapters.loading import load
from adapters.places import TINY, ModelOptions
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Task
from samplers import (
    CAUSAL,
    FULL,
    Attend,
    AutoregressiveSampler,
    Forward,
)
from tests.models import END, random_llama
from tests.shared import shared

CPU = torch.device("cpu")


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, END, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(row: int, window: range, changed: dict[int, int] | None = None, shift: int = 0, **more: Any) -> Request:
    """A forward of a window that reads every row of it."""
    changed = changed or {}
    want = range(window.start + shift, window.stop + shift)
    return Request(row, Forward(window, want, **more), list(changed), list(changed.values()))


def logits(adapter: TransformerAdapter, *requests: Request) -> list[torch.Tensor]:
    """What the head says of each request's wanted slots, (N, V) each, through the public `forward`."""
    heard: list[torch.Tensor] = []
    hook = adapter.head_module.register_forward_hook(lambda module, given, said: heard.append(said.clone()))
    adapter.forward(requests)
    hook.remove()
    return list(torch.cat(heard).split([len(r.forward.want) for r in requests]))


def placed(adapter: TransformerAdapter, *rows: list[int], slots: int = 64) -> TransformerAdapter:
    adapter.open(len(rows), slots)
    for row, tokens in enumerate(rows):
        adapter.place(row, tokens, 0)
    return adapter


def same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 5e-5) -> bool:
    return ours.shape == theirs.shape and (ours - theirs).abs().max().item() < tolerance


def dense(adapter: TransformerAdapter, tokens: list[int], visible: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights under transformers' eager attention and a dense mask, (T, T) bool -> (T, V)."""
    config = type(adapter.model.config)(**adapter.model.config.to_dict())
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(adapter.model.state_dict())
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]


def pattern(attend: Attend, length: int) -> torch.Tensor:
    """(T, T) bool, written as the words of `Attend` say, pair by pair."""

    def block(slot: int) -> int:
        return -1 if slot < attend.first else (slot - attend.first) // attend.size

    def sees(query: int, key: int) -> bool:
        if attend.pattern == "blocks":
            return block(key) <= block(query)
        return attend.pattern == "full" or key <= query

    return torch.tensor([[sees(query, key) for key in range(length)] for query in range(length)])


# ------------------------------------------------------------------------------------------------------- attention


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
    full, causal = placed(random_llama(), ids(12, 1), ids(12, 2)), placed(random_llama(True), ids(12, 1), ids(9, 2))
    built = attention.masks_built
    full.forward([request(0, range(12)), request(1, range(12))])
    causal.forward([request(0, range(10), shift=1, attend=CAUSAL), request(1, range(8), shift=1, attend=CAUSAL)])
    causal.forward([request(row, range(8 - row), shift=1, attend=CAUSAL, store=True) for row in (0, 1)])  # prefill
    one_step = {"shift": 1, "attend": CAUSAL, "store": True, "context": range(8)}
    causal.forward([request(row, range(8, 9), **one_step) for row in (0, 1)])
    full.forward([request(row, range(12), store=True) for row in (0, 1)])
    full.forward([request(row, range(8, 12), context=range(8)) for row in (0, 1)])  # prefix cache
    full.forward([request(row, range(4, 8), context=range(12), store=True) for row in (0, 1)])  # dual cache
    assert attention.masks_built == built
    full.forward([request(0, range(12)), request(1, range(11))])
    assert attention.masks_built == built + 1


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


# ------------------------------------------------------------------------------------------------- keys and values


def held(adapter: TransformerAdapter) -> list[torch.Tensor]:
    return [tensor[:, :, :-1].clone() for pair in adapter.store.layers.values() for tensor in pair]


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
        assert torch.equal(adapter.store.layers[0][1][:, :, :44], golden["cache_v0"])
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
    assert not all(torch.equal(a, b) for a, b in zip(held(adapter), cache))
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
    assert all((tensor[0] == 0).all() for tensor in held(adapter))
    assert torch.equal(decode_short(), fresh)


def test_stale_ids_behind_a_shorter_row_are_never_run() -> None:
    adapter = random_llama()
    placed(adapter, ids(30, 1), ids(12, 3))
    adapter.place(0, ids(10, 2), 0)
    group = [request(0, range(10)), request(1, range(12))]
    reused = logits(adapter, *group)
    placed(adapter, ids(10, 2), ids(12, 3))
    assert all(torch.equal(a, b) for a, b in zip(reused, logits(adapter, *group)))


def test_changes_reach_the_device_whatever_their_number_and_order() -> None:
    adapter, tokens = random_llama(), ids(12, 1)
    placed(adapter, tokens)
    adapter.forward([request(0, range(12), {3: 7, 5: 9})])
    changed = Request(0, Forward(range(12), [0]), [2, 4, 2], [8, 8, 8])  # a slot decided twice in one tick
    adapter.forward([changed])
    assert adapter.canvas[0, :12].tolist() == [*tokens[:2], 8, 7, 8, 9, *tokens[6:]]


# --------------------------------------------------------------------------------------------------------- reading


def test_only_wanted_rows_reach_the_head_and_one_transfer_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, rows, transfers = placed(random_llama(), ids(16, 1), ids(14, 2), ids(16, 3)), [], []
    adapter.head_module.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape))
    for name in ("tolist", "item", "cpu", "__bool__"):
        own = getattr(torch.Tensor, name)
        spy = lambda self, *a, own=own, name=name: (transfers.append(name), own(self, *a))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, spy)
    wants = [[9, 3, 12], [], range(4, 8)]
    requests = [Request(i, Forward(range(14), want, ask=frozenset({"margin"})), [], []) for i, want in enumerate(wants)]
    predictions = adapter.forward(requests)
    assert rows == [(7, 32)] and transfers == ["tolist"]
    for prediction, want in zip(predictions, wants):
        assert list(prediction.positions) == list(want) == list(prediction.token) == list(prediction.confidence)
        assert prediction.finite and prediction.margin is not None and list(prediction.margin) == list(want)
    silent = [Request(i, Forward(range(14), store=True), [], []) for i in range(3)]
    assert all(not prediction.token for prediction in adapter.forward(silent))
    context = [Request(i, Forward(range(14, 16), [14], context=range(14)), [], []) for i in (0, 2)]
    adapter.forward(context)
    assert len(rows) == 2 and transfers == ["tolist"] * 2
