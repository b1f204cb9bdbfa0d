"""The trained tiny model in the layouts of published families: the same tokens, through each family's own path."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from adapters.base import DeviceAdapter
from adapters.description import describe
from adapters.loading import load
from adapters.places import TINY, ModelOptions
from adapters.text import TokenizerCodec
from pipeline.engine import Engine, Task
from samplers import ConfidenceSampler, ThresholdSampler
from tests.conftest import ROOT, CommandLine
from tests.layouts import LAYOUTS, shapes
from tools.tiny_as import TARGETS, main, write_as

QUESTIONS = ["Tom has 4 bags of 6 pens. He loses 5. How many pens now?", "9 + 33 = ?", "Anna has 12 eggs. à ümläute 🎈"]
FAMILY = {"llada": "LLaDA", "dream": "Dream", "fast_dllm_v2_7b": "Fast-dLLM v2"}


def adapter_of(options: ModelOptions) -> DeviceAdapter:
    return load(describe(options), torch.device("cpu"))


def as_published(name: str, folder: Path) -> DeviceAdapter:
    """Loaded with what the YAML of the family's model says, and the overrides that the tool names."""
    overrides = OmegaConf.from_dotlist(write_as(name, folder)[1:]).model
    said = OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml")
    end_tokens = OmegaConf.to_container(said).get("end_tokens", [])  # type: ignore[union-attr]
    return adapter_of(ModelOptions(name, end_tokens=end_tokens, **OmegaConf.to_container(overrides)))  # type: ignore[arg-type]


def decoded(adapter: DeviceAdapter, sampler: ConfidenceSampler | ThresholdSampler) -> list[tuple[list[int], dict]]:
    prompts = [adapter.codec.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    tasks = [Task(i, prompt, 32) for i, prompt in enumerate(prompts)]
    outcomes = sorted(Engine(adapter, sampler, max_rows=3).decode(tasks, 160), key=lambda outcome: outcome.task.index)
    return [(outcome.state.tokens, outcome.counts()) for outcome in outcomes if outcome.state]


@pytest.mark.parametrize("name", TARGETS)
def test_every_layout_decodes_token_for_token_as_the_tiny_model(tmp_path: Path, name: str) -> None:
    tiny, published = adapter_of(ModelOptions("tiny", path="tiny/llada")), as_published(name, tmp_path)
    for sampler in (ConfidenceSampler(block_size=8, steps=32), ThresholdSampler(block_size=8, steps=32, threshold=0.9)):
        ours = decoded(published, sampler)
        assert len(ours) == len(QUESTIONS) and ours == decoded(tiny, sampler)


@pytest.mark.parametrize("name", TARGETS)
def test_names_and_shapes_are_the_published_ones(tmp_path: Path, name: str) -> None:
    write_as(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    written = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert written == shapes(LAYOUTS[FAMILY[name]], config)


def test_the_further_end_tokens_change_no_encoding(tmp_path: Path) -> None:
    published, tiny = as_published("llada", tmp_path), adapter_of(ModelOptions("tiny", path=str(TINY / "llada")))
    assert isinstance(published.codec, TokenizerCodec) and isinstance(tiny.codec, TokenizerCodec)
    vocabulary = published.codec.tokenizer.get_vocab()
    ids = {vocabulary[token] for token in ("<|endoftext|>", "<|eot_id|>")}
    assert published.facts.end_ids == {0} | ids and tiny.facts.end_ids == {0}
    everything = "".join(chr(code) for code in (*range(32, 0xD800), *range(0x1F300, 0x1F600)))
    assert published.codec.tokenizer.encode(everything) == tiny.codec.tokenizer.encode(everything)


def test_a_family_that_cannot_hold_the_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^SDAR normalises queries and keys.* use model=tiny_sdar$"):
        write_as("sdar", tmp_path)
    with pytest.raises(ValueError, match=r"^gpt2 is unknown: use llada, dream, fast_dllm_v2_7b$"):
        write_as("gpt2", tmp_path)


def test_only_a_folder_of_its_own_is_written_over(tmp_path: Path) -> None:
    write_as("llada", tmp_path / "own")
    write_as("dream", tmp_path / "own")
    (tmp_path / "own" / "notes.txt").write_text("mine")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llada"}')
    for folder in (tmp_path / "own", foreign):
        with pytest.raises(ValueError, match="holds files that were not written by this tool"):
            write_as("llada", folder)
    assert (foreign / "config.json").read_text() == '{"model_type": "llada"}' and len(list(foreign.iterdir())) == 1


def test_the_command_says_faults_in_one_sentence_and_quotes_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setattr("sys.argv", ["tiny_as.py", "llada", str(folder)])
        assert main() == 2
        assert re.fullmatch(r"error: \S+ cannot be written \(.+\)\n", capsys.readouterr().err)
    monkeypatch.setattr("sys.argv", ["tiny_as.py", "llada", str(tmp_path / "a b")])
    assert main() == 0 and f"'model.path={tmp_path / 'a b'}'" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line_decodes_the_written_folder_as_the_tiny_model(
    tmp_path: Path, command_line: CommandLine
) -> None:
    common = ["sampler=threshold", "dataset.limit=8", "logger=none"]
    written = write_as("llada", tmp_path / "tiny-llada")
    command_line(*common, *written, "run=published")
    command_line(*common, "model=tiny", "run=tiny")
    theirs, ours = command_line.rows("tiny"), command_line.rows("published")
    keys = ("output_ids", "correct", "tokens", "nfe")
    assert len(ours) == 8 and [[row[key] for key in keys] for row in ours] == [
        [row[key] for key in keys] for row in theirs
    ]
