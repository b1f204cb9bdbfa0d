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
            forwards.append({"name": name, "attend": attend})
    about = {"format": 1, "family": family, "model": f"golden {family}", "dtype": "float32", "device": "cpu"}
    return tensors, {**about, "rows": "raw", "chat_template": False, "prompts": [], "forwards": forwards}


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


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, r"--reference=\S+ cannot be read \(|--reference=\S+ cannot be read"),
        (_no_metadata, r"is no reference: it must be written by tools/dump_reference\.py"),
        (_torn, r"is no whole \.safetensors file"),
        (_changed(format=9), r"of another version .*format 9 is not 1.*write it again"),
        (_changed(rows="shifted"), r"rows are shifted, not raw"),
        (_changed(forwards=[{"name": "gone", "attend": FULL}]), r"the forward gone lacks ids, rows or logits"),
    ],
)
def test_a_bad_dump_is_refused_in_one_sentence(here: Here, spoil: Callable[[Path], None], said: str) -> None:
    path = here.folder / "dump.safetensors"
    write(path, *golden_dump("llada"))
    spoil(path)
    _, err = here(*arguments("llada", str(path)), module="pipeline.verify", code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(said, err)


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
    ],
)
def test_the_script_fails_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    device = () if "--device" in words else ("--device", "cpu")
    assert dump_reference(*words, *device, "--out", str(tmp_path / "d")) == 2
    assert re.search(said, capsys.readouterr().err)


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
