"""A dump of the authors' code against our model: the golden checkpoints agree, and a changed dump is told apart."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.reference import read_reference
from tests.commands import Here
from tests.conftest import ROOT
from tests.shared import shared

# family: [(ids, logits, what a position sees)] of its forward.safetensors
FULL = {"pattern": "full"}
GOLDEN: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "llada": [("ids", "logits", FULL), ("ids2", "logits2", FULL)],
    "dream": [("ids", "logits", FULL)],
    "sdar": [("ids", "logits", {"pattern": "blocks", "first": 0, "size": 4})],
    "llada2_moe": [("ids", "logits_blockmask", {"pattern": "blocks", "first": 0, "size": 8})],
    "fastdllm_v2": [
        ("ids", "logits_b8", {"pattern": "blocks", "first": 0, "size": 8}),
        ("ids", "logits_b32", {"pattern": "blocks", "first": 0, "size": 32}),
    ],
}
SCRIPTS = {"llada2_moe": "llada2", "fastdllm_v2": "fast_dllm_v2"}  # names of the script's where they are others
Tensors = dict[str, torch.Tensor]


def golden_dump(family: str) -> tuple[Tensors, dict[str, Any]]:
    """What the dumping script would have written for a golden checkpoint, answers left out."""
    found = load_file(shared("golden", family, "forward.safetensors"))
    tensors: Tensors = {}
    forwards = []
    for ids, logits, attend in GOLDEN[family]:
        for row in range(len(found[ids])):
            name = f"{logits}.{row}"
            tensors[f"forwards.{name}.ids"] = found[ids][row].clone()
            tensors[f"forwards.{name}.rows"] = torch.arange(found[logits].shape[1])
            tensors[f"forwards.{name}.logits"] = found[logits][row].clone()
            best = found[logits][row].topk(2, dim=-1)
            tensors[f"forwards.{name}.argmax"] = best.indices[:, 0].contiguous()
            tensors[f"forwards.{name}.margin"] = best.values[:, 0] - best.values[:, 1]
            forwards.append({"name": name, "attend": attend})
    names = {"family": SCRIPTS.get(family, family), "model": f"golden {family}", "dtype": "float32", "device": "cpu"}
    about = {"format": 2, **names, "rows": "raw", "mask_id": 255, "end_ids": [254], "chat_template": False}
    return tensors, {**about, "prompts": [], "forwards": forwards, "decoding": None}


def llada_dump() -> tuple[Tensors, dict[str, Any]]:
    """With the answers of the authors' generate."""
    tensors, about = golden_dump("llada")
    cases = json.loads(shared("golden", "llada", "cases.json").read_text())["cases"]
    (case,) = [case for case in cases if case["name"] == "llada_lowconf_g32_b8_s16"]
    for n, (prompt, output) in enumerate(zip(case["prompts"], case["output"], strict=True)):
        tensors[f"prompts.{n}"] = torch.tensor(prompt)
        tensors[f"decoded.{n}"] = torch.tensor(output[len(prompt) :])
    about["prompts"] = [{"text": None} for _ in case["prompts"]]
    ours = {"sampler": "confidence", "block_size": 8, "steps": 16}
    about["decoding"] = {"settings": case["settings"], "ours": ours, "gen_length": 32}
    return tensors, about


def write(path: Path, tensors: Tensors, about: dict[str, Any]) -> str:
    save_file(tensors, path, metadata={"blockdiff_reference": json.dumps(about)})
    return str(path)


def arguments(family: str, dump: str) -> list[str]:
    return ["model=llada", f"model.path={shared('golden', family, 'model')}", "--reference", dump]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.mark.parametrize("family", GOLDEN)
def test_a_golden_checkpoint_agrees_with_its_dump(here: Here, family: str) -> None:
    dump = write(here.folder / "dump.safetensors", *golden_dump(family))
    out, _ = here(*arguments(family, dump), module="pipeline.verify")
    figures = re.findall(r"│ (\S+) +│ +(\S+) │ +\S+ │ +(\S+) │ +(\d+) of (\d+) │ ok", out)
    assert len(figures) >= len(GOLDEN[family]) and all(float(largest) < 2e-5 for _, largest, *_ in figures)
    assert all(agree == total for *_, agree, total in figures)
    assert "prompts: not compared" in out and "answers: not compared, the reference has none" in out
    assert "agrees with the reference" in out


def test_answers_agree_and_a_changed_one_is_named_by_its_first_differing_token(here: Here) -> None:
    tensors, about = llada_dump()
    dump = write(here.folder / "dump.safetensors", tensors, about)
    out, _ = here(*arguments("llada", dump), module="pipeline.verify")
    assert "answers: 3 of 3 are equal" in out
    ours = int(tensors["decoded.1"][5])
    tensors["decoded.1"][5] = theirs = (ours + 1) % 250
    out, _ = here(
        *arguments("llada", write(here.folder / "dump.safetensors", tensors, about)), module="pipeline.verify", code=1
    )
    assert "answers: 2 of 3 are equal" in out
    assert f"answer 1: 1 of 32 tokens differ; token 5 is {ours} '{ours}', the reference has {theirs} '{theirs}'" in out
    assert re.search(r"our probabilities (0\.\d+|1\.0+) and 0\.\d+, no tie", out) and "does not agree" in out


def test_a_sampler_named_on_the_command_line_goes_before_that_of_the_dump(here: Here) -> None:
    dump = write(here.folder / "dump.safetensors", *llada_dump())
    others = ["sampler=threshold", "sampler.threshold=0.0", "sampler.block_size=8"]
    out, _ = here(*others, *arguments("llada", dump), module="pipeline.verify", code=1)
    assert "answers: 0 of 3 are equal" in out


def test_logits_that_differ_are_refused_with_the_first_differing_argmax(here: Here) -> None:
    tensors, about = golden_dump("llada")
    logits = tensors["forwards.logits.0.logits"]
    logits[7, 3] = logits[7].max() + 1
    tensors["forwards.logits.0.argmax"][7], tensors["forwards.logits.0.margin"][7] = 3, 1.0
    out, _ = here(*arguments("llada", write(here.folder / "d", tensors, about)), module="pipeline.verify", code=1)
    assert re.search(r"logits\.0 .* 43 of 44 │ DIFFERS", out)
    assert re.search(r"logits\.0: first differing argmax at row 7: \d+ here, 3 there, margin 1\.00e\+00", out)


def test_half_precision_has_a_wider_tolerance_that_still_tells_a_wrong_rotation(here: Here) -> None:
    tensors, about = golden_dump("llada")
    dump = write(here.folder / "d", tensors, {**about, "dtype": "bfloat16"})
    out, _ = here(*arguments("llada", dump), module="pipeline.verify")
    assert "bfloat16, root mean square at most 1.56e-02 of the largest logit" in out
    changed = here.folder / "other"
    changed.mkdir()
    for file in shared("golden", "llada", "model").iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rope_theta": config["rope_theta"] / 2}))
    words = ["model=llada", f"model.path={changed}", "--reference", dump]
    assert "DIFFERS" in here(*words, module="pipeline.verify", code=1)[0]


def _no_metadata(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path)


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _changed(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with safe_open(path, framework="pt") as opened:
            about = json.loads(opened.metadata()["blockdiff_reference"])
        write(path, load_file(path), {**about, **changes})

    return change


def _without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors, about = golden_dump("llada")
        del about[key]
        write(path, tensors, about)

    return change


def _rewritten(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors, about = golden_dump("llada")
        write(path, {**tensors, name: how(tensors[name]).contiguous()}, about)

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, r"--reference=\S+ cannot be read \(|--reference=\S+ cannot be read"),
        (_no_metadata, r"is no reference: it must be written by tools/dump_reference\.py"),
        (_torn, r"is no whole \.safetensors file"),
        (_changed(format=9), r"of another version .*format 9 is not 2.*write it again"),
        (_changed(rows="shifted"), r"rows shifted is none of raw"),
        (_changed(family="gpt"), r"family gpt is none of llada, "),
        (_changed(forwards=[]), r"it has no forward"),
        (_changed(chat_template="yes"), r"chat_template is neither true nor false"),
        (_changed(end_ids=[256]), r"mask_id and end_ids: 256 is no id below 256"),
        (_without("mask_id"), r"is damaged .*it lacks 'mask_id'"),
        (_without("decoding"), r"is damaged .*it lacks 'decoding'"),
        (_changed(decoding={"settings": {}, "ours": "confidence", "gen_length": 32}), r"decoding\.ours is no object"),
        (_changed(decoding={"settings": {}, "ours": None, "gen_length": 0}), r"decoding\.gen_length is 0"),
        (_rewritten("forwards.logits.0.rows", lambda rows: rows + 1), r"rows: 44 is no row of 0 to 43"),
        (_rewritten("forwards.logits.0.ids", lambda ids: ids + 250), r"ids: \d+ is no id below 256"),
        (_rewritten("forwards.logits.0.ids", lambda ids: -ids - 1), r"ids: -\d+ is no id below 256"),
        (_rewritten("forwards.logits.0.argmax", lambda rows: rows[:-3]), r"argmax and margin are not of 44 rows"),
        (_rewritten("forwards.logits.0.argmax", lambda rows: rows + 1), r"argmax is not that of the logits"),
        (_rewritten("forwards.logits.0.logits", lambda logits: logits * torch.nan), r"logits or margin are no numbers"),
        (
            _changed(forwards=[{"name": "gone", "attend": FULL}]),
            r"the forward gone lacks ids, rows, logits, argmax, margin",
        ),
    ],
)
def test_a_bad_dump_is_refused_in_one_sentence(here: Here, spoil: Callable[[Path], None], said: str) -> None:
    path = here.folder / "dump.safetensors"
    write(path, *golden_dump("llada"))
    spoil(path)
    _, err = here(*arguments("llada", str(path)), module="pipeline.verify", code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(said, err)


def test_other_end_ids_are_a_difference_and_an_absent_answer_is_told(here: Here) -> None:
    dump, tiny = here.folder / "dump.safetensors", ROOT / "adapters" / "tiny" / "ar"
    assert dump_reference("--model", str(tiny), "--family", "causal", "--out", str(dump), *CPU) == 0
    words = ["model=tiny_ar", "--reference", str(dump)]
    for ends in ("[]", "[5]"):
        out, _ = here(*words, f"model.end_ids={ends}", module="pipeline.verify", code=1)
        assert f"note: answers end with one of {ends} here, with one of [0] in the reference" in out
        assert re.search(r"answer 0: all \d+ tokens of the shorter one are equal, but ours is over after 32", out)
    with safe_open(dump, framework="pt") as opened:
        about = json.loads(opened.metadata()["blockdiff_reference"])
    tensors = load_file(dump)
    del tensors["decoded.3"]
    write(dump, tensors, about)
    out, _ = here(*words, module="pipeline.verify")
    assert "answers: 4 of 4 are equal, 4 of 5 compared: the reference lacks the rest" in out
    write(dump, {**tensors, "decoded.3": tensors["decoded.0"][:-1].clone()}, about)
    _, err = here(*words, module="pipeline.verify", code=2)
    assert re.search(r"is damaged .*decoded\.3 neither ends nor fills gen_length: \d+ of 32 ids", err)


def test_a_dump_of_another_family_or_mask_is_refused_in_one_sentence(here: Here) -> None:
    tensors, about = golden_dump("llada")
    dump = write(here.folder / "d", tensors, {**about, "family": "dream"})
    _, err = here(*arguments("llada", dump), module="pipeline.verify", code=2)
    assert re.search(r"is a LLaDA, the reference of the family dream: it is of golden llada\n$", err)
    dump = write(here.folder / "d", tensors, {**about, "mask_id": 7})
    _, err = here(*arguments("llada", dump), module="pipeline.verify", code=2)
    assert "has the mask id 255, the reference 7" in err and err.count("\n") == 1


def test_a_slightly_wrong_epsilon_is_told_from_rounding(here: Here) -> None:
    """Half of LLaDA's epsilon on top: three times the tolerance, and fifteen times what sums in another order make."""
    changed = here.folder / "other"
    shutil.copytree(shared("golden", "llada", "model"), changed, copy_function=shutil.copyfile)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": config["rms_norm_eps"] * 1.5}))
    dump = write(here.folder / "d", *golden_dump("llada"))
    words = ["model=llada", f"model.path={changed}", "--reference", dump]
    assert "DIFFERS" in here(*words, module="pipeline.verify", code=1)[0]


def test_a_dump_of_another_model_is_refused_before_the_weights_are_read(here: Here) -> None:
    dump = write(here.folder / "d", *golden_dump("llada"))
    _, err = here("model=tiny", "--reference", dump, module="pipeline.verify", code=2)
    assert re.search(r"model=tiny has \d+ logits a position, the reference 256: it is of golden llada", err)
    _, err = here("model=toy", "--reference", dump, module="pipeline.verify", code=2)
    assert "model=toy has no weights to verify" in err
    _, err = here(*arguments("dream", dump), "sampler=nothing", module="pipeline.verify", code=2)
    assert "sampler=nothing does not exist" in err


# ---- the script that dumps -------------------------------------------------------------------------------------------


def dump_reference(*words: str) -> int:
    """Run the script's `main` in this process."""
    spec = importlib.util.spec_from_file_location("dump_reference", ROOT / "tools" / "dump_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = sys.argv
    sys.argv = ["dump_reference.py", *words]
    try:
        return module.main()
    finally:
        sys.argv = before


CPU = ("--device", "cpu", "--dtype", "float32", "--length", "32")


def test_the_script_dumps_a_causal_model_that_then_agrees_in_prompts_logits_and_answers(here: Here) -> None:
    dump, tiny = here.folder / "dump.safetensors", ROOT / "adapters" / "tiny" / "ar"
    assert dump_reference("--model", str(tiny), "--family", "causal", "--out", str(dump), *CPU) == 0
    reference = read_reference(str(dump))
    assert [forward.name for forward in reference.forwards] == ["prompt", "answered", "cached"]
    assert len(reference.prompts) == len(reference.answers) == 5
    out, _ = here("model=tiny_ar", "--reference", str(dump), module="pipeline.verify")
    assert "prompts: 5 of 5 are equal" in out and "answers: 5 of 5 are equal" in out
    assert re.search(r"cached .* 32 of 32 │ ok", out), "the cached prefix has no rows to compare"
    other = here.folder / "other"
    shutil.copytree(tiny, other)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("message['content']", "message['content'] + '!'"))
    out, _ = here("model=tiny_ar", f"model.path={other}", "--reference", str(dump), module="pipeline.verify", code=1)
    assert "prompts: 0 of 5 are equal" in out and "answers: 5 of 5 are equal" in out
    assert re.search(r"prompt 0: token \d+ is \d+ '.*!.*', the reference has \d+ '<\|assistant\|>'", out)


GENERATE = '''
import torch

def generate(model, prompt, steps, gen_length, block_length, temperature, cfg_scale, remasking, mask_id):
    """The surest masked token of the block, one a step."""
    assert steps == gen_length and temperature == cfg_scale == 0 and remasking == "low_confidence"
    row = torch.cat((prompt, torch.full((1, gen_length), mask_id)), 1)
    for first in range(prompt.shape[1], row.shape[1], block_length):
        for _ in range(block_length):
            logits = model(row).logits
            logits[..., mask_id] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            inside = torch.zeros_like(row, dtype=torch.bool)
            inside[:, first : first + block_length] = True
            best = sure.where(inside & (row == mask_id), -1).argmax(-1)
            row[0, best] = token[0, best]
    return row
'''


def test_the_script_decodes_with_the_authors_file_and_the_result_agrees(here: Here) -> None:
    """A bidirectional native network in LLaDA's place: its forwards and its call of `generate` are the same."""
    torch.manual_seed(0)
    tokenizer = ROOT / "adapters" / "tiny" / "llada"
    folder = here.folder / "stub"
    vocabulary = json.loads((tokenizer / "config.json").read_text())
    size = vocabulary.get("embedding_size") or vocabulary["vocab_size"]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, pad_token_id=0, **shape)).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False, "mask_token_id": 1}))
    (here.folder / "generate.py").write_text(GENERATE)
    words = ["--model", str(folder), "--family", "llada", "--out", str(here.folder / "d"), *CPU]
    assert dump_reference(*words, "--generate", str(here.folder / "generate.py")) == 0
    found = read_reference(str(here.folder / "d"))
    assert [forward.name for forward in found.forwards] == ["masked", "half", "last"] and len(found.answers) == 5
    command = ["model=llada", f"model.path={folder}", "model.end_tokens=[]", "--reference", str(here.folder / "d")]
    assert "answers: 5 of 5 are equal" in here(*command, module="pipeline.verify")[0]
    assert dump_reference(*words) == 0 and not read_reference(str(here.folder / "d")).answers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--model", "/nowhere/at/all", "--family", "causal"),
            r"error: --model=/nowhere/at/all could not be loaded \(",
        ),
        (("--model", "x", "--family", "causal", "--device", "cuda"), r"error: --device=cuda: torch sees no GPU here"),
        (("--model", "x", "--family", "causal", "--device", "tpu"), r"error: --device=tpu is unknown: use cuda"),
        (("--model", "x", "--family", "causal", "--length", "0"), r"error: --length=0 is out of range"),
        (
            ("--model", "x", "--family", "llada", "--length", "40"),
            r"error: --length=40 is no multiple of the block of 32",
        ),
        (("--model", "x", "--family", "sdar", "--block", "0"), r"error: --block=0 is out of range"),
        (("--model", "x", "--family", "causal", "--block", "4"), r"error: --block=4 is not used by --family=causal"),
        (("--model", "x", "--family", "llada", "--generate", "/nope.py"), r"error: --generate=/nope\.py is no file"),
        (("--model", "x", "--family", "dream", "--generate", "/nope.py"), r"error: --generate=\S+ is not used by"),
        (("--model", "x", "--family", "sdar", "--mask-id", "-1"), r"error: --mask-id=-1 is no mask"),
    ],
)
def test_the_script_fails_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    device = () if "--device" in words else ("--device", "cpu")
    assert dump_reference(*words, *device, "--out", str(tmp_path / "d")) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_place_of_the_dump_is_tried_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "x", "--family", "causal", *CPU)
    assert dump_reference(*words, "--out", str(tmp_path)) == 2
    assert f"--out={tmp_path} is a folder" in capsys.readouterr().err
    assert dump_reference(*words, "--out", "/nope/z.safetensors") == 2
    assert capsys.readouterr().err == "error: --out=/nope/z.safetensors: there is no folder /nope\n"


def test_an_authors_file_that_is_broken_ends_it_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "generate.py"
    words = ("--model", "x", "--family", "llada", "--generate", str(file), "--out", str(tmp_path / "d"), *CPU)
    for content, said in (("def (", r"could not be imported \(SyntaxError"), ("x = 1", r"has no function generate")):
        file.write_text(content)
        assert dump_reference(*words) == 2
        err = capsys.readouterr().err
        assert re.search(rf"error: --generate=\S+ {said}", err) and err.count("\n") == 1


def test_the_script_imports_nothing_of_ours_and_parses_as_python_3_8() -> None:
    import ast

    source = (ROOT / "tools" / "dump_reference.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    found = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in found} - sys.stdlib_module_names == {
        "torch",
        "transformers",
        "safetensors",
    }
