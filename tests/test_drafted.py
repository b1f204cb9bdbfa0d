"""A target and its drafter behind one face: what goes together, and whose forward goes where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.base import Request
from adapters.checkpoints.files import read_json
from adapters.description import describe
from adapters.dflash import DFlashDrafter, load_drafter
from adapters.drafted import DraftedAdapter
from adapters.facts import inspect
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.taps import features, tapped
from samplers import CAUSAL, Forward, Role
from samplers.dflash import DFlashSampler
from samplers.forward import Kind
from tests import layouts
from tests.drafters import write_drafter

MASK = 63


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a target and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    layouts.write(folder / "target", "causal language model", num_hidden_layers=3)
    write_drafter(folder / "draft")
    return folder


def test_facts_and_identity_of_a_model_are_also_its_drafters(pair: Path) -> None:
    alone, together = describe(options(pair, draft=None)), describe(options(pair))
    assert alone.facts.draft is None and together.facts.draft is not None
    drafter = together.facts.draft
    assert (drafter.mask_id, drafter.shift, drafter.trained_block, drafter.attention) == (MASK, 0, 4, "full")
    assert together.identity() != alone.identity()
    assert inspect(options(pair)).facts.draft == drafter


def test_a_drafter_takes_in_the_features_of_exactly_the_slots_that_were_kept(pair: Path) -> None:
    adapter, prompts = loaded(pair), {0: ids(1, 5), 2: ids(2, 9)}
    adapter.open(3, 24)
    for row, prompt in prompts.items():
        adapter.place(row, prompt + [0] * 8, 0)
    adapter.forward([prefill(row, len(prompt)) for row, prompt in prompts.items()])
    drafted(adapter, {row: len(prompt) for row, prompt in prompts.items()})
    # of each verify window over 4 slots some are kept, of the second row not neighbours
    windows = {row: range(len(prompt), len(prompt) + 4) for row, prompt in prompts.items()}
    kept = {0: [5, 6], 2: [9, 10, 12]}
    adapter.forward([verify(row, windows[row], ids(row + 7, 4)) for row in prompts])
    said = drafted(adapter, {0: 7, 2: 12}, kept)
    for row, prompt in prompts.items():
        window = dict(zip(windows[row], ids(row + 7, 4), strict=True))
        caught = features_of(adapter, prompt + list(window.values()))
        path = [*range(len(prompt)), *kept[row]]
        assert said[row] == alone(pair, prompt + [window[slot] for slot in kept[row]], caught[path], row)


def test_a_row_that_starts_anew_has_no_features_of_the_one_before(pair: Path) -> None:
    adapter = loaded(pair)
    adapter.open(1, 24)
    for _ in range(2):
        adapter.place(0, ids(1, 5) + [0] * 8, 0)
        adapter.forward([prefill(0, 5)])
    first = drafted(adapter, {0: 5})
    adapter.place(0, ids(3, 7) + [0] * 8, 0)
    with pytest.raises(AssertionError, match="never stored"):
        drafted(adapter, {0: 7})
    adapter.place(0, ids(1, 5) + [0] * 8, 0)
    adapter.forward([prefill(0, 5)])
    assert drafted(adapter, {0: 5}) == first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_target_layers": 4}, r"model.draft=.*draft: this drafter belongs to a target of num_hidden_layers=4"),
        ({"architectures": ["DFlash2DraftModel"]}, "model.draft=.*DFlash 2 .* is not served"),
        ({"dflash_config": {"mask_token_id": 90}}, "mask_token_id=90 is no id of its target"),
        ({"dflash_config": {}}, "model.draft=.*lacks 'mask_token_id'"),
        ({"vocab_size": 60}, "model.draft=.*belongs to a target of vocab_size=60, but the target given has 64"),
        (
            {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 3]}},
            r"target_layer_ids=\[0, 3\] name 3, which is no layer of its target: they go from 0 to 2",
        ),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [-1, 2]}}, "name -1, which is no layer"),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": 2}}, "model.draft=.*'int' object is not iterable"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_any_weights_are_read(
    pair: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_drafter(tmp_path / "draft", **changes)
    with pytest.raises(ValueError, match=said):
        describe(options(pair, draft=str(tmp_path / "draft")))
    with pytest.raises(ValueError, match=said):
        inspect(options(pair, draft=str(tmp_path / "draft")))


def test_a_drafter_without_weights_is_refused_when_described(pair: Path, tmp_path: Path) -> None:
    (write_drafter(tmp_path / "draft") / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.draft=.*draft: .*draft holds no weights"):
        describe(options(pair, draft=str(tmp_path / "draft")))


def test_a_drafters_size_is_told_from_its_configuration_and_counted_with_its_targets(pair: Path) -> None:
    alone, together, found = describe(options(pair, draft=None)), describe(options(pair)), inspect(options(pair))
    drafter = loaded(pair).drafter
    assert isinstance(drafter, DFlashDrafter) and found.drafter and found.drafter.fit and together.drafter
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.network.state_dict().items()}
    assert found.drafter.sizes.shapes == shapes and found.drafter.fit.faultless
    held = sum(parameter.numel() for parameter in drafter.network.parameters())
    assert together.drafter.parameters == found.drafter.sizes.parameters == held
    assert alone.weight_bytes and together.weight_bytes == alone.weight_bytes + 4 * held


def test_a_sampler_that_needs_a_causal_model_names_some() -> None:
    with pytest.raises(
        ValueError, match=r"dflash needs causal attention.*: use .*, or with a drafter model=tiny_ar_dflash"
    ):
        DFlashSampler.check(inspect(ModelOptions("tiny", path="tiny/llada")).facts)


def test_what_is_no_drafter_at_all_is_refused_in_words(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.draft=nowhere is not on this machine, and no id of the hub"):
        describe(options(pair, draft="nowhere"))
    with pytest.raises(ValueError, match="it has no mask token"):
        describe(options(pair, draft=str(pair / "target")))
    masked = layouts.write(tmp_path / "llada", "LLaDA")
    with pytest.raises(ValueError, match=r"model.draft=.* drafts for a causal model, model=masked is none"):
        describe(ModelOptions("masked", path=str(masked), draft=str(pair / "draft")))
    with pytest.raises(ValueError, match="it has 466 ids, more than its target's 64"):
        describe(options(pair, draft="tiny/llada"))


def test_a_broken_drafter_is_told_before_its_targets_weights_are_read(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_drafter(tmp_path / "draft")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    description = describe(options(pair, draft=str(folder)))
    monkeypatch.setattr("adapters.loading.read_network", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(description, torch.device("cpu"))


def test_a_diffusion_model_of_the_same_vocabulary_drafts_from_the_tokens(tmp_path: Path) -> None:
    target = layouts.write(tmp_path / "target", "causal language model", num_hidden_layers=3)
    size = read_json(target / "config.json")["vocab_size"]
    dream = layouts.write(tmp_path / "dream", "Dream", vocab_size=size, mask_token_id=size - 1)
    options_ = ModelOptions("pair", path=str(target), draft=str(dream))
    adapter = load(describe(options_), torch.device("cpu"))
    assert isinstance(adapter, DraftedAdapter) and adapter.tapped_layers == ()
    adapter.open(1, 16)
    adapter.place(0, ids(1, 5) + [size - 1] * 4, 0)
    forward = Forward(range(9), range(5, 9), role=Role.DRAFT)
    said = adapter.forward([Request(0, forward, [], [])])[0]
    own = load(describe(ModelOptions("alone", path=str(dream))), torch.device("cpu"))
    own.open(1, 16)
    own.place(0, ids(1, 5) + [size - 1] * 4, 0)
    assert said.token == own.forward([Request(0, Forward(range(9), range(5, 9)), [], [])])[0].token


# ---- helpers ---------------------------------------------------------------------------------------------------------


def options(pair: Path, draft: str | None = "") -> ModelOptions:
    return ModelOptions("pair", path=str(pair / "target"), draft=str(pair / "draft") if draft == "" else draft)


def loaded(pair: Path) -> DraftedAdapter:
    adapter = load(describe(options(pair)), torch.device("cpu"))
    assert isinstance(adapter, DraftedAdapter)
    return adapter


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(row: int, length: int) -> Request:
    return Request(row, Forward(range(length), [length], store=range(length), attend=CAUSAL), [], [])


def verify(row: int, window: range, tokens: list[int]) -> Request:
    forward = Forward(window, context=range(window.start), store=window, attend=CAUSAL, kind=Kind.VERIFY)
    return Request(row, forward, list(window), tokens)


def drafted(adapter: DraftedAdapter, starts: dict[int, int], kept: dict[int, list[int]] | None = None) -> dict:
    """What is drafted behind each row's anchor, which is token 1."""
    requests = []
    for row, start in starts.items():
        window = range(start, start + 4)
        keep = kept[row] if kept else None
        forward = Forward(window, window[1:], context=range(start), keep=keep, role=Role.DRAFT)
        requests.append(Request(row, forward, list(window), [1, MASK, MASK, MASK]))
    return {row: list(said.confidence.values()) for row, said in zip(starts, adapter.forward(requests), strict=True)}


@torch.inference_mode()
def features_of(adapter: DraftedAdapter, tokens: list[int]) -> Tensor:
    """(T, F·D) of a sequence run in one go."""
    layers = adapter.tapped_layers
    with tapped(adapter.body, layers) as caught:
        adapter.logits(tokens, [0], CAUSAL)
    return features(caught, layers)[0]


def alone(pair: Path, tokens: list[int], caught: Tensor, row: int) -> Any:
    """What a drafter says behind these tokens, given their features in one piece."""
    target = load(describe(options(pair, draft=None)), torch.device("cpu"))
    drafter = load_drafter(pair / "draft", target)  # type: ignore[arg-type]
    assert isinstance(drafter, DFlashDrafter)
    drafter.open(1, 24)
    start = len(tokens)
    drafter.place(0, [*tokens, 1, MASK, MASK, MASK], 0)
    drafter.remember({0: range(start)}, caught[None])
    window = range(start, start + 4)
    said = drafter.forward([Request(0, Forward(window, window[1:], context=range(start)), [], [])])[0]
    return pytest.approx(list(said.confidence.values()), abs=1e-5)
