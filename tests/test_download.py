"""Fetching from a hub on this machine: what is printed, checked, refused and continued, and runs without a network."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.places import TINY
from tests.commands import Here, Process
from tests.conftest import ROOT, CommandLine
from tests.hub import Hub, serving
from tests.models import write_llada

ONLINE = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
GSM8K = ("model=toy", "dataset=gsm8k")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def here(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command in this process, with the hub and an empty cache in place of the real ones."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    return Here(tmp_path)


def in_env(hub: Hub, folder: Path, **more: str) -> dict[str, str]:
    """The same for a process of its own."""
    return {**ONLINE, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HOME": str(folder), **more}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def add_llada(hub: Hub, tmp_path: Path, name: str = "someone/tiny-llada", **changes: Any) -> str:
    """A folder in LLaDA's layout, with files that no run needs."""
    files = files_of(write_llada(tmp_path / f"made-{name.partition('/')[2]}", **changes))
    return hub.add("model", name, {**files, "README.md": b"# words", "pytorch_model.bin": b"no", "picture.png": b"\0"})


def download(here: Here, *words: str, code: int = 0) -> tuple[str, str]:
    return here(*words, module="pipeline.download", code=code)


LLADA = ("model=llada", "model.hub=someone/tiny-llada", "model.revision=null", "model.end_tokens=[]")


def test_a_model_is_announced_fetched_checked_and_pinned(here: Here, hub: Hub, tmp_path: Path) -> None:
    commit = add_llada(hub, tmp_path)
    out, _ = download(here, *LLADA)
    assert re.search(rf"model=\S+: someone/tiny-llada at main \(commit {commit}\)", out)
    assert re.search(r"  model\.safetensors +\d+\.\d\d kB\n", out) and "README" not in out and ".bin" not in out
    assert re.search(r"to fetch: 2 files, \d+\.\d\d kB, to \S+/hf/hub, where \d+\.\d\d GB are free", out)
    assert "2 files are what the hub states" in out and "21 tensors fit LLaDA" in out
    assert re.search(rf"\nto pin model=\S+: model\.revision={commit}\nready for HF_HUB_OFFLINE=1\n$", out)
    assert set(hub.sent) == {"config.json", "model.safetensors"}
    out, _ = download(here, *LLADA, f"model.revision={commit}")
    assert "to fetch: 0 files, 0 B" in out and "here already" in out and "to pin" not in out
    assert set(hub.sent.values()) == {1}, "nothing is fetched twice"


def test_what_is_on_this_machine_needs_nothing(here: Here, hub: Hub) -> None:
    for words in (
        ("model=toy",),
        ("model=tiny,tiny_ar", "dataset=arithmetic"),
        ("model=llada", f"model.path={TINY / 'llada'}", "model.end_tokens=[]"),
    ):
        out, _ = download(here, *words)
        assert (
            out.count("nothing to fetch") == (3 if "tiny_ar" in words[0] else 2) and "ready for HF_HUB_OFFLINE=1" in out
        )


BAD = {
    "a model whose place nobody knows": (["model=tad_dream"], r"model\.path and model\.hub are both null"),
    "no place at all": (["model=tiny", "model.path=null"], r"model\.path and model\.hub are both null"),
    "no such folder": (["model=llada", "model.path=/nope"], r"model\.path=/nope is no model"),
    "a folder for the toy": (["model=toy", "model.path=/nope"], r"model\.path=/nope is not used"),
    "no such dtype": (["model=tiny", "model.dtype=zz"], r"model\.dtype=zz is unknown"),
    "no id": (["model=tiny", "model.mask_id=-3"], r"model\.mask_id=-3 is no id"),
    "no such map": (["model=tiny", "model.device_map=zz"], r"model\.device_map=zz is unknown"),
    "a sweep": (["-m", "model=tiny"], r"-m makes a sweep, which only python -m pipeline decodes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_run_would_refuse_is_not_ready(name: str, here: Here, hub: Hub) -> None:
    words, sentence = BAD[name]
    out, err = download(here, *words, code=2)
    assert "ready" not in out and re.match(f"error: {sentence}", err) and err.count("\n") == 1 and not hub.sent


def test_a_local_folder_is_held_against_its_network(here: Here, hub: Hub, tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "made")
    words = ("model=llada", f"model.path={folder}", "model.end_tokens=[]")
    assert "21 tensors fit LLaDA" in download(here, *words)[0]
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "is no whole .safetensors file" in download(here, *words, code=2)[1]
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in download(here, *words, code=2)[1]


def test_a_wrong_option_is_told_before_anything_is_fetched(here: Here, hub: Hub, tmp_path: Path) -> None:
    add_llada(hub, tmp_path)
    assert "model.dtype=zz is unknown" in download(here, *LLADA, "model.dtype=zz", code=2)[1] and not hub.sent


def test_lists_fetch_each_model_once(here: Here, hub: Hub, tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_llada(hub, tmp_path, f"someone/{name}")
        (tmp_path / "my" / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / "model" / f"{name}.yaml").write_text(f"# Mine.\nname: {name}\nhub: someone/{name}\n")
    out, _ = download(here, "--config-dir", "my", "model=one,two", "dataset=arithmetic")
    assert "model=one: 21 tensors" in out and "model=two: 21 tensors" in out and hub.sent["model.safetensors"] == 2


def test_a_corrupt_file_is_named_and_removed_and_the_next_call_mends_it(here: Here, hub: Hub, tmp_path: Path) -> None:
    add_llada(hub, tmp_path)
    hub.corrupt.add("model.safetensors")
    _, err = download(here, *LLADA, code=2)
    assert re.match(
        r"error: model\.safetensors is not what the hub states \(sha256 [0-9a-f]{64}\): it was removed", err
    )
    assert not list(tmp_path.glob("hf/**/model.safetensors"))
    hub.corrupt = {"config.json"}
    shutil.rmtree(tmp_path / "hf")
    _, err = download(here, *LLADA, code=2)
    assert re.match(r"error: config\.json is not what the hub states \(blob [0-9a-f]{40}\): it was removed", err)
    hub.corrupt.clear()
    assert "ready" in download(here, *LLADA)[0]


def test_a_file_that_went_bad_on_the_disk_is_found_by_the_next_call(here: Here, hub: Hub, tmp_path: Path) -> None:
    add_llada(hub, tmp_path)
    download(here, *LLADA)
    (file,) = tmp_path.glob("hf/hub/models--*/snapshots/*/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.resolve().write_bytes(content)
    assert "model.safetensors is not what the hub states" in download(here, *LLADA, code=2)[1]
    assert "ready" in download(here, *LLADA)[0] and hub.sent["model.safetensors"] == 2


def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(here: Here, hub: Hub, tmp_path: Path) -> None:
    add_llada(hub, tmp_path, model_type="strange", architectures=["Strange"])
    assert "someone/tiny-llada: model_type=strange is of no known family" in download(here, *LLADA, code=2)[1]
    files = files_of(write_llada(tmp_path / "b"))
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    hub.add("model", "someone/tiny-llada", {**files, "model.safetensors.index.json": index})
    shutil.rmtree(tmp_path / "hf")
    _, err = download(here, *LLADA, code=2)
    assert "lacks model-00001-of-00002.safetensors, which its model.safetensors.index.json names" in err
    hub.add("model", "someone/tiny-llada", {"config.json": files["config.json"]})
    assert "holds no weights" in download(here, *LLADA, code=2)[1]
    assert not hub.sent["model.safetensors"]


def test_a_header_that_does_not_fit_the_configuration_is_refused(here: Here, hub: Hub, tmp_path: Path) -> None:
    files = files_of(write_llada(tmp_path / "made"))
    config = json.loads(files["config.json"])
    hub.add(
        "model", "someone/tiny-llada", {**files, "config.json": json.dumps({**config, "mlp_hidden_size": 40}).encode()}
    )
    _, err = download(here, *LLADA, code=2)
    assert re.search(r"ff_out\.weight has the shape \(32, 48\), the configuration wants \(32, 40\)", err)


def test_a_full_disk_is_told_before_anything_is_fetched(
    here: Here, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_llada(hub, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000_000})())
    _, err = download(here, *LLADA, code=2)
    assert re.match(
        r"error: model=\S+ needs 268\.\d\d MB in \S+, where 10\.00 MB are free: make room, or set HF_HOME", err
    )
    assert not hub.sent


def test_faults_of_hub_and_network_are_one_sentence(
    here: Here, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert "someone/tiny-llada is not on the hub, or is private" in download(here, *LLADA, code=2)[1]
    add_llada(hub, tmp_path)
    assert "has no revision nowhere" in download(here, *LLADA, "model.revision=nowhere", code=2)[1]
    assert "a/b/c/d is no id of a repository" in download(here, *LLADA, "model.hub=a/b/c/d", code=2)[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, err = download(here, *LLADA, code=2)
    assert err == "error: HF_HUB_OFFLINE=1 forbids to fetch someone/tiny-llada: unset it where there is a network\n"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    _, err = download(here, *LLADA, code=2)
    assert re.fullmatch(
        r"error: someone/tiny-llada could not be fetched \(ConnectError: .*\): run this where .*\n", err
    )


def test_the_base_of_a_lora_is_fetched_too(here: Here, hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import save
    from torch import zeros

    add_llada(hub, tmp_path, "someone/base")
    name = "base_model.model.model.transformer.blocks.0.q_proj.lora_{}.weight"
    weights = save({name.format("A"): zeros(2, 32), name.format("B"): zeros(32, 2)})
    lora = {"base_model_name_or_path": "someone/base", "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    hub.add(
        "model",
        "someone/tiny-llada",
        {"adapter_config.json": json.dumps(lora).encode(), "adapter_model.safetensors": weights},
    )
    out, _ = download(here, *LLADA)
    assert "base of model=" in out and hub.sent["model.safetensors"] == hub.sent["adapter_model.safetensors"] == 1
    assert f"model.base_revision={hub.commit('model/someone/base')}" in out and "23 tensors fit LLaDA" in out


@pytest.mark.slow
def test_a_run_without_a_network_works_on_what_was_fetched(command_line: CommandLine, hub: Hub) -> None:
    folder = command_line.folder
    hub.add("model", "someone/tiny-llada", files_of(TINY / "llada"))
    hub_words = ("model=llada", "model.hub=someone/tiny-llada", "model.revision=null", "model.end_tokens=[]")
    command_line(*hub_words, module="pipeline.download", env=in_env(hub, folder))
    offline = {**in_env(hub, folder), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    short = ("dataset.limit=2", "dataset.gen_length=32", "logger=none", "run=offline")
    command_line(*hub_words, *short, env=offline)
    assert len(command_line.rows("offline")) == 2


@pytest.mark.slow
def test_a_dataset_is_fetched_once_and_read_without_a_network(command_line: CommandLine, hub: Hub) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"question": ["1 + 1?", "2 + 2?"], "answer": ["so\n#### 2", "so\n#### 4"]})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    splits = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n".encode()
    names = ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
    commit = hub.add("dataset", "openai/gsm8k", {"README.md": card, **dict.fromkeys(names, sink.getvalue())})
    env = in_env(hub, command_line.folder)
    pinned = (*GSM8K, f"dataset.revision={commit}")
    out = command_line(*pinned, module="pipeline.download", env=env).stdout
    assert "dataset=gsm8k: 3 files are what the hub states" in out and "dataset=gsm8k: 2 samples" in out
    offline = {**env, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    command_line(*pinned, "dataset.gen_length=32", "logger=none", "run=offline", env=offline)
    assert [row["gold"] for row in command_line.rows("offline")] == ["2", "4"]


class Download(Process):
    """The command in a process of its own."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "pipeline.download", *LLADA]
        environment = {**os.environ, **env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_the_next_call_goes_on(tmp_path: Path, hub: Hub) -> None:
    add_llada(hub, tmp_path)
    hub.stall = "model.safetensors"
    env = in_env(hub, tmp_path)
    started = Download(tmp_path, env).wait_for(hub.stalled.is_set)
    began = time.monotonic()
    code, _, err = started.finish(signal.SIGINT)
    assert time.monotonic() - began < 20, "the rest of the file is not waited for"
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    assert hub.sent["config.json"] == 1
    hub.stall = None
    hub.released.set()
    again = Download(tmp_path, env).process
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0 and "ready for HF_HUB_OFFLINE=1" in out, err
    assert hub.sent["config.json"] == 1 and hub.sent["model.safetensors"] == 2
