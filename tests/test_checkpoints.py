"""Lightning checkpoints as models: ours load as plain data, a foreign one only if it is trusted (LIT-06)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from tests.conftest import ROOT, CommandLine

MODEL = ROOT / "adapters" / "tiny" / "ar"


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A training's folder: ``model/`` without weights, one plain checkpoint and one with a DictConfig in it."""
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    state = {f"model.{name}": tensor for name, tensor in load_file(MODEL / "model.safetensors").items()}
    torch.save({"state_dict": state, "hyper_parameters": {"x": 1}}, tmp_path / "plain.ckpt")
    foreign = {"state_dict": state, "hyper_parameters": {"cfg": OmegaConf.create({"x": 1})}}
    torch.save(foreign, tmp_path / "foreign.ckpt")
    return tmp_path


def _weights(path: Path, **options: bool) -> dict[str, torch.Tensor]:
    description = describe(ModelOptions("checkpoint", path=str(path), **options))
    return load(description, torch.device("cpu")).model.state_dict()  # type: ignore[attr-defined]


def test_a_plain_checkpoint_holds_the_same_model_as_its_folder(training: Path) -> None:
    ours, folder = _weights(training / "plain.ckpt"), _weights(MODEL)
    assert all(torch.equal(ours[name], folder[name]) for name in folder)


def test_a_foreign_checkpoint_is_refused_by_type_and_read_only_on_trust(
    training: Path, command_line: CommandLine
) -> None:
    path = training / "foreign.ckpt"
    common = ["model=tiny_ar", f"model.path={path}", "sampler=autoregressive", "dataset.limit=1", "logger=none"]
    refused = command_line(*common, "run=a", code=2)
    assert "omegaconf" in refused.stderr and "model.trust_checkpoint=true" in refused.stderr
    assert "Traceback" not in refused.stderr
    command_line(*common, "run=b", "model.trust_checkpoint=true")
    assert command_line.summary("b")["samples"] == 1
