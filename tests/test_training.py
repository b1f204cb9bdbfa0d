"""Training: what a step sees, resuming, and that an exported model decodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from pipeline.data.arithmetic import make_problems, words
from pipeline.tokenizer import build_tokenizer
from pipeline.train import IGNORE, Batches, learning_rate_scale
from tests.conftest import ROOT, CommandLine

SMALL = ["recipe.steps=150", "recipe.batch_size=8", "recipe.hidden_size=32", "recipe.intermediate_size=64"]
SMALL += ["recipe.layers=1", "recipe.heads=2"]


def _recipe(objective: str) -> OmegaConf:
    return OmegaConf.create({"objective": objective, "batch_size": 16, "level_weights": [1, 1, 1, 1]})


def test_a_step_depends_on_seed_epoch_and_index_alone() -> None:
    tokenizer = build_tokenizer(words())
    first, again = (Batches(_recipe("masked"), tokenizer, seed=0, epoch=3)[7] for _ in range(2))
    other = Batches(_recipe("masked"), tokenizer, seed=0, epoch=4)[7]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0][:, :20], other[0][:, :20])


def test_masked_targets_are_the_masked_answer_tokens_and_nothing_else() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("masked"), tokenizer, seed=0, epoch=0)[0]
    masked = inputs == tokenizer.mask_token_id
    assert torch.equal(masked, targets != IGNORE)
    whole = torch.where(masked, targets, inputs)
    for row, hidden in zip(whole.tolist(), masked.tolist()):
        answer = row.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
        assert not any(hidden[:answer])
        assert "####" in tokenizer.decode(row[answer:])


def test_causal_targets_are_the_next_answer_tokens_up_to_the_first_end() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("causal"), tokenizer, seed=0, epoch=0)[0]
    for row, wanted in zip(inputs.tolist(), targets.tolist()):
        learnt = [token for token in wanted if token != IGNORE]
        start = row.index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        assert wanted[start] == learnt[0] and learnt.count(tokenizer.eos_token_id) == 1
        assert learnt[-1] == tokenizer.eos_token_id and "####" in tokenizer.decode(learnt)


def test_no_test_problem_is_a_training_problem_under_other_names() -> None:
    for level in (1, 2, 3, 4):
        held_out = {problem.operations for problem in make_problems("test", level, 200)}
        assert held_out.isdisjoint(problem.operations for problem in make_problems("train", level, 2000))


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    recipe = OmegaConf.create({"steps": 1000, "warmup": 100, "decay": 0.6})
    scales = [learning_rate_scale(step, recipe) for step in (0, 99, 400, 700, 999)]
    assert scales == pytest.approx([0.01, 1.0, 1.0, 0.5, 1 / 600])


@pytest.mark.parametrize("text", ["Tom has 119 pens.", "naïve ∞ 12345 <|mask|> \n\n\tend", "", "日本 🙂 e=mc²"])
def test_the_tiny_tokenizer_encodes_any_text_and_gives_it_back(text: str) -> None:
    tokenizer = build_tokenizer(words())
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.mask_token_id not in ids


def test_numbers_and_words_are_one_token_each() -> None:
    tokenizer = build_tokenizer(words())
    problem = make_problems("train", 3, 1)[0]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(problem.question + problem.answer).input_ids)
    assert all(piece.startswith("Ġ") or piece in {",", ".", "?"} for piece in pieces[1:])


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_weights(command_line: CommandLine) -> None:
    curve = command_line.folder / "outputs" / "train" / "cut" / "loss.jsonl"
    command = [sys.executable, "-m", "pipeline.train", "recipe=tiny", "run=cut", *SMALL]
    process = subprocess.Popen(command, cwd=command_line.folder, env={**_environment(), "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (curve.exists() and (curve.parent / "last.ckpt").exists()):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    weights = curve.parent / "model" / "model.safetensors"
    assert not weights.exists(), "it was done before it could be cut"
    checkpoint = f"model.path={curve.parent / 'last.ckpt'}"
    command_line("model=tiny", checkpoint, "dataset.limit=2", "run=halfway", "logger=none")
    command_line("recipe=tiny", "run=cut", *SMALL, module="pipeline.train")
    command_line("recipe=tiny", "run=whole", *SMALL, module="pipeline.train")
    cut, whole = (
        load_file(command_line.folder / "outputs" / "train" / run / "model" / "model.safetensors")
        for run in ("cut", "whole")
    )
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    model = command_line.folder / "outputs" / "train" / "cut" / "model"
    command_line("model=tiny", f"model.path={model}", "dataset.limit=4", "run=decoded", "logger=none")
    assert command_line.summary("decoded")["complete"]


def _environment() -> dict[str, str]:
    import os

    from tests.conftest import OFFLINE

    return {**os.environ, **OFFLINE}


def test_the_shipped_weights_carry_their_card_and_stay_small() -> None:
    for name in ("llada", "ar"):
        folder: Path = ROOT / "adapters" / "tiny" / name
        assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
        record = json.loads((folder / "training.json").read_text())
        assert 1_000_000 <= record["parameters"] <= 4_000_000
        assert record["config"]["seed"] == 0 and record["seconds"] > 0
    assert "python -m pipeline.train recipe=tiny" in (ROOT / "adapters" / "tiny" / "README.md").read_text()
