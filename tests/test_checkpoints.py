"""Layouts of checkpoints: Lightning's, a distributed one, older ``.bin`` files, each read without running its code."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
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


def _torn(file: Path, missing: int) -> None:
    file.write_bytes(file.read_bytes()[:-missing])


@pytest.mark.parametrize("wrap", ["state_dict.model.", "model.model.", "model.", ""])
def test_a_distributed_checkpoint_holds_the_same_model_whatever_wraps_its_names(training: Path, wrap: str) -> None:
    """Lightning's FSDP puts ``model`` before its module's names, its FSDP2 ``state_dict``; FSDP2 alone nothing."""
    folder = training / "step=9.ckpt"
    write_distributed(folder, wrap)
    ours, whole = _weights(folder), load_file(MODEL / "model.safetensors")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def write_distributed(folder: Path, wrap: str = "model.") -> None:
    """What torch.distributed.checkpoint writes of a model and its optimiser."""
    import torch.distributed.checkpoint as distributed

    tensors = load_file(MODEL / "model.safetensors")
    optimizer = {f"optimizer_0.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state = {f"{wrap}{name}": tensor for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save({**state, **optimizer, "optimizer_0.lr": 0.1}, checkpoint_id=folder, no_dist=True)


def test_a_distributed_checkpoint_of_several_ranks_is_put_together(training: Path) -> None:
    """Two processes write their halves of each tensor, as FSDP2 does."""
    folder, file = training / "two", training / "ranks.py"
    file.write_text(RANKS)
    command = [sys.executable, str(file), str(folder), str(MODEL / "model.safetensors"), str(training / "meet")]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    assert len(list(folder.glob("*.distcp"))) == 2
    ours, whole = _weights(folder), load_file(MODEL / "model.safetensors")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def write(rank, folder, model, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {f"model.{n}": distribute_tensor(t, mesh, [Shard(0)]) for n, t in load_file(model).items()}
    dcp.save({"state_dict": state}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(write, sys.argv[1:], nprocs=2)
"""


class _Command:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


def test_metadata_that_names_code_is_refused_unrun(
    training: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = training / "step=9"
    write_distributed(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(_Command()))
    with pytest.raises(ValueError, match=r"\.metadata names .*, which is no part of a checkpoint's metadata"):
        _weights(folder)
    assert not (tmp_path / "ran").exists()


def test_a_torn_distributed_checkpoint_is_told_in_one_sentence(training: Path) -> None:
    folder = training / "step=9"
    write_distributed(folder)
    (file,) = folder.glob("*.distcp")
    _torn(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"\.distcp is cut short: its \.metadata says"):
        _weights(folder)
    _torn(folder / ".metadata", 100)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        _weights(folder)


def test_the_identity_of_a_distributed_checkpoint_is_all_its_files(
    training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(training / "home"))
    folder = training / "step=9"
    write_distributed(folder)
    identity = describe(ModelOptions(path=str(folder))).identity()
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes() + b"x")
    assert describe(ModelOptions(path=str(folder))).identity() != identity


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_whole_or_in_shards_hold_the_same_model(tmp_path: Path, zipped: bool) -> None:
    folder = tmp_path / "bin"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    whole = load_file(MODEL / "model.safetensors")
    torch.save(whole, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in _weights(folder).items())
    (folder / "pytorch_model.bin").unlink()
    weight_map = {name: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, name in enumerate(whole)}
    for shard in set(weight_map.values()):
        torch.save({name: whole[name] for name in whole if weight_map[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in _weights(folder).items())


@pytest.mark.parametrize(
    "content", [b"garbage in this file", b"", b"\x80\x02K\x01K\x02a.", b"]K\x01a" * 9, b"PK\x03\x04torn"]
)
@pytest.mark.parametrize("trusted", [False, True])
def test_a_broken_file_is_called_broken_and_no_trust_is_asked_for(
    training: Path, content: bytes, trusted: bool
) -> None:
    (training / "plain.ckpt").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        _weights(training / "plain.ckpt", trust_checkpoint=trusted)
    assert re.search("is no whole file of torch.save|is no Lightning checkpoint", str(caught.value))
    assert "trust_checkpoint" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_malicious_pickle_is_refused_by_the_name_of_what_it_would_run(training: Path) -> None:
    torch.save({"state_dict": {"a": _Shell()}}, training / "bad.ckpt")
    with pytest.raises(ValueError, match=r"bad\.ckpt holds (posix|os)\.system, which could run code") as caught:
        _weights(training / "bad.ckpt")
    assert "\n" not in str(caught.value)


class _Shell:
    def __reduce__(self) -> tuple:
        return (os.system, ("true",))


def test_a_checkpoint_of_a_late_pickle_protocol_is_read_on_trust_and_without_a_warning(training: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in load_file(MODEL / "model.safetensors").items()}
    torch.save({"state_dict": state}, training / "late.ckpt", pickle_protocol=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"holds a pickle of protocol 4, .* set model\.trust_checkpoint=true only"):
            _weights(training / "late.ckpt")
        _weights(training / "late.ckpt", trust_checkpoint=True)


@pytest.mark.parametrize("content", [b"garbage", b"", pickle.dumps({"a": 1}), b"]K\x01a" * 9, b"\x80\x05\x95\xff"])
def test_metadata_that_is_none_is_told_in_one_sentence(training: Path, content: bytes) -> None:
    folder = training / "step=9"
    write_distributed(folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata (cannot be read|is no checkpoint's metadata)"):
        _weights(folder)


def test_a_file_that_is_no_lightning_checkpoint_is_told(training: Path) -> None:
    torch.save({"weights": {}}, training / "plain.ckpt")
    with pytest.raises(ValueError, match=r"plain\.ckpt is no Lightning checkpoint: it holds no state_dict"):
        _weights(training / "plain.ckpt")
