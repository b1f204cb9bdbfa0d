"""Every tensor that the authors' own networks gave, float32 on a CPU, against the adapters: caches included.

The largest difference of each family is printed at the end of the run, see `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.transformer import TransformerAdapter
from samplers import CAUSAL, FULL, Attend
from tests import reference
from tests.forwards import logits, placed, request
from tests.shared import shared

LIMIT = 2e-5
Record = Callable[[str, str, Tensor, Tensor], None]


@pytest.fixture
def agrees(record_difference: Callable[[str, str, float], None]) -> Record:
    """Holds a tensor to the authors' and notes the largest difference."""

    def check(family: str, name: str, ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape, name
        difference = (ours - theirs).abs().max().item()
        record_difference(family, name, difference)
        assert difference < LIMIT, name

    return check


@cache
def golden(family: str) -> dict[str, Tensor]:
    return load_file(shared("golden", family, "forward.safetensors"))


@cache
def adapter_of(family: str, folder: str = "model") -> TransformerAdapter:
    adapter = load(describe(ModelOptions(family, path=str(shared("golden", family, folder)))), torch.device("cpu"))
    assert isinstance(adapter, TransformerAdapter)
    return adapter


def whole(adapter: TransformerAdapter, ids: Tensor, attend: Attend, store: bool = False) -> Tensor:
    """(B, T, V): all rows of logits of sequences (B, T) in one call."""
    rows = ids.tolist()
    placed(adapter, *rows)
    window, shift = range(ids.shape[1]), adapter.facts.shift
    return torch.stack(
        logits(adapter, *(request(i, window, None, shift, store, attend=attend) for i in range(len(rows))))
    )


@contextmanager
def outputs(*modules: torch.nn.Module) -> Iterator[list[Tensor]]:
    """What the modules give, in the order they run."""
    heard: list[Tensor] = []
    hooks = [module.register_forward_hook(lambda module, given, said: heard.append(said.clone())) for module in modules]
    yield heard
    for hook in hooks:
        hook.remove()


# ---- LLaDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ids", "name"), [("ids", "logits"), ("ids2", "logits2")])
def test_llada_alone_and_in_a_batch(agrees: Record, ids: str, name: str) -> None:
    agrees("LLaDA", name, whole(adapter_of("llada"), golden("llada")[ids], FULL), golden("llada")[name])


@pytest.mark.parametrize(
    ("window", "context", "store", "name"),
    [
        (range(21, 44), range(21), False, "prefix_logits"),
        (range(21, 29), range(44), True, "dual_logits"),
        (range(21, 29), range(44), False, "dual_logits"),
    ],
)
def test_llada_on_a_cached_prefix_and_inside_a_cached_row(
    agrees: Record, window: range, context: range, store: bool, name: str
) -> None:
    """The cache holds the row as it was; then some tokens of it change."""
    tensors, adapter = golden("llada"), adapter_of("llada")
    before, after = tensors["ids"][0].tolist(), tensors["ids_after"][0].tolist()
    changed = {slot: token for slot, token in enumerate(after) if token != before[slot]}
    assert changed
    whole(adapter, tensors["ids"], FULL, store=True)
    said = logits(adapter, request(0, window, changed, context=context, store=store))[0]
    agrees("LLaDA", name, said, tensors[name][0])


def test_llada_files_the_authors_keys_and_values(agrees: Record) -> None:
    """They store keys before the rotation, we after it."""
    tensors, adapter = golden("llada"), adapter_of("llada")
    whole(adapter, tensors["ids"], FULL, store=True)
    keys, values = (held[:1, : tensors["ids"].shape[1]].transpose(1, 2) for held in adapter.store.layers[0])
    agrees("LLaDA", "cache_v0", values, tensors["cache_v0"])
    turned = reference.rotate(tensors["cache_k0"][0].double(), 5e5, keys.shape[-1])
    agrees("LLaDA", "cache_k0", keys[0], turned)


# ---- Dream -----------------------------------------------------------------------------------------------------------


def test_dream(agrees: Record) -> None:
    agrees("Dream", "logits", whole(adapter_of("dream"), golden("dream")["ids"], FULL), golden("dream")["logits"])


def test_dream_without_the_authors_padding(agrees: Record) -> None:
    """They pad on the left and hide the padding; our rows begin at slot 0, whatever runs beside them."""
    tensors, adapter = golden("dream"), adapter_of("dream")
    valid = tensors["pad_mask"].bool()
    rows = [ids[keep].tolist() for ids, keep in zip(tensors["pad_ids"], valid)]
    requests = [request(i, range(len(row)), shift=1, attend=FULL) for i, row in enumerate(rows)]
    together = logits(placed(adapter, *rows), *requests)
    for i, keep in enumerate(valid):
        assert tensors["pad_pos"][i][keep].tolist() == list(range(len(rows[i])))
        agrees("Dream", "pad_logits", together[i], tensors["pad_logits"][i][keep])
        agrees("Dream", "pad_logits", logits(adapter, requests[i])[0], tensors["pad_logits"][i][keep])


# ---- LLaDA2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attend", "name"), [(Attend("blocks", 0, 8), "logits_blockmask"), (FULL, "logits_full")], ids=["blocks", "full"]
)
def test_llada2(agrees: Record, attend: Attend, name: str) -> None:
    tensors, adapter = golden("llada2_moe"), adapter_of("llada2_moe")
    with outputs(adapter.model.model.norm) as hidden:
        agrees("LLaDA2", name, whole(adapter, tensors["ids"], attend), tensors[name])
    if attend != FULL:
        agrees("LLaDA2", "hidden_last_blockmask", hidden[0], tensors["hidden_last_blockmask"])


def test_llada2_block_by_block_on_its_cache(agrees: Record) -> None:
    """A block-causal cache is exact: the blocks one by one are the rows of the whole."""
    tensors, adapter = golden("llada2_moe"), adapter_of("llada2_moe")
    placed(adapter, tensors["ids"][0].tolist())
    for start in range(0, 40, 8):
        step = request(0, range(start, start + 8), context=range(start), store=True, attend=Attend("blocks", 0, 8))
        theirs = tensors["logits_blockmask"][0, start : start + 8]
        agrees("LLaDA2", "logits_blockmask, cached", logits(adapter, step)[0], theirs)


def test_llada2_router(agrees: Record) -> None:
    """Its choice, its order and its weights."""
    tensors = golden("llada2_moe")
    layer = adapter_of("llada2_moe").model.model.layers[1].mlp
    heard: list[tuple[Tensor, ...]] = []
    hook = layer.experts.register_forward_pre_hook(lambda module, given: heard.append(given))
    with torch.inference_mode():
        layer(tensors["gate_in"][None])
    hook.remove()
    _, chosen, weights = heard[0]
    ordered, places = chosen.sort(-1)
    theirs, their_places = tensors["gate_idx"].sort(-1)
    assert torch.equal(ordered, theirs)
    agrees("LLaDA2", "gate_w", weights.gather(-1, places), tensors["gate_w"].gather(-1, their_places))


# ---- SDAR ------------------------------------------------------------------------------------------------------------


def test_sdar(agrees: Record) -> None:
    tensors = golden("sdar")
    agrees("SDAR", "logits", whole(adapter_of("sdar"), tensors["ids"], Attend("blocks", 0, 4)), tensors["logits"])


@pytest.mark.parametrize("store", [False, True])
def test_sdar_on_a_cached_prefix(agrees: Record, store: bool) -> None:
    tensors, adapter, attend = golden("sdar"), adapter_of("sdar"), Attend("blocks", 0, 4)
    placed(adapter, tensors["ids"][0].tolist())
    adapter.forward([request(0, range(16), store=True, attend=attend)])
    said = logits(adapter, request(0, range(16, 20), context=range(16), store=store, attend=attend))[0]
    agrees("SDAR", "block_logits_cached", said, tensors["block_logits_cached"][0])


# ---- Fast-dLLM v2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32])
def test_fast_dllm_v2(agrees: Record, size: int) -> None:
    tensors, adapter = golden("fastdllm_v2"), adapter_of("fastdllm_v2")
    name = f"logits_b{size}"
    agrees("Fast-dLLM v2", name, whole(adapter, tensors["ids"], Attend("blocks", 0, size)), tensors[name])


# ---- DFlash: the target; its drafter has tests of its own ------------------------------------------------------------


def test_the_target_of_dflash(agrees: Record) -> None:
    """The hidden states are those behind layers 1 and 3, which the drafter reads."""
    tensors, adapter = golden("dflash"), adapter_of("dflash", "target")
    layers = adapter.model.model.layers
    with outputs(layers[1], layers[3]) as hidden:
        agrees("DFlash target", "target_logits", whole(adapter, tensors["ids"], CAUSAL), tensors["target_logits"])
    agrees("DFlash target", "target_hidden", torch.cat(hidden, -1), tensors["target_hidden"])
