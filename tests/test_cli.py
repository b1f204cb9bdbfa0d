"""The command line: bad input in one sentence, a user's own sampler, repeating a command, the tools."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from adapters.toy import ToyMaskedLMAdapter
from pipeline import evaluation
from pipeline import list as listing
from pipeline.compose import options
from pipeline.decode import decode
from tests.commands import MY_SAMPLER, Here, write_my_sampler
from tests.conftest import ROOT, CommandLine

TOY = ("model=toy", "logger=none")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    write_my_sampler(tmp_path)
    return Here(tmp_path)


def questions(folder: Path, *lines: str) -> str:
    (folder / "q.jsonl").write_text("\n".join(lines))
    return "dataset.path=q.jsonl"


BAD = {
    "a typo": (["sampler.treshold=0.3"], r"sampler.treshold is no option: did you mean sampler.threshold\?"),
    "a typo in a group": (["trainer.device=2"], r"trainer.device is no option: did you mean trainer.devices\?"),
    "a typo at the top": (["sed=3"], r"sed is no option: did you mean seed\?"),
    "an added key": (["+note=3"], r"note is no option: the options are model, sampler"),
    "a dataset's typo": (["dataset.levl=3"], r"dataset.levl is no option: did you mean dataset.level\?"),
    "no option like it": (["dataset=jsonl", "dataset.z=3"], r"dataset.z is no option: the options are .*answer_field"),
    "an added option": (["+dataset.z=3"], r"dataset.z=3 is not used by dataset=arithmetic.*options are .*level"),
    "my own option": (["sampler=mine", "sampler.gred=3"], r"sampler.gred is no option: did you mean sampler.greed\?"),
    "no such choice": (["sampler=foo"], r"sampler=foo does not exist; choose from .*mine, .*threshold"),
    "a wrong type": (["engine.max_rows=x"], r"engine.max_rows=x does not fit: 'x' is not a whole number$"),
    "a sampler's type": (["sampler.threshold=abc"], r"sampler.threshold=abc does not fit: 'abc' is not a number$"),
    "my sampler's type": (
        ["sampler=mine", "sampler.greed=x"],
        r"sampler.greed=x does not fit: 'x' is not a whole number$",
    ),
    "a dataset's type": (["dataset.limit=abc"], r"dataset.limit: 'abc' is not a whole number$"),
    "out of range": (["engine.max_rows=0"], r"engine.max_rows=0 is out of range: use a whole number from 1 up"),
    "no probability": (["sampler.threshold=2"], r"sampler.threshold=2.0 is out of range: use a probability"),
    "an option of others": (
        ["sampler=autoregressive", "sampler.threshold=0.3"],
        r"sampler.threshold=0.3 is not used by",
    ),
    "missing values": (
        ["dataset=jsonl", "model.path=???", "logger.project=???"],
        r"missing: dataset.path, logger.project, model.path; give them as dataset.path=… logger.project=… model.path=…",
    ),
    "a link to a missing one": (["dataset=jsonl", "model.path=${dataset.path}"], r"missing: dataset.path; give it as"),
    "an unset variable": (["dataset.path=${oc.env:UNSET_X}"], r"dataset.path: .*variable 'UNSET_X' not found"),
    "an absent file": (["dataset=jsonl", "dataset.path=absent.jsonl"], r"absent.jsonl cannot be read \(No such file"),
    "an empty file": (["dataset=jsonl", "dataset.path=empty.jsonl"], r"empty.jsonl is empty"),
    "a broken line": (["dataset=jsonl", "dataset.path=broken.jsonl"], r"broken.jsonl line 2 is not valid JSON"),
    "a missing field": (["dataset=jsonl", "dataset.path=field.jsonl"], r"line 2 has no field 'question'"),
    "steps": (
        ["dataset.gen_length=64", "sampler.block_size=16", "sampler.steps=10"],
        r"sampler.steps=10 does not divide evenly over 4 blocks of sampler.block_size=16: use 8 or 12",
    ),
    "too few steps": (
        ["dataset.gen_length=64", "sampler.block_size=16", "sampler.steps=2"],
        r"sampler.steps=2 .*use 4",
    ),
    "the canvas": (
        ["dataset.gen_length=60", "sampler.block_size=16", "sampler.steps=8"],
        r"dataset.gen_length=60 is not a multiple of sampler.block_size=16 .option.: use 48 or 64",
    ),
    "twice the same": (
        ["sampler.steps=8", "sampler.tokens_per_step=2"],
        r"sampler.steps=8 and sampler.tokens_per_step=2",
    ),
    "attention": (["model=tiny_ar"], r"model=tiny_ar with sampler=threshold: .*full.*attention"),
    "no model folder": (
        ["model=tiny", "model.path=nowhere"],
        r"model.path=nowhere is no model: config.json was not",
    ),
    "a model that is not here": (["model=llada"], r"model=llada: GSAI-ML/LLaDA-8B-Instruct is neither"),
    "a logger's mode": (["logger=wandb", "logger.mode=onlin"], r"logger.mode=onlin is not known: use one of online"),
    "an accelerator": (
        ["trainer.accelerator=abacus"],
        r"trainer.accelerator=abacus is not known: use one of auto, cpu",
    ),
    "the folder itself": (["run=."], r"run='.' is no folder name: use one below outputs"),
    "no step at all": (["sampler.steps=-1"], r"sampler.steps=-1 is out of range: use a whole number from 1 up"),
    "too hot": (["sampler.temperature=1e39"], r"sampler.temperature=1e\+39 is out of range: use 0, or from 1e-6"),
    "an odd stop": (["dataset.stop=[[a]]"], r"dataset.stop holds \['a'\]|dataset.stop.*List"),
    "no id": (["model=tiny_ar", "sampler=autoregressive", "model.end_ids=[99999]"], r"model.end_ids=99999 is no id"),
    "half a sampler": (["sampler._target_=samplers.Sampler"], r"sampler._target_=samplers.Sampler is no complete"),
    "a folder outside": (["run=../x"], r"run='../x' is no folder name"),
    "an equals sign": (["run=a=b"], r"'run=a=b' cannot be read: .* quoted once more, as \"run='a=b'\""),
    "a comma": (["run=a, b"], r"'run=a, b' cannot be read: .* quoted once more, as \"run='a, b'\"; or add -m"),
    "a lone word": (["threshold"], r"'threshold' is no override: write key=value"),
    "a key of my YAML": (["model=odd"], r"my/model/odd.yaml line 3: Key 'pth' not in 'ModelOptions' \(model.pth\)"),
    "a wrong type in my YAML": (["model=typed"], r"my/model/typed.yaml line 2: Value 'abc'.*Integer \(model.shift\)"),
    "no YAML": (["model=torn"], r"my/model/torn.yaml line 3 is no valid YAML: expected ',' or ']'"),
    "a key given twice": (["model=twice"], r"my/model/twice.yaml line 2 is no valid YAML: found duplicate key name"),
    "no such class": (
        ["sampler._target_=mine.Yours"],
        r"mine.Yours cannot be imported: mine has no class Yours, it has Mine$",
    ),
    "no such flag": (["--config-dri", "my"], r"--config-dri is no flag: the flags are .*--config-dir"),
    "a flag alone": (["--config-name"], r"--config-name lacks its value"),
    "a preset's refusal": (
        ["model=tiny_ar", "sampler=dparallel"],
        r"model=tiny_ar with sampler=dparallel: sampler=dparallel (?!.*d3llm)",
    ),
    "two lengths": (
        ["dataset.gen_length=64", "sampler.num_blocks=2", "sampler.block_size=16"],
        r"dataset.gen_length=64 and sampler.num_blocks=2 blocks of sampler.block_size=16, that is 32, are two lengths",
    ),
    "no null": (["sampler=block_threshold", "sampler.threshold=null"], r"sampler.threshold=null: .* needs a number$"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_before_anything_is_loaded(here: Here, arguments: list[str], said: str) -> None:
    (here.folder / "empty.jsonl").touch()
    (here.folder / "broken.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{broken\n')
    (here.folder / "field.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"answer": "2"}\n')
    (here.folder / "my" / "model").mkdir()
    (here.folder / "my" / "model" / "odd.yaml").write_text("name: odd\nkind: toy\npth: x\n")
    (here.folder / "my" / "model" / "typed.yaml").write_text("name: typed\nshift: abc\n")
    (here.folder / "my" / "model" / "torn.yaml").write_text("name: torn\npath: [tiny\n")
    (here.folder / "my" / "model" / "twice.yaml").write_text("name: a\nname: b\n")
    before = dict(evaluation._loaded)
    out, err = here("--config-dir", "my", *TOY, *arguments, code=2)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert re.search(said, err), err
    assert evaluation._loaded == before
    assert not list(here.folder.glob("outputs/**/*"))


def test_the_traceback_is_shown_on_request(command_line: CommandLine) -> None:
    plain = command_line("model=toy", "sampler.treshold=1", code=2)
    full = command_line("model=toy", "sampler.treshold=1", code=1, env={"HYDRA_FULL_ERROR": "1"})
    assert "Traceback" not in plain.stderr and plain.stderr.count("\n") == 1
    assert "Traceback" in full.stderr and "treshold" in full.stderr


def test_quoted_values_arrive_unchanged_and_the_stored_command_reruns(command_line: CommandLine) -> None:
    write_my_sampler(command_line.folder)  # HYD-02
    stop = "a=b, #1"
    command_line(*MY_SAMPLER, f"dataset.stop=['{stop}']", "dataset.limit=2", "run='epoch=3, step=10'", "logger=none")
    name = "epoch=3, step=10"
    folder = command_line.folder / "outputs" / name
    assert OmegaConf.load(folder / "config.yaml").dataset.stop == [stop]
    first = command_line.rows(name)
    stored = json.loads((folder / "environment.json").read_text())["command"]
    (folder / "samples.jsonl").unlink()
    import shlex

    words = shlex.split(stored)
    assert words[:3] == ["python", "-m", "pipeline"]
    command_line(*words[3:])
    again = command_line.rows(name)
    assert [row["key"] for row in again] == [row["key"] for row in first] and len(again) == 2


def test_a_sampler_of_ones_own_is_one_file_and_one_yaml(here: Here) -> None:
    here(*MY_SAMPLER, "logger=none", "dataset.limit=3", "run=a", "sampler.greed=4", "sampler.temperature=0")
    run = here.run("a")
    assert {row["nfe"] for row in run.rows} == {32 // 4}
    kept = OmegaConf.load(run.path / "config.yaml").sampler
    assert (kept._target_, kept.greed, kept.delay, kept.block_size) == ("mine.Mine", 4, 0.0, 32)
    assert "class Mine" in (run.path / "sampler.py").read_text()
    assert run.summary["settings"]["greed"] == {"value": 4, "source": "option"}
    _, err = here(*MY_SAMPLER, "prompt='1, 2 = 3'", module="pipeline.decode")
    assert "32 tokens, 16 forwards, 2.00 tokens a forward" in err


def test_a_sampler_that_always_raises_is_told_in_one_line_by_file_and_line(here: Here) -> None:
    _, err = here(*MY_SAMPLER, "logger=none", "dataset.limit=3", "run=a", "sampler.explode=true", code=1)
    told = "Mine raised RuntimeError: boom (mine.py line 20, in update_state)"
    rows, status = here.run("a").rows, here.run("a").status
    whole = f"none of 3 samples was decoded: 3 failed; the first ({rows[0]['id']}): {told}"
    assert err.startswith(f"error: {whole} (rows: outputs/a/samples.jsonl") and err.count("\n") == 1
    assert (status["state"], status["error"]) == ("failed", whole)
    assert [row["error"] for row in rows] == [told] * 3


def test_a_sample_whose_sampler_raises_spoils_no_other(here: Here) -> None:
    source = (here.folder / "mine.py").read_text()
    (here.folder / "mine.py").write_text(source.replace("if self.explode", "if len(state.tokens) % 2"))
    path = questions(here.folder, *(json.dumps({"question": "x" * n}) for n in (3, 4, 5)))
    out, _ = here(*MY_SAMPLER, "logger=none", "dataset=jsonl", path, "dataset.gen_length=8", "run=a")
    run = here.run("a")
    assert sorted([row["failure"] == "failed" for row in run.rows]) in ([False, False, True], [False, True, True])
    (told,) = {row["error"] for row in run.rows if row["failure"] == "failed"}
    assert told == "Mine raised RuntimeError: boom (mine.py line 20, in update_state)" and told in out
    assert run.status["state"] == "done"


def test_an_option_of_ones_own_takes_the_place_of_one_that_ships_and_says_so(here: Here) -> None:
    own = here.folder / "my" / "sampler" / "threshold.yaml"
    own.write_text("# Mine, cut:\n# over two lines. Not this.\n_target_: mine.Mine\nname: threshold\ngreed: 4\n")
    _, err = here("model=toy", "logger=none", "--config-dir", "my", "dataset.limit=1", "run=a")
    assert err == "note: my/sampler/threshold.yaml is used, not what ships by that name\n"
    assert OmegaConf.load(here.run("a").path / "config.yaml").sampler.greed == 4
    own_folder = ("--config-dir", "my")
    out, err = here("model=toy", *own_folder, module="pipeline.list")
    assert re.search(r"^threshold +Mine, cut: over two lines\.$", re.sub(" +$", "", out, flags=re.M), re.M)
    assert err.count("\n") == 1
    assert (
        " 2 forwards"
        in here("model=toy", "dataset.gen_length=8", *own_folder, "prompt=hi", module="pipeline.decode")[1]
    )
    own.write_text("defaults:\n  - threshold\n\nthreshold: 0.5\n")
    _, err = here("model=toy", *own_folder, code=2)
    assert "threshold.yaml takes over threshold, which is now itself: give the file another name" in err
    own.unlink()
    (here.folder / "my" / "config.yaml").write_text("seed: 1\n")
    assert "my/config.yaml would take the place of all options" in here("--config-dir", "my", code=2)[1]


def test_flags_stand_anywhere(here: Here) -> None:
    here("sampler=mine", "--config-dir", "my", "model=toy", "logger=none", "dataset.limit=1", "run=a")
    here("sampler=mine", "--config-dir=my", "model=toy", module="pipeline.list")
    here("model=toy", "-cd", "my", "prompt=hi", "sampler=mine", module="pipeline.decode")
    out, _ = here("model=toy", "sampler.threshold=0.5,0.9", "-m", "logger=none", "dataset.limit=1")
    assert "2 jobs" in out


def test_one_prompt_is_decoded_once_whatever_an_experiment_sweeps(here: Here) -> None:
    _, err = here("model=toy", "experiment=tradeoff", "prompt=hi", module="pipeline.decode")
    assert err.count(" forwards, ") == 1
    assert "makes a sweep" in here("-m", "model=toy", "prompt=hi", module="pipeline.decode", code=2)[1]


def test_the_same_command_continues_and_a_finished_one_returns_at_once(here: Here) -> None:
    command = [*MY_SAMPLER, "logger=none", "dataset.limit=4", "run=a"]
    here(*command)
    whole, file = here.run("a").timeless, here.run("a").path / "samples.jsonl"
    done = file.read_text()
    evaluation._loaded.clear()
    out, _ = here(*command)
    assert "finished already" in out and "accuracy" in out
    assert file.read_text() == done and not evaluation._loaded
    lines = done.splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:50])  # as `kill -9` in the middle of a write leaves it
    out, _ = here(*command)
    assert "continuing: 2 of 4" in out
    assert here.run("a").timeless == whole
    assert file.read_text().splitlines(keepends=True)[:2] == lines[:2]  # kept, not decoded again
    here(*command[:-2], "dataset.limit=6", "run=a")
    assert here.run("a").timeless[:4] == whole and len(here.run("a").rows) == 6
    assert here.run("a").summary["samples"] == 6


def test_other_settings_never_enter_a_finished_run(here: Here) -> None:
    command = [*MY_SAMPLER, "logger=none", "dataset.limit=2", "run=a"]
    here(*command)
    before = {path: path.read_bytes() for path in here.run("a").path.rglob("*") if path.is_file()}
    for change in ("sampler.greed=4", "seed=1", "dataset.gen_length=64", "dataset.limit=1"):
        _, err = here(*command, change, code=2)
        assert (
            re.match(r"error: outputs/a holds rows of (other settings|samples that this)", err) and err.count("\n") == 1
        )
    after = {path: path.read_bytes() for path in here.run("a").path.rglob("*") if path.is_file()}
    assert after == before and here.run("a").status["state"] == "done"
    here(*command, "engine.max_rows=1", "engine.logits_mib=64", "trainer.accelerator=cpu")  # change no token


def test_a_finished_run_is_not_judged_by_another_yardstick(here: Here) -> None:
    path = questions(here.folder, '{"question": "6 * 7?", "answer": "42"}')
    command = [*TOY, "dataset=jsonl", path, "dataset.gen_length=8", "run=a"]
    here(*command)
    assert "rows scored by numbers-1, this command asks for text-1" in here(*command, "dataset.match=text", code=2)[1]
    questions(here.folder, '{"question": "6 * 7?", "answer": "43"}')
    assert "another reference answer" in here(*command, code=2)[1]
    assert here.run("a").status["state"] == "done"


def test_averages_are_weighted_by_samples_at_any_number_of_rows(here: Here) -> None:
    asked = [json.dumps({"question": "x" * length}) for length in (1, 9, 3, 30, 5)]  # LIT-03
    path = questions(here.folder, *asked)
    common = [*TOY, "dataset=jsonl", path, "dataset.gen_length=16"]
    here(*common, "run=answers")
    said = [row["extracted"] for row in here.run("answers").rows]
    assert here.run("answers").summary["accuracy"] is None
    right = [{**json.loads(line), "answer": answer} for line, answer in zip(asked, [*said[:4], "-1"], strict=True)]
    questions(here.folder, *map(json.dumps, right))
    for rows in (1, 2, 4, 5):
        _, err = here(*common, f"run=r{rows}", f"engine.max_rows={rows}")
        assert err == ""
    summaries = [here.run(f"r{rows}").summary for rows in (1, 2, 4, 5)]
    assert [summary["accuracy"] for summary in summaries] == [0.8] * 4
    timed = re.compile("second|overhead|memory|hash|max_rows|latency|mixed")
    figures = [{k: v for k, v in summary.items() if not timed.search(k)} for summary in summaries]
    assert all(other == figures[0] for other in figures[1:])


@pytest.mark.parametrize(
    ("options", "forwards", "committed"),
    [
        (["dataset.gen_length=64", "sampler.block_size=16", "sampler.steps=8"], 8, [8] * 8),
        (["dataset.gen_length=16", "sampler.steps=5"], 5, [4, 3, 3, 3, 3]),
        (["sampler.block_size=16", "sampler.num_blocks=1", "sampler.steps=8"], 8, [2] * 8),
    ],
)
def test_the_step_budget_is_exact(here: Here, options: list[str], forwards: int, committed: list[int]) -> None:
    here(*TOY, "sampler=confidence", *options, "dataset.limit=1", "run=a", "engine.trace_samples=1")  # DEC-05
    run = here.run("a")
    (row,) = run.rows
    _, *trace = [json.loads(line) for line in next((run.path / "trace").glob("*.jsonl")).read_text().splitlines()]
    assert row["nfe"] == run.summary["nfe_mean"] == len(trace) == forwards
    assert [len(record["changed"]) for record in trace] == committed
    assert len(row["output_ids"]) == row["canvas"] == sum(committed) and 0 not in row["output_ids"]  # 0 is the mask


def test_only_answer_tokens_count(here: Here) -> None:
    here("model=tiny_ar", "sampler=autoregressive", "logger=none", "dataset.limit=6", "run=a")  # DEC-07
    run = here.run("a")
    assert any(row["ended"] for row in run.rows)
    for row in run.rows:
        assert row["tokens"] == len(row["output_ids"]) - row["ended"] < row["prompt_tokens"]
    tokens, nfe = (sum(row[name] for row in run.rows) for name in ("tokens", "nfe"))
    assert run.summary["tokens_per_forward"] == tokens / nfe
    assert run.summary["tokens_rule"] == "ids before the first end token or stop string"


def test_a_sample_that_cannot_be_decoded_is_named_and_the_run_goes_on(here: Here) -> None:
    long, masked = "word " * 3000, "what is <|mdm_mask|> and <mask>?"
    lines = [json.dumps({"question": text, "answer": "1"}) for text in ("short", long, masked)]
    path = questions(here.folder, *lines)
    here(
        "model=tiny_ar",
        "sampler=autoregressive",
        "logger=none",
        "dataset=jsonl",
        path,
        "dataset.gen_length=16",
        "run=a",
    )
    rows = here.run("a").rows
    assert [row["failure"] == "too_long" for row in rows] == [False, True, False]
    assert "positions" in rows[1]["error"] and rows[1]["tokens"] is None and rows[1]["correct"] is False
    assert here.run("a").summary["too_long_rate"] == pytest.approx(1 / 3)
    assert here.run("a").status["state"] == "done"


def test_one_prompt_from_the_command_line_and_in_two_lines_of_python(here: Here) -> None:
    out, err = here("model=toy", "prompt=hi", "sampler.steps=4", "dataset.gen_length=16", module="pipeline.decode")
    result = decode("hi", "model=toy", "sampler.steps=4", "dataset.gen_length=16")
    assert out.strip() == result.text and "16 tokens" in err
    assert len(result.tokens) == 16 and result.tokens_per_forward == 16 / result.nfe
    assert sum(len(forward["changed"]) for forward in result.metadata["trace"]) == 16
    assert "missing: prompt" in here("model=toy", module="pipeline.decode", code=2)[1]
    _, err = here("model=tiny_ar", "prompt=hi", module="pipeline.decode", code=2)
    assert err.startswith("error: model=tiny_ar with sampler=threshold")
    out, _ = here("model=tiny_ar", "sampler=autoregressive", "prompt=42", module="pipeline.decode")
    assert out.strip()


def test_the_list_names_every_option_and_what_goes_together(here: Here) -> None:
    out, _ = here("--config-dir", "my", "model=toy", module="pipeline.list")
    assert re.search(r"^mine +A rule of my own\.", out, re.MULTILINE)
    for name in ("llada", "tiny_ar", "confidence", "gsm8k"):
        assert re.search(rf"^{name} +\w", out, re.MULTILINE)
    assert re.search(r"^toy .*confidence.*", out, re.MULTILINE)
    out, _ = here("model=tiny_ar", "sampler=threshold", module="pipeline.list")
    assert re.search(r"^tiny_ar +not threshold$", out, re.MULTILINE)
    out, _ = here("model=tiny_sdar", "sampler=fast_dllm", module="pipeline.list")  # by its preset's cache
    assert re.search(r"^tiny_sdar +not fast_dllm$", out, re.MULTILINE)
    assert re.search(
        r"^tiny_sdar +fast_dllm$",
        here("model=tiny_sdar", "sampler=fast_dllm", "sampler.cache=block", module="pipeline.list")[0],
        re.MULTILINE,
    )
    assert "model=too does not exist" in here("model=too", module="pipeline.list", code=2)[1]


def grouped(out: str) -> dict[str, str]:
    """The samplers of each model of the closing table, whose rows go on below an empty first or second column."""
    table = out[out.index("which samplers decode which models") :].splitlines()[1:]
    at, rows = table[0].index("samplers"), [["", ""]]
    for line in table[1:]:
        left, right = line[:at].strip(), line[at:].strip()
        if rows[-1][0].endswith(",") or rows[-1][1].endswith(","):
            rows[-1] = [f"{rows[-1][0]} {left}".strip(), f"{rows[-1][1]} {right}".strip()]
        else:
            rows.append([left, right])
    return {model: samplers for models, samplers in rows[1:] for model in models.split(", ")}


def test_the_whole_list_fits_two_screens_and_groups_models_that_take_the_same_samplers(here: Here) -> None:
    whole = here(module="pipeline.list")[0]
    known = grouped(whole)
    assert len(whole.splitlines()) <= 120 and len(set(known.values())) <= 10
    assert known.keys() == set(options("model"))
    for model in ("llada", "tiny_sdar", "d2f_dream", "tiny_ar", "toy"):
        assert grouped(here(f"model={model}", module="pipeline.list")[0]) == {model: known[model]}


def test_the_list_knows_the_toy_without_loading_it() -> None:
    assert ToyMaskedLMAdapter().facts == listing.TOY


def test_tools_read_finished_folders(here: Here) -> None:
    for name, greed in (("a", 1), ("b", 4)):
        here(*MY_SAMPLER, "logger=none", "dataset.limit=3", f"run={name}", f"sampler.greed={greed}")
    here(*MY_SAMPLER, "logger=none", "dataset.limit=3", "run=c", "sampler.explode=true", code=1)
    out, _ = here("outputs/a", "outputs/b", "--json", module="pipeline.compare")
    compared = json.loads(out)["runs"][1]
    assert (compared["tokens_per_forward_ratio"], compared["difference"]) == (4.0, 0.0)
    out, _ = here("outputs/a", "outputs/b", module="pipeline.compare")
    assert "4.00x" in out
    out, _ = here("outputs/*", module="pipeline.status")
    lines = {name: next(line for line in out.splitlines() if f"outputs/{name}" in line) for name in "abc"}
    assert "done" in lines["a"] and "3/3" in lines["a"]
    assert "failed" in lines["c"] and "3/3" in lines["c"] and "RuntimeError: boom" in lines["c"]


def test_the_console_script_is_the_same_command(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.cli

    monkeypatch.setattr(pipeline.cli, "run", lambda: pytest.fail("a tool was asked for"))
    monkeypatch.chdir(here.folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(here.folder))])
    monkeypatch.setattr(sys, "argv", ["blockdiff", "decode", *MY_SAMPLER, "prompt=hi"])
    with pytest.raises(SystemExit) as ended:
        pipeline.cli.console()  # the current folder is importable without `python -m`
    assert not ended.value.code
    sys.modules.pop("mine", None)
    monkeypatch.setattr(sys, "argv", ["blockdiff", "compare", "--help"])
    with pytest.raises(SystemExit) as ended:
        pipeline.cli.console()
    assert ended.value.code == 0
    monkeypatch.setattr(sys, "argv", ["blockdiff", "status", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        pipeline.cli.console()
    assert ended.value.code == 2


def test_the_module_runs_as_a_command(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here.folder)
    monkeypatch.setattr(sys, "argv", ["pipeline", *TOY, "dataset.limit=1", "run=a"])
    runpy.run_module("pipeline", run_name="__main__")
    assert here.run("a").summary["complete"] is True
    assert (ROOT / "pipeline" / "__main__.py").exists()


def test_an_id_never_becomes_a_path(here: Here) -> None:
    """An id may hold slashes and dots; the trace is filed by index."""
    path = questions(here.folder, '{"question": "a", "id": "../samples"}', '{"question": "b", "id": "math/5"}')
    here(*TOY, "dataset=jsonl", path, "dataset.id_field=id", "engine.trace_samples=2", "dataset.gen_length=4", "run=a")
    assert [row["id"] for row in here.run("a").rows] == ["../samples", "math/5"]
    assert sorted(file.name for file in (here.run("a").path / "trace").iterdir()) == ["0.jsonl", "1.jsonl"]


def test_a_timed_pass_can_be_added_to_a_finished_run(here: Here) -> None:
    here(*TOY, "dataset.limit=3", "run=a")
    rows, before = here.run("a").timeless, here.run("a").summary
    assert before["latency_p50_seconds"] is None
    here(*TOY, "dataset.limit=3", "run=a", "engine.timing_samples=2")
    after = here.run("a").summary
    assert here.run("a").timeless == rows and after["latency_p50_seconds"] > 0
    assert after["tokens_per_second"] == before["tokens_per_second"] and after["tokens_per_second_batch1"] > 0


def test_a_smaller_limit_says_that_it_is_the_limit(here: Here) -> None:
    here(*TOY, "dataset.limit=3", "run=a")
    assert "a larger dataset.limit?" in here(*TOY, "dataset.limit=2", "run=a", code=2)[1]
