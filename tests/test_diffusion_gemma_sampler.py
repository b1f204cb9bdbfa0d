"""DiffusionGemma's decoding equals the native class's `generate` step for step, given the same random numbers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

from adapters.base import Group
from adapters.description import describe
from adapters.diffusion_gemma import DiffusionGemmaAdapter
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.toy import TableAdapter
from pipeline.engine import Engine, Outcome, Task
from pipeline.trace import read_trace
from samplers import (
    AutoregressiveSampler,
    DecodeState,
    DiffusionGemmaSampler,
    EntropyBoundSampler,
    Forward,
    ModelFacts,
    Prediction,
    stream_key,
    uniform,
)
from tests.commands import Here
from tests.conftest import ROOT
from tests.test_diffusion_gemma import CANVAS, VOCABULARY, write_gemma
from tests.test_entropy_bound import entropy
from tests.test_samplers import log_probabilities

END = 1
PROMPTS = [random.Random(n).choices(range(3, VOCABULARY), k=n) for n in (19, 3, 4, 1, 8, 13)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that listens to its previous logits less than a random one does, which would grow each rounding error."""
    path = write_gemma(tmp_path_factory.mktemp("gemma"))
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.decoder.self_conditioning.down_proj.weight.mul_(0.1)
    model.save_pretrained(path)
    return path


@pytest.fixture
def adapter(folder: Path) -> DiffusionGemmaAdapter:
    made = load(describe(ModelOptions("gemma", path=str(folder))), torch.device("cpu"))
    assert isinstance(made, DiffusionGemmaAdapter)
    return made


@pytest.fixture(scope="module")
def native(folder: Path) -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()


# ---- beside the native class -----------------------------------------------------------------------------------------


@dataclass
class Passes:
    """What a network was run on: for each pass whether it stored, its ids, and the logits that conditioned it."""

    ids: list[tuple[bool, list[int]]] = field(default_factory=list)
    carried: list[Tensor | None] = field(default_factory=list)

    def count(self, stored: bool) -> int:
        return sum(each == stored for each, _ in self.ids)


@dataclass
class Served:
    """Our random numbers in place of PyTorch's, in the order in which `generate` asks for them."""

    stream: int
    first: int  # slot of the canvas
    draws: int = 0

    def canvas(self) -> Tensor:
        slots = range(self.first, self.first + CANVAS)
        return torch.tensor([[int(uniform(self.stream, slot, -1 - self.draws) * VOCABULARY) for slot in slots]])

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        cdf = probabilities.double().cumsum(-1)
        slots = range(self.first, self.first + len(cdf))
        even = torch.tensor([uniform(self.stream, slot, self.draws) for slot in slots], dtype=torch.float64)
        self.draws += 1
        return torch.searchsorted(cdf, even[:, None] * cdf[:, -1:]).clamp(max=VOCABULARY - 1)


def generate(
    native: DiffusionGemmaForBlockDiffusion, prompt: list[int], served: Served, **settings: Any
) -> tuple[list[int], Passes]:
    """The native class's tokens for a prompt, and its passes."""
    passes = Passes()

    def encoded(module: Any, arguments: Any, given: dict[str, Any]) -> None:
        passes.ids.append((True, given["input_ids"][0].tolist()))
        passes.carried.append(None)
        served.first += CANVAS

    def decoded(module: Any, arguments: Any, given: dict[str, Any]) -> None:
        passes.ids.append((False, given["decoder_input_ids"][0].tolist()))
        logits = given["self_conditioning_logits"]
        passes.carried.append(None if logits is None else logits[0])

    hooks = [
        native.model.encoder.register_forward_pre_hook(encoded, with_kwargs=True),
        native.model.decoder.register_forward_pre_hook(decoded, with_kwargs=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.EntropyBoundSampler, "initialize_canvas", lambda *given, **named: served.canvas())
        patch.setattr(torch, "multinomial", served.multinomial)
        said = native.generate(torch.tensor([prompt]), eos_token_id=[END], **settings)
    for hook in hooks:
        hook.remove()
    return said.sequences[0].tolist(), passes


def watch(adapter: DiffusionGemmaAdapter, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Note the passes of an adapter with one row in flight."""
    passes, hidden = Passes(), adapter.hidden

    def noting(group: Group) -> Tensor:
        stored = len(group.forwards[0].store) > 0
        passes.ids.append((stored, group.ids[0].tolist()))
        carried = None if stored else adapter.carried.get(0)
        passes.carried.append(None if carried is None else carried.clone())
        return hidden(group)

    monkeypatch.setattr(adapter, "hidden", noting)
    return passes


ASKED = 2 * CANVAS + 1  # three canvases: the last one is whole
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": ({}, {}),
    "bolder, and done once stable": (
        {"steps_per_block": 20, "entropy_budget": 3.0, "stop_entropy": 100.0},
        {"max_denoising_steps": 20, "entropy_bound": 3.0, "confidence_threshold": 100.0},
    ),
    "stable for two steps": (
        {"steps_per_block": 30, "entropy_budget": 6.0, "stop_entropy": 1.0, "stable_steps": 2},
        {"max_denoising_steps": 30, "entropy_bound": 6.0, "confidence_threshold": 1.0, "stability_threshold": 2},
    ),
    "sure only": (
        {"steps_per_block": 12, "entropy_budget": 4.0, "stop_entropy": 0.9, "stable_steps": 0},
        {"max_denoising_steps": 12, "entropy_bound": 4.0, "confidence_threshold": 0.9, "stability_threshold": 0},
    ),
    "cold": (
        {"temperature": 0.2, "last_temperature": 0.05, "entropy_budget": 0.5, "stop_entropy": 0.05},
        {"t_max": 0.2, "t_min": 0.05, "entropy_bound": 0.5, "confidence_threshold": 0.05},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_pass_of_both_kinds_equals_the_native_generate(
    adapter: DiffusionGemmaAdapter,
    native: DiffusionGemmaForBlockDiffusion,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Ids of every canvas on the way, so what was accepted and renoised; stored tokens; conditioning logits; counts."""
    ours, named = SETTINGS[name]
    named = dict(named)
    named["sampler_config"] = theirs.EntropyBoundSamplerConfig(named.pop("entropy_bound", 0.1))
    sampler, lengths = DiffusionGemmaSampler(block_size=CANVAS, **ours), []
    seen = watch(adapter, monkeypatch)
    for index, prompt in enumerate(PROMPTS[: 1 if name == "published" else 3]):
        served = Served(stream_key(0, index), len(prompt) - CANVAS)
        sequence, wanted = generate(native, prompt, served, max_new_tokens=ASKED, **named)
        for noted in (seen.ids, seen.carried):
            noted.clear()
        (outcome,) = Engine(adapter, sampler, 1).decode([Task(0, list(prompt), ASKED, stream_key(0, index))], 80)
        assert seen.ids == wanted.ids
        assert outcome.state is not None and outcome.state.tokens[: len(sequence)] == sequence
        assert not any(outcome.state.mask[: len(sequence)])
        for mine, other in zip(seen.carried, wanted.carried, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or other is None or (mine - other).abs().max() < 1e-3
        counts = outcome.counts()
        assert (counts["nfe_prefill"], counts["nfe_denoise"]) == (1, wanted.count(stored=False))
        assert counts["nfe_commit"] == wanted.count(stored=True) - 1
        lengths.append((len(sequence) - len(prompt)) // CANVAS)
    if name == "stable for two steps":
        assert lengths == [3, 2, 1]  # the others end at an end token


def test_a_batch_and_a_head_in_chunks_change_no_token_and_no_forward(adapter: DiffusionGemmaAdapter) -> None:
    sampler = DiffusionGemmaSampler(block_size=CANVAS, **SETTINGS["cold"][0])

    def decode(rows: int) -> list[Any]:
        tasks = [Task(i, list(prompt), ASKED, stream_key(0, i)) for i, prompt in enumerate(PROMPTS)]
        outcomes = sorted(Engine(adapter, sampler, rows).decode(tasks, 80), key=lambda outcome: outcome.task.index)
        assert not any(outcome.failure for outcome in outcomes)
        return [(o.log, o.state.tokens, o.state.committed_at, o.state.revised) for o in outcomes if o.state]

    alone = decode(1)
    assert decode(4) == alone
    adapter.read_out.bytes = 4 * VOCABULARY * 10 * 4  # four slots of a canvas at a time
    state = DecodeState.masked([], CANVAS, adapter.facts)
    assert adapter.read_out.chunk(sampler.forward(state, range(CANVAS), 1)) == 4
    assert decode(4) == alone


# ---- by hand ---------------------------------------------------------------------------------------------------------

NOISY = ModelFacts(10, None, frozenset({9}), attention="canvas", attentions=frozenset({"canvas"}), trained_block=4)
Table = Mapping[int, Sequence[float]]


def run(table: Table, sampler: DiffusionGemmaSampler, asked: int, prompt: int = 0) -> Outcome:
    """Laws that never change, whatever the canvas holds; the prompt is made of threes."""
    task = Task(0, [3] * prompt, asked, stream_key(0, 7), traced=True)
    (outcome,) = Engine(TableAdapter(NOISY, table), sampler, 1).decode([task], prompt + 3 * asked)
    assert outcome.failure is None and outcome.state is not None
    return outcome


def flat(**changes: Any) -> DiffusionGemmaSampler:
    """Temperature 1 throughout, never stable and sure, unless changed."""
    settings: dict[str, Any] = {"temperature": 1.0, "last_temperature": 1.0, "stop_entropy": 0.0, "steps_per_block": 3}
    return DiffusionGemmaSampler(**{"block_size": 4, **settings, **changes})


SURE = (0.7, 0.999, 0.99, 0.98)  # 1.27, 0.01, 0.08 and 0.14 nats
FOUR = {slot: log_probabilities(p5=p) for slot, p in enumerate(SURE)}
TWO = entropy(0.999) + entropy(0.99)


@pytest.mark.parametrize(("budget", "accepted"), [(0.0, {1}), (TWO - 1e-4, {1, 2}), (TWO + 1e-4, {1, 2, 3})])
def test_slots_are_accepted_by_ascending_entropy_and_the_others_get_fresh_noise(
    budget: float, accepted: set[int]
) -> None:
    outcome = run(FOUR, flat(entropy_budget=budget), 4)
    first, second, last = outcome.trace
    assert set(first["committed"]) == accepted and second["committed"] == second["remasked"] == []
    stream = outcome.task.stream
    for drawn, record in enumerate((first, second), start=1):
        shown = {slot: (token, confidence) for slot, token, confidence in record["changed"]}
        noise = {slot: int(10 * uniform(stream, slot, -1 - drawn)) for slot in {0, 1, 2, 3} - accepted}
        assert {slot: shown[slot] for slot in noise} == {slot: (token, 0.0) for slot, token in noise.items()}
    assert set(last["committed"]) == {0, 1, 2, 3} - accepted


def test_what_was_accepted_can_be_taken_back() -> None:
    """Of three slots, sure in the first step, the last two are unsure in the second; one may go with the sure one."""
    calls = iter(range(100))

    def table(seen: Mapping[int, int], slot: int) -> Sequence[float]:
        unsure = next(calls) in (4, 5)  # the second step's slots 1 and 2
        return log_probabilities(p5=0.4 if unsure else 1 - 1e-7)

    task = Task(0, [], 3, traced=True)
    (outcome,) = Engine(TableAdapter(NOISY, table), flat(block_size=3), 1).decode([task], 3)
    assert [record["committed"] for record in outcome.trace] == [[0, 1, 2], [], [2]]
    assert [record["remasked"] for record in outcome.trace] == [[], [2], []]
    assert outcome.state is not None and outcome.state.tokens == [5, 5, 5]
    assert outcome.state.committed_at[0] == 1 and outcome.state.committed_at[2] == 3


def test_noise_decides_nothing_and_counts_as_no_revision() -> None:
    state = DecodeState.masked([3], 2, NOISY)
    for shown in (4, 6):
        state.renoise(1, shown)
        assert (state.tokens[1], state.mask[1], state.changes[-1]) == (shown, True, 1)
    for token, revised in ((5, 0), (5, 0), (8, 1)):
        state.commit(1, token, 0.9)
        assert (state.mask[1], state.revised) == (False, revised)
        state.renoise(1, 7)
        assert (state.mask[1], state.confidences[1], state.committed_at[1]) == (True, 0.0, -1)


MEAN = sum(map(entropy, SURE)) / 4


@pytest.mark.parametrize(
    ("stable", "mean", "forwards"),
    [(1, 9.0, 2), (0, 9.0, 1), (3, 9.0, 4), (1, MEAN + 1e-4, 2), (1, MEAN - 1e-4, 5), (0, MEAN - 1e-4, 5), (9, 9.0, 5)],
)
def test_a_canvas_is_done_once_stable_and_sure_or_out_of_steps(stable: int, mean: float, forwards: int) -> None:
    outcome = run(FOUR, flat(steps_per_block=5, stable_steps=stable, stop_entropy=mean), 4)
    assert len(outcome.log) == forwards
    assert outcome.state is not None and outcome.state.tokens == [5] * 4 and not any(outcome.state.mask)


def test_the_answer_is_the_likeliest_ids_not_those_drawn() -> None:
    table = {slot: log_probabilities(p5=0.4) for slot in range(16)}
    outcome = run(table, flat(block_size=16, steps_per_block=2, entropy_budget=100.0), 16)
    drawn, last = ({slot: token for slot, token, _ in record["changed"]} for record in outcome.trace)
    assert set(drawn.values()) > {5} and set(last.values()) == {5}
    assert outcome.state is not None and outcome.state.revised == sum(token != 5 for token in drawn.values())
    assert outcome.state.confidences == pytest.approx([0.4] * 16)


def test_the_temperature_falls_linearly_towards_the_last_one() -> None:
    state = DecodeState.masked([], 1, NOISY)
    sampler = DiffusionGemmaSampler(block_size=1, steps_per_block=4, stop_entropy=0.0)
    heats, decoding = [], sampler.decode(state)
    forward: Forward | None = next(decoding)
    while forward is not None:
        heats.append(forward.law.temperature)
        said = Prediction([0], {0: 5}, {0: 0.9}, entropy={0: 0.1}, best={0: [(5, -0.1)]})
        try:
            forward = decoding.send(said)
        except StopIteration:
            forward = None
    assert heats == pytest.approx([0.8, 0.7, 0.6, 0.5])


def test_both_passes_are_billed_and_the_last_canvas_is_whole_but_not_stored() -> None:
    table = {slot: log_probabilities(p5=0.9) for slot in range(20)}
    outcome = run(table, flat(stable_steps=1, stop_entropy=9.0), 10, prompt=3)
    canvas = ["denoise", "denoise"]
    assert [run.kind for run in outcome.log] == ["prefill", *canvas, "commit", *canvas, "commit", *canvas]
    assert [(run.window, run.cached) for run in outcome.log if run.kind != "denoise"] == [(3, 0), (4, 3), (4, 7)]
    assert outcome.state is not None and len(outcome.state.tokens) == 3 + 12


def test_an_end_token_ends_the_row_with_its_canvas() -> None:
    table = {slot: log_probabilities(**{"p9" if slot == 6 else "p5": 0.9}) for slot in range(12)}
    outcome = run(table, flat(), 12)
    state = outcome.state
    assert state is not None and state.tokens[:8] == [5] * 6 + [9, 5]
    assert state.mask == [False] * 8 + [True] * 4
    assert (outcome.counts()["nfe_denoise"], outcome.counts()["nfe_commit"]) == (6, 1)


# ---- what goes with it -----------------------------------------------------------------------------------------------


def test_models_without_noise_are_refused_and_so_are_other_samplers_on_this_one() -> None:
    for attention in ("full", "blocks", "causal"):
        facts = ModelFacts(10, 8, frozenset({9}), attention=attention, attentions=frozenset({attention}))
        with pytest.raises(
            ValueError, match=rf"trained for \(the model attends by {attention}\): use model=diffusion_g"
        ):
            DiffusionGemmaSampler.check(facts)
    DiffusionGemmaSampler.check(NOISY)
    for cls in (EntropyBoundSampler, AutoregressiveSampler):
        with pytest.raises(ValueError, match="which the model does not serve"):
            cls.check(NOISY)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("temperature", 0.0, "use a number above 0: every step draws"),
        ("last_temperature", 0.9, r"use 0 to sampler.temperature=0\.8"),
        ("last_temperature", -0.1, r"use 0 to sampler.temperature=0\.8"),
        ("steps_per_block", 0, "use a whole number from 1 up"),
        ("block_size", 0, "use a whole number from 1 up"),
        ("entropy_budget", -1.0, "use a number of nats from 0 up"),
        ("stable_steps", -1, "use a whole number from 0 up"),
        ("stop_entropy", -1.0, "use a number of nats from 0 up"),
        ("eos", "last", "use allow or never"),
    ],
)
def test_settings_out_of_range_are_refused(option: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^sampler.{option}={value} is out of range: {said}"):
        DiffusionGemmaSampler(**{"block_size": 4, option: value})


def test_a_run_from_the_command_line_with_its_trace(tmp_path: Path) -> None:
    model = write_gemma(tmp_path / "gemma", vocab_size=466, eos_token_id=0)
    for file in (ROOT / "adapters" / "tiny" / "llada").glob("*token*"):
        shutil.copy(file, model)
    here = Here(tmp_path)
    options = ("model=diffusion_gemma", "model.path=gemma", "sampler.steps_per_block=6", "dataset.gen_length=10")
    out, _ = here(*options, "sampler=diffusion_gemma", "dataset.limit=2", "engine.trace=true", "logger=none", "run=a")
    assert "block_size=6 (model), steps_per_block=6 (option)" in " ".join(out.split())
    assert "presumes a training" not in out
    for row in here.run("a").rows:
        assert row["failure"] in (None, "truncated") and row["canvas"] == 12
        assert (row["nfe_prefill"], row["nfe_denoise"], row["nfe_commit"]) in ((1, 12, 1), (1, 6, 0))
        assert row["nfe"] == row["nfe_prefill"] + row["nfe_denoise"] + row["nfe_commit"]
    trace = read_trace(here.run("a").path / "trace" / "0.jsonl")
    frames = list(trace.frames())
    assert trace.counts()["remasked"] > 0
    for record, slots in zip(trace.forwards, frames[1:], strict=True):
        for slot in record["remasked"]:  # noise is shown to the model, not to the reader
            assert slots[slot - trace.canvas.start].text is None
    assert all(slot.text is not None for slot in frames[-1][:6])
    _, err = here(*options[:2], "sampler=threshold", "logger=none", code=2)
    assert "which the model does not serve (it serves canvas)" in err
