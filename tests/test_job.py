"""A job before its weights are read: its name, what makes it another job, and where it may run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from adapters.description import Description
from adapters.places import TINY
from pipeline import devices, evaluation
from pipeline.compose import compose
from pipeline.devices import device_line
from pipeline.errors import UserError
from pipeline.evaluation import load_model
from pipeline.job import Job, prepare
from pipeline.run import run_job
from pipeline.runs import RunFolder
from tests.commands import Here

RUN = ("model=tiny", "dataset.limit=2", "logger=none")


def job(*overrides: str) -> Job:
    return prepare(compose([*RUN, *overrides]), [override.partition("=")[0] for override in overrides])


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def copy_of_tiny(folder: Path) -> Path:
    shutil.copytree(TINY / "llada", folder)
    return folder


# ---- the name --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "tiny"),
        (("model.path=tiny/llada",), "llada"),
        (("model.path=tiny/llada", "model.name=mine"), "mine"),
        (("model.path=tiny/llada", "model.name=null"), "llada"),
        (("model.name=null",), "llada"),
        (("model=toy", "model.name=null"), "toy"),
        (("model=smollm2", "model.path=tiny/llada/"), "llada"),
    ],
)
def test_a_model_is_called_by_its_yaml_or_by_the_folder_given_instead(words: tuple[str, ...], name: str) -> None:
    assert job(*words).names[0] == name


def test_a_folders_name_is_shown_everywhere(here: Here) -> None:
    copy_of_tiny(here.folder / "my-folder")
    out, _ = here(*RUN, "model=smollm2", "model.path=my-folder", "dataset.limit=1")
    assert out.startswith("threshold on my-folder, 1 samples of arithmetic, cpu float32, ")
    assert re.search(r"^threshold on my-folder, arithmetic", out, re.MULTILINE)
    (status,) = here.folder.glob("outputs/*/*-my_folder-threshold-arithmetic-*/status.json")
    run = here.run(str(status.parent.relative_to(here.folder / "outputs")))
    assert run.summary["model"] == OmegaConf.load(run.path / "config.yaml").model.name == "my-folder"
    out, _ = here("-m", *RUN, "model.path=my-folder", "dataset.limit=1", "seed=0,1")
    assert len(list(here.folder.glob("outputs/sweep/my_folder-threshold-arithmetic-*"))) == 2 and "my-folder" in out


def test_two_folders_of_one_name_never_mix(here: Here) -> None:
    copy_of_tiny(here.folder / "a" / "model")
    copy_of_tiny(here.folder / "b" / "model")
    config = here.folder / "b" / "model" / "config.json"
    config.write_text(config.read_text() + "\n")  # the content's hash is another
    here(*RUN, "model.path=a/model", "run=one")
    assert "rows of other settings, prompts, weights" in here(*RUN, "model.path=b/model", "run=one", code=2)[1]
    here("-m", *RUN, "model.path=a/model,b/model")
    assert len(list(here.folder.glob("outputs/sweep/model-threshold-*/summary.json"))) == 2


# ---- what makes it another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        *("model.dtype=bfloat16", "model.confidence_dtype=model", "model.attention_kernel=dense"),
        *("model.mask_id=5", "model.shift=1", "model.block_origin=zero", "model.end_ids=[7]", "model.trained_block=8"),
        *("model.compile=true", "model.quantization={quant_method: fp8, modules: {a: 1}}", "prompt.template=raw"),
    ],
)
def test_what_can_change_a_token_makes_other_rows(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.checkpoints.quantized.check", lambda settings: None)  # wherever its quantiser runs
    one, other = job("sampler.block_size=8"), job("sampler.block_size=8", option)
    assert one.key(0) != other.key(0) and one.hash != other.hash


@pytest.mark.parametrize(
    "option",
    [
        "model.name=x",
        "model.allow_cpu=true",
        "+model.published.a=1",
        "model.dtype=float32",
        "model.quantization=null",
        "engine.max_rows=2",
    ],
)
def test_what_changes_no_token_makes_no_other_rows(option: str) -> None:
    one, other = job(), job(option)
    assert (one.key(0), one.hash) == (other.key(0), other.hash)


def test_a_model_is_loaded_again_where_it_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that are only looked at while decoding are set on the one that is there."""
    monkeypatch.setattr(evaluation, "_loaded", {})
    first = load(job())
    own = load(job("model.confidence_dtype=model", "model.mask_id=5"))
    assert own is first and (own.read_out.confidence_dtype, own.read_out.mask_id) == ("model", 5)
    assert load(job()).read_out.confidence_dtype == "float32"
    for option in ("model.attention_kernel=dense", "model.dtype=bfloat16"):
        other = load(job(option))
        assert other is not first and load(job(option)) is other


def load(made: Job) -> Any:
    return load_model(made.description, torch.device("cpu"), 64)


def test_rows_are_read_and_compared_once_before_and_once_after_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look hashes nothing anew, however many rows there are."""
    looked: list[Path] = []
    rows, made = RunFolder.rows, job()
    monkeypatch.setattr(RunFolder, "rows", lambda self: (looked.append(self.path), rows(self))[1])
    run_job(made, tmp_path / "run", ["python"])
    decoding = len(looked)
    run_job(made, tmp_path / "run", ["python"])
    assert len(looked) == decoding + 1 and decoding <= 4  # the two looks, the merge of the ranks, the summary
    assert made.key(0) is made.key(0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=toy", "model.path=/nope"), "model.path=/nope is not used: model.kind=toy has no weights"),
        (("model.base=a/b",), "model.base=a/b is not used: "),
        (("model.base_revision=x",), "model.base_revision=x is not used: "),
        (("model.package=mine",), "model.package=mine is not used: model.path=tiny/llada is what is read"),
        (("model=smollm2", "model.path=tiny/llada", "model.hub=a/b"), "model.hub=a/b is not used: model.path="),
        (("model=smollm2", "model.path=tiny/llada", "model.revision=x"), "model.revision=x is not used: model.path="),
        (("model.path={bare}", "model.end_tokens=[x]"), "model.end_tokens=['x'] is not used: "),
    ],
)
def test_an_option_that_does_nothing_is_refused_by_name(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    bare = copy_of_tiny(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError) as caught:
        job(*(word.format(bare=bare) for word in words))
    assert said in str(caught.value)


def test_a_yamls_hub_gives_way_to_a_path(tmp_path: Path) -> None:
    assert job("model=smollm2", "model.path=tiny/llada").description.notice is None


# ---- where nothing could be decoded ----------------------------------------------------------------------------------


def test_a_run_of_failures_alone_has_no_accuracy_and_ends_as_failed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(copy_of_tiny(here.folder / "nan") / "model.safetensors")
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, here.folder / "nan/model.safetensors")
    words = (*RUN, "model.path=nan")
    for _ in range(2):  # the same command again does not make it a success
        out, err = here(*words, "run=a", code=1)
        assert err.startswith("error: none of 2 samples was decoded: 2 failed; the first (") and err.count("\n") == 1
    run = here.run("a")
    assert (run.summary["accuracy"], run.summary["accuracy_low"], run.summary["failed_rate"]) == (None, None, 1.0)
    assert run.status["state"] == "failed" and len(run.rows) == 2
    out, _ = here("-m", *words, "seed=0,1", code=1)
    assert [run.status["state"] for run in here.sweep("sweep")] == ["failed", "failed"]
    assert "failed: none of 2 samples was decoded" in out


def test_some_failures_are_told_in_a_sentence(here: Here) -> None:
    (here.folder / "q.jsonl").write_text(
        '{"question": "1+1=?", "answer": "2"}\n{"question": "' + "1+" * 2000 + '1=?", "answer": "2"}\n'
    )
    out, _ = here(*RUN, "dataset=jsonl", "dataset.path=q.jsonl", "dataset.gen_length=32", "run=a")
    assert "of 2 samples 1 were too long for the model; the first (" in out
    assert here.run("a").status["state"] == "done" and here.run("a").summary["accuracy"] is not None


def test_folders_of_one_name_are_told_apart_in_a_sweeps_table(here: Here) -> None:
    for place in ("a/model", "b/model"):
        copy_of_tiny(here.folder / place)
    (here.folder / "b/model/config.json").write_text((here.folder / "b/model/config.json").read_text() + "\n")
    out, _ = here("-m", *RUN, "model.path=a/model,b/model", "dataset.limit=1")
    assert "(a/model)" in out and "(b/model)" in out


# ---- where it runs ---------------------------------------------------------------------------------------------------


def test_a_large_model_is_refused_on_a_cpu_before_its_weights_are_read(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Description, "parameters", property(lambda self: 8_015_581_184))
    monkeypatch.setattr(evaluation, "load", lambda *given: pytest.fail("weights were asked for"))
    said = "error: model=tiny has 8.02 B parameters, which a CPU takes minutes a token for: use a GPU, or set "
    for module, words in (("pipeline", ()), ("pipeline.decode", ("prompt=hi",))):
        err = here(*RUN, "trainer.accelerator=cpu", *words, module=module, code=2)[1]
        assert err == f"{said}model.allow_cpu=true\n"
    assert not list(here.folder.glob("outputs/**/*"))
    job("trainer.accelerator=cpu", "model.allow_cpu=true")
    monkeypatch.setattr(devices, "device_type", lambda accelerator: "cuda")
    job()


def test_a_thousand_million_parameters_may_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for parameters in (None, 10**9):
        monkeypatch.setattr(Description, "parameters", property(lambda self, count=parameters: count))
        job("trainer.accelerator=cpu")


class Card:
    name, total_memory = "NVIDIA H200", 139 * 2**30


@pytest.mark.parametrize(
    ("options", "count", "line"),
    [
        ((), 1, "NVIDIA H200 bfloat16, weights 14.9 GiB of 139 GiB"),
        ((), 2, "2 × NVIDIA H200 bfloat16, weights 14.9 GiB of 139 GiB each"),
        (("model.device_map=auto",), 1, "4 × NVIDIA H200 bfloat16, weights 14.9 GiB of 556 GiB"),
    ],
)
def test_the_first_line_says_device_dtype_and_memory(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], count: int, line: str
) -> None:
    made = job("model.dtype=bfloat16", *options)
    monkeypatch.setattr(Description, "weight_bytes", property(lambda self: 16_031_162_368))
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    assert device_line(made.description, {"accelerator": "auto", "devices": count}) == line


def test_what_is_not_known_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"accelerator": "cpu", "devices": 1}
    assert re.fullmatch(r"cpu float32, weights [\d.]+ MiB of [\d.]+ GiB", device_line(job().description, trainer))
    toy = job("model=toy").description
    assert re.fullmatch(r"cpu float32, [\d.]+ GiB", device_line(toy, trainer))
    monkeypatch.delattr("os.sysconf")
    assert device_line(toy, trainer) == "cpu float32"
