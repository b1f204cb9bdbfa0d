"""A sampler may presume a training; on a model that is not known to have had it the run goes on, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.compose import compose, conf_folder
from pipeline.job import Job, prepare
from tests.conftest import CommandLine
from tools.tiny_as import write_as

NOTE = "sampler=dmax presumes a training that model={} is not known to have had: on-policy uniform training (DMax)"


def job(*overrides: str) -> Job:
    given = ["model=tiny", "dataset.limit=2", "logger=none", *overrides]
    return prepare(compose(given), [override.partition("=")[0] for override in overrides])


def test_a_model_of_another_training_gets_a_note_and_one_of_this_none() -> None:
    assert job("sampler=dmax").training_note == NOTE.format("tiny")
    assert job("sampler=dmax", "model=toy").training_note == NOTE.format("toy")
    assert job("sampler=dmax", "model.training=DMax").training_note is None
    assert job("sampler=dmax", "model.training=dmax").training_note is None
    assert job("sampler=dmax", "model.training=Max").training_note is not None  # a name is a whole word


def test_a_sampler_that_presumes_nothing_gives_no_note() -> None:
    assert job("sampler=threshold").training_note is None


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("block-causal diffusion, e.g. SDAR", True),
        ("masked diffusion with full attention, e.g. Dream", False),  # as its attention tells
        ("anything, such as LLaDA", False),  # as its family's name
        ("anything, such as LLaDA2.0", True),
    ],
)
def test_attention_and_family_tell_of_a_training_too(words: str, noted: bool, tmp_path: Path) -> None:
    written = write_as("llada", tmp_path / "tiny-llada")
    assert (job(*written, f"sampler.trained_for='{words}'").training_note is not None) is noted


@pytest.mark.parametrize(("sampler", "training"), [("multibd", "MBD"), ("fast_dllm_v2", "Fast-dLLM v2")])
def test_a_block_causal_model_is_not_known_to_have_a_methods_own_training(sampler: str, training: str) -> None:
    plainly = ("model=tiny_sdar", f"sampler={sampler}")
    assert "model=tiny_sdar is not known to have had" in str(job(*plainly).training_note)
    assert job(*plainly, f"model.training={training}").training_note is None


def test_fast_dllm_v2s_family_is_trained_for_its_sampler(tmp_path: Path) -> None:
    written = write_as("fast_dllm_v2_7b", tmp_path / "tiny-v2")[:2]
    assert job(*written, "sampler=fast_dllm_v2").training_note is None
    assert job(*written, "sampler=multibd").training_note is not None


@pytest.mark.parametrize(
    ("model", "folder", "training"),
    [
        ("dmax_math", "run-7", None),
        ("dmax_math", "dmaxed", None),
        ("dmax_math", "DMax-Math-16B", "DMax"),
        ("d3llm_llada", "d3LLM_LLaDA", "d3LLM"),
        ("tad_dream", "TAD-Dream", "TAD"),
        ("dmax_math", "models--Zigeng--DMax-Math-16B/snapshots/0123abcd", "DMax"),
        ("dmax_math", "DMax/others/run-7", None),
    ],
)
def test_another_checkpoint_has_the_yamls_training_only_if_its_name_says_so(
    model: str, folder: str, training: str | None, tmp_path: Path
) -> None:
    place = tmp_path / folder
    write_as(model.partition("_")[2] if "_dream" in model else "llada", place)
    moved = (f"model={model}", f"model.path={place}", "model.revision=null", "sampler=threshold")
    assert job(*moved).config["model"]["training"] == training
    assert job(*moved, "model.training=night school").config["model"]["training"] == "night school"


def test_a_foreign_folder_under_a_trained_models_yaml_gets_the_note(tmp_path: Path) -> None:
    write_as("llada", tmp_path / "run-7")
    foreign = job("sampler=dmax", "model=dmax_math", f"model.path={tmp_path / 'run-7'}")
    assert foreign.training_note == NOTE.format("run-7")


def test_a_yaml_of_ones_own_may_say_the_training_of_its_path(tmp_path: Path) -> None:
    write_as("llada", tmp_path / "run-7")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(f"name: mine\npath: {tmp_path / 'run-7'}\ntraining: DMax\n")
    words = ["model=mine", "sampler=dmax", "dataset.limit=2", "logger=none"]
    assert prepare(compose(words, str(tmp_path)), ["model", "sampler"]).training_note is None


def test_a_preset_may_presume_more_than_its_sampler() -> None:
    made = job("sampler=dmax", "sampler.trained_for=lessons at night")
    assert made.trained_for == "lessons at night" and "lessons at night" in str(made.training_note)


def test_the_name_of_a_training_makes_no_other_job() -> None:
    assert job("sampler=dmax").hash == job("sampler=dmax", "model.training=DMax").hash
    assert job("sampler=dmax").key(0) == job("sampler=dmax", "model.training=DMax").key(0)


@pytest.mark.parametrize("name", ["dmax_16b", "dmax_coder", "dmax_math"])
def test_dmaxs_models_say_their_training(name: str) -> None:
    assert yaml.safe_load((conf_folder() / "model" / f"{name}.yaml").read_text())["training"] == "DMax"


def test_options_that_dmax_has_no_use_for_are_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"^sampler.order=entropy is not used by sampler=dmax"):
        job("sampler=dmax", "sampler.order=entropy")
    settings = job("sampler=dmax").settings
    assert "order" not in settings.values and "cfg_scale" not in settings.values


def test_the_cache_is_the_models_natural_one_unless_it_is_given() -> None:
    natural, given = job("sampler=dmax").settings, job("sampler=dmax", "sampler.cache=dual").settings
    assert (natural.values["cache"], natural.sources["cache"]) == ("none", "model")
    assert (given.values["cache"], given.sources["cache"]) == ("dual", "option")
    with pytest.raises(Exception, match=r"^sampler.cache=block is for blocks attention"):
        job("sampler=dmax", "sampler.cache=block")


@pytest.mark.slow
def test_dmax_on_llada_reaches_the_closing_table_with_its_note(tmp_path: Path, command_line: CommandLine) -> None:
    written = write_as("llada", tmp_path / "tiny-llada")
    common = ["sampler=dmax", "dataset.limit=4", "logger=none", *written]
    printed = command_line(*common, "run=dmax").stdout
    note = NOTE.format("tiny-llada")
    assert printed.count(f"note: {note}") == 2 and printed.rindex(note) > printed.index("accuracy")
    summary = command_line.summary("dmax")
    assert summary["training_note"] == note and summary["samples"] == 4 and summary["failed_rate"] == 0


@pytest.mark.slow
def test_a_sweep_says_it_once_for_a_model(command_line: CommandLine) -> None:
    swept = ["sampler=dmax,threshold", "sampler.threshold=0.5,0.9", "sampler.block_size=32"]
    printed = command_line("-m", "model=tiny", "dataset.limit=2", "logger=none", *swept).stdout
    assert printed[printed.rindex("4 jobs") :].count(NOTE.format("tiny")) == 1
