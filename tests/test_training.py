"""Training: what a step sees, resuming, and that an exported model decodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.batches import IGNORE, Batches
from pipeline.data.arithmetic import make_problems, words
from pipeline.network import noisy_sees_clean, take_over
from pipeline.prediction import Prediction
from pipeline.recipe import Recipe
from pipeline.tokenizer import build_tokenizer
from pipeline.train import claimed, main
from pipeline.training import Training, learning_rate_scale
from tests.conftest import ROOT, CommandLine
from tests.shared import shared

SMALL = ["recipe.steps=150", "recipe.batch_size=8", "recipe.hidden_size=32", "recipe.intermediate_size=64"]
SMALL += ["recipe.layers=1", "recipe.heads=2"]
SHORT = [*SMALL, "recipe.steps=100", "recipe.batch_size=4"]
Command = Callable[..., tuple[int, str, str]]


def _recipe(objective: str, family: str = "llama") -> Recipe:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "batch_size": 16}
    size = 8 if family == "sdar" else None
    return Recipe(objective=objective, level_weights=[1, 1, 1, 1], family=family, block_size=size, **sizes)


def _training(family: str) -> Prediction:
    torch.manual_seed(0)
    return Prediction(_recipe("masked", family))


def test_a_step_depends_on_seed_epoch_and_index_alone() -> None:
    tokenizer = build_tokenizer(words())
    first, again = (Batches(_recipe("masked"), tokenizer, seed=0, epoch=3)[7] for _ in range(2))
    other = Batches(_recipe("masked"), tokenizer, seed=0, epoch=4)[7]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0][:, :20], other[0][:, :20])


def test_masked_targets_are_the_masked_answer_tokens_and_nothing_else() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("masked"), tokenizer, seed=0, epoch=0)[0]
    masked = inputs == tokenizer.mask_token_id
    assert torch.equal(masked, targets != IGNORE)
    whole = torch.where(masked, targets, inputs)
    for row, hidden in zip(whole.tolist(), masked.tolist()):
        answer = row.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
        assert not any(hidden[:answer])
        assert "####" in tokenizer.decode(row[answer:])


def test_a_shifted_family_learns_a_masked_token_at_the_row_before_it() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("masked", "dream"), tokenizer, seed=0, epoch=0)[0]
    straight, unshifted = Batches(_recipe("masked"), tokenizer, seed=0, epoch=0)[0]
    assert torch.equal(inputs, straight) and torch.equal(targets[:, :-1], unshifted[:, 1:])
    assert (targets[:, -1] == IGNORE).all()


def test_a_family_of_blocks_sees_a_noisy_and_a_clean_half_and_masks_each_block_at_its_own_rate() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("masked", "sdar"), tokenizer, seed=0, epoch=0)[0]
    length = inputs.shape[1] // 2
    noisy, clean, wanted = inputs[:, :length], inputs[:, length:], targets[:, :length]
    masked = noisy == tokenizer.mask_token_id
    assert length % 8 == 0 and (targets[:, length:] == IGNORE).all() and torch.equal(masked, wanted != IGNORE)
    assert torch.equal(torch.where(masked, wanted, noisy), clean) and tokenizer.mask_token_id not in clean
    answers = (clean == tokenizer.convert_tokens_to_ids("<|assistant|>")).int().argmax(1)
    assert not any(row[: answer + 1].any() for row, answer in zip(masked, answers))
    shares = masked.unflatten(1, (-1, 8)).float().mean(2)[:, -4:]  # the last four blocks are answer and end tokens
    assert (shares.amax(1) - shares.amin(1)).median() > 0.4


def test_the_four_rules_of_the_noisy_and_the_clean_half() -> None:
    seen = noisy_sees_clean(12, 4)
    for query in range(12):
        for key in range(12):
            own, earlier = key // 4 == query // 4, key // 4 < query // 4
            assert seen[query, key] == own and seen[query, 12 + key] == earlier
            assert seen[12 + query, 12 + key] == (own or earlier) and not seen[12 + query, key]


def test_training_by_blocks_sees_what_decoding_block_after_block_sees() -> None:
    """A noisy block's states are those of the sequence that holds its clean past and itself, and nothing after it."""
    training = _training("sdar")
    inputs, _ = Batches(training.recipe, training.tokenizer, seed=0, epoch=0)[0]
    length = inputs.shape[1] // 2
    with torch.no_grad():
        noisy = training.hidden(inputs)[:, :length]
        for start in range(0, length, 8):
            past, block = inputs[:, length : length + start], inputs[:, start : start + 8]
            numbers = torch.arange(start + 8) // 8
            mask = (numbers[None] <= numbers[:, None])[None, None]
            alone = training.model.model(torch.cat((past, block), 1), attention_mask=mask, use_cache=False)
            assert torch.allclose(noisy[:, start : start + 8], alone.last_hidden_state[:, start:], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "dream"])
def test_a_family_without_blocks_sees_the_whole_sequence(family: str) -> None:
    training = _training(family)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        before, ids[0, -1] = training.hidden(ids)[0, 0], 7
        assert not torch.allclose(before, training.hidden(ids)[0, 0], atol=1e-4)


def test_a_start_may_be_of_any_layout_that_a_run_takes(tmp_path: Path) -> None:
    first, training = _training("llama"), _training("llama")
    first.model.config.save_pretrained(tmp_path / "bin")
    state = {name: tensor + 1 for name, tensor in first.model.state_dict().items()}
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    before = torch.get_rng_state()
    take_over(training.model, str(tmp_path / "bin"))
    assert all(torch.equal(tensor, state[name]) for name, tensor in training.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before), "what is drawn afterwards does not depend on it"


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_what_a_start_lacks_begins_neutral(family: str, tmp_path: Path) -> None:
    first, training = _training("llama"), _training(family)
    first.model.save_pretrained(tmp_path)
    take_over(training.model, str(tmp_path))
    own, given = training.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(own[name], given[name]) for name in given)
    added = {name.rpartition("self_attn.")[2]: own[name] for name in own.keys() - given.keys()}
    if family == "dream":
        assert set(added) == {"q_proj.bias", "k_proj.bias", "v_proj.bias"} and not any(map(torch.any, added.values()))
    else:
        assert set(added) == {"q_norm.weight", "k_norm.weight"} and all((t == 1).all() for t in added.values())


def test_causal_targets_are_the_next_answer_tokens_up_to_the_first_end() -> None:
    tokenizer = build_tokenizer(words())
    inputs, targets = Batches(_recipe("causal"), tokenizer, seed=0, epoch=0)[0]
    for row, wanted in zip(inputs.tolist(), targets.tolist()):
        learnt = [token for token in wanted if token != IGNORE]
        start = row.index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        assert wanted[start] == learnt[0] and learnt.count(tokenizer.eos_token_id) == 1
        assert learnt[-1] == tokenizer.eos_token_id and "####" in tokenizer.decode(learnt)


def test_no_test_problem_is_a_training_problem_under_other_names() -> None:
    for level in (1, 2, 3, 4):
        held_out = {problem.operations for problem in make_problems("test", level, 200)}
        assert held_out.isdisjoint(problem.operations for problem in make_problems("train", level, 2000))


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    recipe = Recipe(steps=1000, warmup=100, decay=0.6)
    scales = [learning_rate_scale(step, recipe) for step in (0, 99, 400, 700, 999)]
    assert scales == pytest.approx([0.01, 1.0, 1.0, 0.5, 1 / 600])


@pytest.mark.parametrize("text", ["Tom has 119 pens.", "naïve ∞ 12345 <|mask|> \n\n\tend", "", "日本 🙂 e=mc²"])
def test_the_tiny_tokenizer_encodes_any_text_and_gives_it_back(text: str) -> None:
    tokenizer = build_tokenizer(words())
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.mask_token_id not in ids


def test_numbers_and_words_are_one_token_each() -> None:
    tokenizer = build_tokenizer(words())
    problem = make_problems("train", 3, 1)[0]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(problem.question + problem.answer).input_ids)
    assert all(piece.startswith("Ġ") or piece in {",", ".", "?"} for piece in pieces[1:])


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process and an empty folder: its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train", *words])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return int(code or 0), *capfd.readouterr()

    return run


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("recipe.objective=foo", "use masked, causal or dflash"),
        ("recipe.family=bert", "one of llama, dream, sdar, dflash"),
        ("recipe.block_size=8", "not used by recipe.family=llama: leave it null"),
        ("recipe.target=tiny/ar", "not used by recipe.objective=masked: leave it null"),
        ("recipe.start=nowhere", "no model to start from: use a folder with config.json"),
        ("recipe.start=''", "or null for a start from scratch"),
        ("recipe.batch_size=0", "1 up"),
        ("recipe.heads=0", "1 up"),
        ("recipe.layers=-1", "1 up"),
        ("recipe.intermediate_size=0", "1 up"),
        ("recipe.warmup=0", "1 up"),
        ("recipe.hidden_size=0", "multiple of 8 (an even size for each of recipe.heads=4), such as 8"),
        ("recipe.hidden_size=130", "such as 128"),
        ("recipe.hidden_size=12", "multiple of 8"),
        ("recipe.decay=0.0", "above 0, at most 1"),
        ("recipe.decay=1.5", "above 0, at most 1"),
        ("recipe.lr=0.0", "finite number above 0"),
        ("recipe.lr=inf", "finite number above 0"),
        ("recipe.matrix_lr=nan", "finite number above 0"),
        ("recipe.matrix_lr=-0.1", "finite number above 0"),
        ("recipe.steps=0", "multiple of 50, such as 50"),
        ("recipe.steps=130", "multiple of 50, such as 150"),
        ("recipe.level_weights=[1.0, 1.0]", "4 finite numbers"),
        ("recipe.level_weights=[1.0, 1.0, 1.0, -1.0]", "not all of them 0"),
        ("recipe.level_weights=[0.0, 0.0, 0.0, 0.0]", "not all of them 0"),
        ("recipe.level_weights=[1.0, 1.0, 1.0, nan]", "4 finite numbers"),
        ("seed=-1", "from 0 to 4294967295"),
        ("seed=4294967296", "from 0 to 4294967295"),
        ("recipe.steps=many", "is not a whole number"),
        ("recipe.batch_size=8.5", "is not a whole number"),
        ("recipe.lr=null", "not Optional"),
        ("recipe.level_weights=3", "level_weights"),
        ("recipe.stepz=100", "is no option"),
        ("+recipe.stepz=100", "the options are name, objective"),
        ("+runs=a", "the options are recipe, run, seed"),
        ("recipe.name=???", "missing"),
        ("recipe=large", "choose from dflash, tiny, tiny_ar"),
        ("run=''", "no folder name"),
        ("run=.", "no folder name"),
        ("run=./", "no folder name"),
        ("run=/nowhere/x", "no folder name"),
        ("run=a/../../b", "no folder name"),
        ("run=a//b", "no folder name"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line_before_anything_is_made(
    train: Command, tmp_path: Path, given: str, right: str
) -> None:
    code, out, err = train(given)
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert err.startswith("error: ") and err.count("\n") == 1 and right in err
    assert given.lstrip("+").partition("=")[0].replace("recipe.name", "run") in err or "missing" in err


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (
            ["recipe=tiny_sdar", "recipe.block_size=null"],
            "block_size=null does not fit recipe.family=sdar: use a",
        ),
        (["recipe=tiny_sdar", "recipe.block_size=0"], "a whole number from 1 up"),
        (["recipe=tiny_dream", "recipe.block_size=8"], "not used by recipe.family=dream"),
        (["recipe=tiny_dream", "recipe.objective=causal"], "causal needs llama"),
        (["recipe=tiny_sdar", "recipe.hidden_size=64"], "its model.embed_tokens.weight is [466, 128], here [466, 64]"),
        (["recipe=tiny_sdar", "recipe.layers=2"], "here not there"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_made(
    train: Command, tmp_path: Path, given: list[str], right: str
) -> None:
    code, out, err = train(*given)
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert err.startswith("error: recipe.") and err.count("\n") == 1 and right in err


@pytest.mark.parametrize(("family", "kind"), [("dream", "Dream"), ("sdar", "sdar")])
def test_a_trained_family_is_written_in_its_published_layout(
    train: Command, tmp_path: Path, family: str, kind: str
) -> None:
    """Keys of configuration and tensors are those of the authors' checkpoints."""
    golden = shared("golden", family, "model")
    code, out, err = train(f"recipe=tiny_{family}", *SHORT, "recipe.steps=50", "recipe.start=null")
    assert code == 0 and err == "" and f"python -m pipeline model=tiny_{family} model.path=" in out
    folder = tmp_path / "outputs" / "train" / f"tiny_{family}" / "model"
    published, written = (json.loads((where / "config.json").read_text()) for where in (golden, folder))
    assert written.keys() == published.keys() and written["model_type"] == kind
    assert written["architectures"] == published["architectures"] and written["mask_token_id"] == 1
    assert written.get("block_size") == (8 if family == "sdar" else None)
    first, second = (
        {re.sub(r"\d+", "N", name) for name in load_file(where / "model.safetensors")} for where in (golden, folder)
    )
    assert first == second


def test_a_training_of_an_older_version_is_continued(train: Command, tmp_path: Path) -> None:
    short = [*SHORT, "recipe.steps=50"]
    assert train("run=old", *short)[0] == 0
    file = tmp_path / "outputs" / "train" / "old" / "settings.json"
    settings = json.loads(file.read_text())
    for key in ("family", "block_size", "start"):
        del settings["recipe"][key]
    file.write_text(json.dumps(settings))
    assert "is finished" in train("run=old", *short)[1]
    assert "recipe.family=llama instead of dream" in train("run=old", *short, "recipe.family=dream")[2]


@pytest.mark.parametrize("sweep", ["-m", "hydra.mode=MULTIRUN"])
def test_sweeps_of_trainings_are_refused(train: Command, tmp_path: Path, sweep: str) -> None:
    code, out, err = train(sweep, "recipe=tiny,tiny_ar")
    assert (code, out) == (2, "") and not list(tmp_path.iterdir())
    assert err == "error: -m is not for training: run the commands one after the other, without it\n"


def test_ctrl_c_ends_with_130_and_the_same_command_gives_the_weights_and_the_time_of_one_go(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, step, stop_at = [0.0], Training.training_step, [-1]

    def timed(self: Training, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, stop_at[0]):
            signal.raise_signal(signal.SIGINT)
        clock[0] += 1
        step(self, batch, batch_idx)

    monkeypatch.setattr("pipeline.training.monotonic", lambda: clock[0])
    monkeypatch.setattr(Training, "training_step", timed)
    assert train("run=whole", *SHORT)[0] == 0
    stop_at[0] = 30
    code, out, err = train("run=cut", *SHORT)
    assert code == 130 and out.count("\n") == 1 and "40,160 parameters, 100 steps of 4 problems" in out
    assert err == "interrupted (SIGINT): the same command continues\n"
    cut, whole = (tmp_path / "outputs" / "train" / run for run in ("cut", "whole"))
    with (cut / "loss.jsonl").open("a") as curve:
        curve.write('{"step": 100, "lo')  # what a kill leaves that comes before the checkpoint
    stop_at[0] = -1
    code, out, err = train("run=cut", *SHORT)
    assert code == 0 and err == "" and "from step 50 on" in out
    assert "decode with: python -m pipeline model=tiny model.path=outputs/train/cut/model dataset" in out
    for name in ("loss.jsonl", "model/model.safetensors", "model/training.json", "settings.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    record = json.loads((cut / "model" / "training.json").read_text())
    assert record["seconds"] == 100 and record["config"] == json.loads((cut / "settings.json").read_text())


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(train: Command, tmp_path: Path) -> None:
    short = [*SHORT, "recipe.steps=50"]
    code, out, err = train("recipe=tiny_ar", *short)
    assert code == 0 and err == "" and out.count("\n") == 2 and "model=tiny_ar sampler=autoregressive" in out
    before = _files(tmp_path)
    code, out, err = train("recipe=tiny_ar", *short)
    assert code == 0 and err == "" and "outputs/train/tiny_ar is finished, nothing to do; decode with" in out
    code, out, err = train("recipe=tiny_ar", *short, "seed=1", "recipe.lr=0.001")
    assert (code, out) == (2, "") and "recipe.lr=0.003 instead of 0.001, seed=0 instead of 1: repeat" in err
    assert err.count("\n") == 1 and _files(tmp_path) == before


def test_a_folder_of_something_else_or_in_use_is_refused(train: Command, tmp_path: Path) -> None:
    old = tmp_path / "outputs" / "train" / "old"
    old.mkdir(parents=True)
    (old / "last.ckpt").touch()
    assert "holds files but no settings.json" in train("run=old", *SHORT)[2]
    code, _, err = train("run=old/last.ckpt/deeper", *SHORT)
    assert code == 2 and "cannot be written: a part of it is a file" in err
    with claimed(Path("outputs/train/busy")):
        code, _, err = train("run=busy", *SHORT)
    assert code == 2 and "is being trained by another process" in err


def test_a_loss_that_is_no_number_ends_the_training_with_its_last_good_checkpoint(train: Command) -> None:
    code, _, err = train("run=wild", *SHORT, "recipe.matrix_lr=1e38", "recipe.lr=1e38")
    assert code == 2 and err.count("\n") == 1 and "the loss is nan at step 50, use smaller ones" in err


def test_a_single_row_without_a_masked_token_does_not_spoil_the_weights(train: Command, tmp_path: Path) -> None:
    assert train("run=one", *SHORT, "recipe.batch_size=1")[0] == 0
    weights = load_file(tmp_path / "outputs" / "train" / "one" / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_weights(command_line: CommandLine) -> None:
    curve = command_line.folder / "outputs" / "train" / "cut" / "loss.jsonl"
    command = [sys.executable, "-m", "pipeline.train", "recipe=tiny", "run=cut", *SMALL]
    process = subprocess.Popen(command, cwd=command_line.folder, env={**_environment(), "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (curve.exists() and (curve.parent / "last.ckpt").exists()):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    weights = curve.parent / "model" / "model.safetensors"
    assert not weights.exists(), "it was done before it could be cut"
    checkpoint = f"model.path={curve.parent / 'last.ckpt'}"
    command_line("model=tiny", checkpoint, "dataset.limit=2", "run=halfway", "logger=none")
    command_line("recipe=tiny", "run=cut", *SMALL, module="pipeline.train")
    command_line("recipe=tiny", "run=whole", *SMALL, module="pipeline.train")
    cut, whole = (
        load_file(command_line.folder / "outputs" / "train" / run / "model" / "model.safetensors")
        for run in ("cut", "whole")
    )
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    model = command_line.folder / "outputs" / "train" / "cut" / "model"
    command_line("model=tiny", f"model.path={model}", "dataset.limit=4", "run=decoded", "logger=none")
    assert command_line.summary("decoded")["complete"]


def _environment() -> dict[str, str]:
    import os

    from tests.conftest import OFFLINE

    return {**os.environ, **OFFLINE}


def test_the_shipped_weights_carry_their_card_and_stay_small() -> None:
    recipes = {"llada": "tiny", "ar": "tiny_ar", "dream": "tiny_dream", "sdar": "tiny_sdar", "ar_dflash": "dflash"}
    assert recipes.keys() == {path.name for path in (ROOT / "adapters" / "tiny").iterdir() if path.is_dir()}
    for name, recipe in recipes.items():
        folder: Path = ROOT / "adapters" / "tiny" / name
        assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
        record = json.loads((folder / "training.json").read_text())
        assert 500_000 <= record["parameters"] <= 4_000_000
        assert record["config"]["seed"] == 0 and record["seconds"] > 0
        assert f"`python -m pipeline.train recipe={recipe}`" in (ROOT / "adapters" / "tiny" / "README.md").read_text()
