"""``python -m pipeline.inspect``: every model on a screen, without its weights; a folder is held against its family."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoints.fit import Targets, fit
from adapters.description import describe
from adapters.facts import Inspection, inspect
from adapters.loading import check, load
from adapters.places import ModelOptions
from adapters.tensors import Piece
from pipeline.compose import compose, options
from pipeline.devices import device_line
from pipeline.inspect import WIDTH, all_models, inspect_model, print_model
from pipeline.inspection import OVERVIEW, overview
from pipeline.inspection import describe as describe_lines
from tests import layouts
from tests.commands import Here
from tests.conftest import ROOT
from tests.drafters import write_drafter
from tests.shared import shared

GOLDEN = ("llada", "dream", "sdar", "llada2_moe", "fastdllm_v2", "dflash/target")
MODELS = [name for name in options("model") if name != "toy"]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden SDAR checkpoint that a test may break."""
    copied = tmp_path / "broken"
    shutil.copytree(shared("golden", "sdar", "model"), copied, copy_function=shutil.copyfile)
    return copied


def of_folder(folder: Path, **more: Any) -> Inspection:
    return inspect(ModelOptions("it", path=str(folder), **more))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the configuration; a value of None removes its key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


def words(text: str) -> str:
    return " ".join(text.split())


# ---- recorded facts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("tiny")])
def test_every_model_fits_on_a_screen_and_in_a_second(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose([f"model={name}"])
    start = time.process_time()
    print_model(cfg, name)
    took, lines = time.process_time() - start, capsys.readouterr().out.splitlines()
    assert took < 1 and len(lines) <= 40 and max(map(len, lines)) <= WIDTH
    told = words(" ".join(lines))
    assert "told from the facts recorded in its YAML" in told and "weights here no, nor is the index" in told
    assert (name == "smollm2") != ("Never run on the released weights." in told)


def test_an_experiments_model_is_looked_at(here: Here) -> None:
    assert "hub Zigeng/DMax-Math-16B" in words(here("experiment=dmax_gsm8k", module="pipeline.inspect")[0])
    other = words(here("experiment=dmax_gsm8k", "model=llada", module="pipeline.inspect")[0])
    assert "hub GSAI-ML/LLaDA-8B-Instruct" in other


def test_an_experiment_that_is_a_sweep_is_looked_at_and_not_run(here: Here) -> None:
    told = words(here("experiment=tradeoff", module="pipeline.inspect")[0])
    assert "family masked diffusion on a native architecture" in told and not (here.folder / "outputs").exists()


def test_what_is_told_of_a_mixture_of_experts(here: Here) -> None:
    out, _ = here("model=llada2_mini", module="pipeline.inspect")
    told = words(out)
    for text in (
        "family LLaDA2, model_type llada2_moe architecture glm4_moe, native in transformers",
        "parameters 16.26 B, 1.43 B of them for a token",
        "layers 20 of width 2048, 16 heads of 128, 4 for keys and values",
        "experts 256 a layer, 8 a token, 1 shared by all",
        "by blocks of 32 counted from position 0",
        "token i is read at row i ids mask 156895; ends 156892; padding 156892; vocabulary 157184",
        "weights 30.3 GiB in bfloat16, 60.6 GiB in float32",
        "cache 39.1 MiB a row of 1000 slots in bfloat16",
        "inclusionAI/LLaDA2.0-mini, dad945cac317da394b390f82c7b40691d8a881ed",
    ):
        assert text in told


def test_memory_is_that_of_the_dtype_and_the_rows_asked_for(here: Here) -> None:
    out, _ = here("model=sdar_8b", "model.dtype=float32", "engine.max_rows=1", module="pipeline.inspect")
    weights, cache = 8_190_735_360 * 4 / 2**30, 2 * 36 * 8 * 128 * 1000 * 4 / 2**30
    assert f"together {weights + cache + 0.25:.3g} GiB in float32 with 1 such rows" in words(out)
    assert "overrides model.dtype=float32" in words(out)


def test_a_lora_is_told_by_its_base(here: Here) -> None:
    told = words(here("model=d2f_dream", module="pipeline.inspect")[0])
    assert "base Dream-org/Dream-v0-Base-7B" in told and "hub SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora" in told
    assert "overrides model.attention=blocks, model.trained_block=16" in told
    assert "by blocks of 16 counted from the prompt's end" in told and "read at row i - 1" in told


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        (
            ["model=tiny_ar_dflash"],
            "tiny/ar_dflash, DFlash: blocks of 16 with the last known token, mask 1, fed by layers 1, 2, 3",
        ),
        (
            ["model=qwen3_4b_dflash"],  # from what is recorded of it
            "z-lab/Qwen3-4B-DFlash-b16, DFlash: blocks of 16 with the last known token, mask 151669, fed by layers "
            "1, 9, 17, 25, 33",
        ),
        (
            ["model=tiny_ar", "model.draft=tiny/llada"],
            "tiny/llada, a diffusion model of its own: full attention, mask 1",
        ),
    ],
)
def test_a_drafter_is_told_in_a_line(here: Here, options: list[str], drafter: str) -> None:
    told = words(here(*options, module="pipeline.inspect")[0])
    assert f"drafter {drafter}" in told and " such rows, the drafter and 256 MiB of logits" in told


def test_a_drafters_needs_are_told_and_counted_in_what_is_needed_together(here: Here) -> None:
    told = words(here("model=qwen3_4b_dflash", module="pipeline.inspect")[0])
    # five layers: four projections of attention, three of the MLP, four norms; then fc and two norms
    layer = 2560 * 128 * (2 * 32 + 2 * 8) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    drafter = 5 * layer + 5 * 2560 * 2560 + 2 * 2560
    assert f"{drafter / 1e6:.2f} M parameters, 1 GiB in bfloat16, cache 19.5 MiB a row; weights here: no" in told
    target, slots = 4_022_468_096, 8 * 1000 * 2 * 8 * 128 * (36 + 5)
    assert f"together {(2 * (target + drafter + slots) + 2**28) / 2**30:.3g} GiB in bfloat16 with 8 such rows" in told


def test_a_drafter_whose_weights_are_broken_or_do_not_fit_is_told(tmp_path: Path, here: Here) -> None:
    layouts.write(tmp_path / "target", "causal language model", num_hidden_layers=3)
    file = write_drafter(tmp_path / "draft") / "model.safetensors"
    words_ = (f"model.path={tmp_path / 'target'}", f"model.draft={tmp_path / 'draft'}")
    save_file({**load_file(file), "stray": torch.ones(8)}, file)
    out, err = here("model=tiny_ar", *words_, module="pipeline.inspect", code=2)
    assert "weights here: yes: of 26 tensors, 1 tensor has no place (stray (8,))" in words(out)
    assert "draft does not fit DFlashDraftModel: 1 tensor has no place" in words(err)
    file.write_bytes(file.read_bytes()[:-100])
    out, err = here("model=tiny_ar", *words_, module="pipeline.inspect", code=2)
    assert out == "" and re.match(r"error: model\.draft=.*draft: .* is no whole \.safetensors file", err)


@pytest.mark.parametrize(
    ("model", "fitting"),
    [("tiny_ar_dflash", "autoregressive, ddtree, dflash, presto"), ("tiny_ar", "autoregressive")],
)
def test_samplers_are_those_that_decode_the_model_with_their_own_settings(model: str, fitting: str) -> None:
    cfg = compose([f"model={model}"])
    assert dict(describe_lines(inspect_model(cfg), cfg))["samplers"] == fitting


def test_a_runs_line_counts_the_drafters_weights() -> None:
    alone, together = (describe(ModelOptions("it", path="tiny/ar", draft=draft)) for draft in (None, "tiny/ar_dflash"))
    assert "weights 4.46 MiB of" in device_line(alone, {"accelerator": "cpu", "devices": 1})
    assert "weights 6.65 MiB of" in device_line(together, {"accelerator": "cpu", "devices": 1})


def test_a_model_without_a_drafter_tells_of_none(here: Here) -> None:
    assert " drafter " not in words(here("model=tiny", module="pipeline.inspect")[0])


def test_inspecting_loads_no_heavy_library() -> None:
    code = "import sys, pipeline.inspect as p; from pipeline.compose import compose"
    code += "; cfg = compose(['model=qwen3_4b_dflash']); list(p.describe(p.inspect_model(cfg), cfg))"
    code += "; print([n for n in ('torch', 'transformers', 'datasets', 'wandb') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hubs_cache_comes_before_recorded_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, repository = "a" * 40, tmp_path / "models--some--sdar"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(shared("golden", "sdar", "model"), snapshot, copy_function=shutil.copyfile)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    found = inspect(ModelOptions("mine", hub="some/sdar", published={"model_type": "sdar"}))
    assert found.source.folder == snapshot and found.fit and found.fit.faultless
    with pytest.raises(ValueError, match=r"model.hub=some/other is not in the hub's cache and nothing is recorded"):
        inspect(ModelOptions("mine", hub="some/other"))


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN)
def test_a_folder_is_told_as_a_run_would_take_it(golden: str) -> None:
    path = shared("golden", *golden.split("/"), *([] if "/" in golden else ["model"]))
    found, described = of_folder(path), describe(ModelOptions("it", path=str(path)))
    assert found.facts == described.facts and found.family is described.family
    assert found.sizes.parameters == described.parameters
    assert found.fit and found.fit.faultless and found.fit.shapes


@pytest.mark.parametrize("name", ["tiny", "tiny_ar"])
def test_the_tiny_models_end_tokens_are_those_of_their_tokenizer(name: str) -> None:
    chosen = ModelOptions(name, path={"tiny": "tiny/llada", "tiny_ar": "tiny/ar"}[name])
    assert inspect(chosen).facts == describe(chosen).facts
    for token in ("<|end|>", "pens"):
        assert inspect(ModelOptions(name, path=chosen.path, end_tokens=[token])).facts.end_ids
    with pytest.raises(ValueError, match=r"model.end_tokens: <\|nope\|> is not a token of model=tiny"):
        inspect(ModelOptions(name, path=chosen.path, end_tokens=["<|nope|>"]))


def test_an_index_is_enough_to_place_the_tensors_by_name(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    found = of_folder(folder).fit
    assert found and found.sentence() == f"all {len(tensors)} tensors have a place, by name"
    del homes["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": homes | {"extra": "model-00001-of-00001.safetensors"}}))
    found = of_folder(folder).fit
    assert found and (found.left_over, found.unfilled) == (("extra",), ("model.norm.weight",))
    index.write_text("[]")
    with pytest.raises(ValueError, match="is no index of shards"):
        of_folder(folder).fit  # noqa: B018 - read when asked for


def test_no_weights_at_all_is_said(folder: Path, here: Here) -> None:
    (folder / "model.safetensors").unlink()
    out, _ = here("model=llada", f"model.path={folder}", module="pipeline.inspect")
    assert "weights here no, nor is the index" in words(out) and out.startswith("broken ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors | {"extra": torch.zeros(1)}, r"1 tensor has no place \(extra \(1,\)\)"),
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(7)},
            r"model.norm.weight has the shape \(7,\), the configuration wants \(64,\)",
        ),
        (
            lambda tensors: {k: v for k, v in tensors.items() if k != "model.norm.weight"},
            r"1 parameter got no tensor \(model.norm.weight\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_told_and_refused(folder: Path, here: Here, change: Any, sentence: str) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    out, err = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
    assert re.search(sentence, words(out)) and re.search(
        f"error: .*broken does not fit qwen3: .*{sentence}", words(err)
    )


def test_an_expert_too_many_and_fused_projections_of_a_wrong_height_are_told(tmp_path: Path) -> None:
    copied = tmp_path / "moe"
    shutil.copytree(shared("golden", "llada2_moe", "model"), copied, copy_function=shutil.copyfile)
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.experts.16.up_proj.weight"] = tensors[
        "model.layers.1.mlp.experts.15.up_proj.weight"
    ].clone()
    fused = "model.layers.0.attention.query_key_value.weight"
    tensors[fused] = tensors[fused][:-1].clone()
    save_file(tensors, copied / "model.safetensors")
    found = of_folder(copied).fit
    assert found and (found.left_over, found.unfilled) == ((), ())
    assert set(found.wrong) == {
        "model.layers.1.mlp.experts.16.up_proj.weight is of expert 16, the configuration's last is 15",
        f"{fused} has the shape (127, 64), the configuration wants (128, 64)",
    }


def test_inspecting_checking_and_loading_say_the_same_of_a_folder(folder: Path) -> None:
    """Also of what may be left over, and of two tensors for one place."""
    tensors = load_file(folder / "model.safetensors")
    description = describe(ModelOptions("it", path=str(folder)))
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    assert (found := of_folder(folder).fit) and found.faultless and check(description) == found.tensors == 37
    load(description, torch.device("cpu"))
    save_file({**tensors, "stray": torch.ones(8)}, folder / "model.safetensors")
    found = of_folder(folder).fit
    for refuse in (check, lambda it: load(it, torch.device("cpu"))):
        with pytest.raises(ValueError) as caught:
            refuse(description)
        assert found and str(caught.value) == f"{folder} does not fit Qwen3ForCausalLM: {found.sentence()}"


def test_two_tensors_for_one_place_are_told_even_if_one_is_a_part_of_it() -> None:
    targets, twin = Targets({"a": (4, 2), "b": (3, 2, 2)}), {"x": [Piece("a")], "y": [Piece("a")]}
    assert fit({"x": (4, 2), "y": (4, 2)}, targets, twin.__getitem__).wrong == ("x and y are both a",)
    part = {"x": [Piece("b")], "y": [Piece("b", expert=1)], "z": [Piece("a")]}
    found = fit({"x": (3, 2, 2), "y": (2, 2), "z": None}, targets, part.__getitem__)
    assert found.wrong == ("b is filled more than once",) and not found.unfilled and not found.shapes


def test_a_lora_folder_is_told_by_a_base_folder_or_by_recorded_facts(tmp_path: Path) -> None:
    base = shared("golden", "sdar", "model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/where"}))
    assert of_folder(tmp_path, base=str(base)).source.folder == base
    recorded = json.loads((base / "config.json").read_text())
    found = of_folder(tmp_path, published=recorded)
    assert found.source.adapter == tmp_path and found.facts.mask_id == recorded["mask_token_id"]
    with pytest.raises(ValueError, match=r"the base model some/where of .* is not here: set model.base"):
        of_folder(tmp_path)


# ---- bad input -------------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": (
        {"model_type": "what", "architectures": ["What"]},
        r"model_type=what is of no known family; known are: .*LLaDA2",
    ),
    "a missing size": ({"hidden_size": None}, r"lacks 'hidden_size'"),
    "a size in words": ({"hidden_size": "abc"}, r"hidden_size=abc is out of range: use a whole number from 1 up"),
    "no width that can be cut": ({"hidden_size": "abc", "head_dim": None}, r"hidden_size=abc is out of range"),
    "no layers": ({"num_hidden_layers": 0}, r"num_hidden_layers=0 is out of range"),
    "heads in words": ({"num_attention_heads": "abc"}, r"num_attention_heads=abc is out of range"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_told_in_one_sentence(name: str, folder: Path, here: Here) -> None:
    changes, sentence = BROKEN[name]
    rewrite(folder, **changes)
    out, err = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
    assert out == "" and err.count("\n") == 1 and re.match(f"error: model=broken: .*config.json.*{sentence}", err)


BAD = {
    "no such model": (["model=nope"], r"model=nope does not exist; choose from .*llada2_mini"),
    "no such option": (["model.pth=x"], r"model.pth is no option: did you mean model.path\?"),
    "no such folder": (
        ["model=llada", "model.path=absent"],
        r"model.path=absent is no model: config.json was not found",
    ),
    "no such dtype": (["model=llada", "model.dtype=int8"], r"model.dtype=int8 is unknown: use float32, bfloat16"),
    "no id": (
        ["model=llada", "model.mask_id=126464"],
        r"model.mask_id=126464 is no id of model=llada: use 0 to 126463",
    ),
    "no pattern": (["model=llada", "model.attention=round"], r"model.attention=round is unknown: use full or blocks"),
    "no shift": (["model=llada", "model.shift=2"], r"model.shift=2 is unknown: use 0 or 1"),
    "no block": (["model=llada", "model.trained_block=0"], r"model.trained_block=0 is out of range"),
    "a toy": (["model=toy"], r"model=toy has no configuration"),
    "no confidence": (["model=llada", "model.confidence_dtype=zz"], r"model.confidence_dtype=zz is unknown"),
    "no kernel": (["model=llada", "model.attention_kernel=zz"], r"model.attention_kernel=zz is unknown"),
    "no map": (["model=llada", "model.device_map=zz"], r"model.device_map=zz is unknown: use auto"),
    "a sweep": (["-m", "model=tiny"], r"-m makes a sweep, which only python -m pipeline decodes"),
    "a sweep by its mode": (["hydra.mode=MULTIRUN", "model=tiny"], r"hydra.mode=MULTIRUN makes a sweep"),
    "no model": (["sampler=threshold"], r"sampler=threshold tells nothing of a model: add model=… or exp"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(name: str, here: Here) -> None:
    words_, sentence = BAD[name]
    out, err = here(*words_, module="pipeline.inspect", code=2)
    assert out == "" and re.match(f"error: {sentence}", err) and err.count("\n") == 1


def test_broken_weights_are_told_as_a_run_tells_them(folder: Path, here: Here) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for content, sentence in ((whole[:-100], "is no whole .safetensors file"), (b"", "is no whole .safetensors file")):
        (folder / "model.safetensors").write_bytes(content)
        _, err = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
        assert err.count("\n") == 1 and sentence in err
        with pytest.raises(ValueError) as caught:
            check(describe(ModelOptions("it", path=str(folder))))
        assert err == f"error: {caught.value}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_weights_that_may_not_be_read_are_told_so(folder: Path, here: Here) -> None:
    (folder / "model.safetensors").chmod(0)
    _, err = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
    assert "cannot be read (Permission denied)" in err and err.count("\n") == 1


def test_an_empty_yaml_of_ones_own_is_called_by_its_name(tmp_path: Path, here: Here) -> None:
    (tmp_path / "my" / "model").mkdir(parents=True)
    (tmp_path / "my" / "model" / "mine.yaml").write_text("")
    _, err = here("--config-dir", "my", "model=mine", module="pipeline.inspect", code=2)
    assert re.match(r"error: model=mine: model.hub is null and nothing is recorded of it", err)


def test_a_narrow_terminal_is_kept_to(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out, _ = here("model=llada2_mini", module="pipeline.inspect")
    assert max(map(len, out.splitlines())) <= 60 and "16.26 B" in out


def test_faults_are_told_with_how_many_tensors_there_are(folder: Path, here: Here) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra": torch.zeros(1)}, folder / "model.safetensors")
    out, _ = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
    assert f"weights here yes: of {len(tensors) + 1} tensors, 1 tensor has no place (extra (1,))" in words(out)


def test_a_configuration_that_is_no_json_is_told_in_one_sentence(folder: Path, here: Here) -> None:
    (folder / "config.json").write_text("{")
    _, err = here("model=sdar_8b", f"model.path={folder}", module="pipeline.inspect", code=2)
    assert re.match(r"error: .*config.json is not valid JSON", err)


# ---- the documentation -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_models_are_told_one_line_each_and_the_documentation_has_the_same_table(here: Here) -> None:
    lines = here(module="pipeline.inspect")[0].splitlines()
    assert [line.split()[0] for line in lines[1:]] == MODELS
    rows = [("model", "hub id", *OVERVIEW[2:]), ("---",) * len(OVERVIEW)]
    for name, found in all_models():
        if isinstance(found, Inspection) and not name.startswith("tiny"):
            rows.append((f"`{name}`", found.options.hub or "", *overview(found)[2:]))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in (ROOT / "docs" / "models.md").read_text(), f"docs/models.md should hold\n{table}"


def test_the_command_itself_is_quick() -> None:
    """In processor time: the wall's depends on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.inspect", "model=llada2_flash"], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "102.89 B" in done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
