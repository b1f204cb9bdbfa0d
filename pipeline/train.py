"""Train the tiny models from scratch: ``python -m pipeline.train recipe=tiny`` (or ``recipe=tiny_ar``).

The folder ``outputs/train/<run>`` holds its settings, the checkpoint, the loss curve and, at the end, a model folder
that ``model=tiny model.path=…`` decodes with. The same command continues an interrupted training and gives the same
weights; other settings need another folder.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import Any

import hydra
import lightning
import torch
import transformers
from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import MISSING, DictConfig
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.cli import Carried, guarded
from pipeline.config import plain, refuse_missing
from pipeline.data.arithmetic import LEVELS, Problem, make_problem, words
from pipeline.errors import UserError
from pipeline.quiet import quiet_libraries
from pipeline.runs import RunFolder
from pipeline.stopping import Stopped
from pipeline.tokenizer import build_tokenizer

OUTPUTS = Path("outputs/train")
STEPS_AN_EPOCH = 50  # an "epoch" is the stretch between two checkpoints
SHORTEST_CANVAS, LONGEST_CANVAS = 26, 38  # the longest answer (four operations) takes 25 tokens and its end token
IGNORE = -100  # cross-entropy skips targets of this value
LARGEST_SEED = 2**32 - 1  # NumPy's, which Lightning seeds too
DECODE = {"masked": "model=tiny", "causal": "model=tiny_ar sampler=autoregressive"}  # by objective


@dataclass
class Recipe:
    """What is trained and how, as in ``conf/recipe/<name>.yaml``.

    Attributes:
        name: also the folder's, unless ``run=`` gives another.
        objective: ``masked`` (full attention, LLaDA style) or ``causal`` (next token).
        level_weights: shares of problems with 1, 2, … operations; they need not add up to one.
        matrix_lr, lr: of Muon for the layers' matrices, of AdamW for the rest.
        warmup: steps in which both rates rise.
        decay: share of the steps, at the end, in which both fall to zero.
    """

    name: str = MISSING
    objective: str = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    level_weights: list[float] = MISSING
    batch_size: int = MISSING
    steps: int = MISSING
    matrix_lr: float = MISSING
    lr: float = MISSING
    warmup: int = MISSING
    decay: float = MISSING


@dataclass
class Options:
    """The command's options.

    Attributes:
        run: folder below ``outputs/train``.
        seed: of the first weights, the problems and the masks.
    """

    recipe: Recipe = field(default_factory=Recipe)
    run: str = MISSING
    seed: int = 0


class Batches(Dataset):
    """Fresh problems for every step. Item ``i`` depends only on (seed, epoch, i), so resuming changes nothing.

    An item is (inputs, targets), both (B, T): the chat prompt, the answer, and end tokens up to a common length;
    targets are ``IGNORE`` wherever nothing is to be learnt.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> None:
        self.recipe, self.tokenizer, self.seed, self.epoch = recipe, tokenizer, seed, epoch

    def __len__(self) -> int:
        return STEPS_AN_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}-{self.epoch}-{index}")
        problems = [self._problem(rng) for _ in range(self.recipe.batch_size)]
        chats = [[{"role": "user", "content": p.question}] for p in problems]
        prompts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        answers = self.tokenizer([p.answer for p in problems]).input_ids
        canvas = rng.randint(SHORTEST_CANVAS, LONGEST_CANVAS)
        ids = torch.full((len(problems), max(map(len, prompts)) + canvas), self.tokenizer.eos_token_id)
        answered = torch.zeros_like(ids, dtype=torch.bool)
        ended = torch.zeros_like(answered)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            answered[row, len(prompt) :] = True
            ended[row, end + 1 :] = True
        if self.recipe.objective == "causal":
            return self._causal(ids, answered & ~ended)
        return self._masked(ids, answered, torch.Generator().manual_seed(rng.getrandbits(63)))

    def _problem(self, rng: random.Random) -> Problem:
        while True:
            problem = make_problem(rng.choices(LEVELS, self.recipe.level_weights)[0], rng)
            if problem.split == "train":
                return problem

    def _causal(self, ids: torch.Tensor, learnt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row predicts the next token of the answer, its first end token included."""
        return ids[:, :-1], ids.masked_fill(~learnt, IGNORE)[:, 1:]

    def _masked(
        self, ids: torch.Tensor, answered: torch.Tensor, noise: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each answer token (filler end tokens too, as LLaDA does) is masked with its row's probability t ~ U(0, 1)."""
        t = torch.rand(ids.shape[0], 1, generator=noise)
        masked = answered & (torch.rand(ids.shape, generator=noise) < t)
        inputs = ids.masked_fill(masked, self.tokenizer.mask_token_id)
        return inputs, ids.masked_fill(~masked, IGNORE)


class Training(lightning.LightningModule):
    """Cross-entropy on the wanted tokens; Muon for the layers' matrices, AdamW for the rest, one schedule for both."""

    def __init__(self, recipe: Recipe, seed: int, tokenizer: PreTrainedTokenizerFast, curve: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.began, self.seconds_before = monotonic(), 0.0
        self.recipe, self.seed, self.tokenizer, self.curve = recipe, seed, tokenizer, curve
        self.model = build_model(recipe, tokenizer)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Batches(self.recipe, self.tokenizer, self.seed, self.current_epoch), batch_size=None)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        taken = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in taken]
        return [
            torch.optim.Muon(matrices, lr=self.recipe.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=self.recipe.lr, weight_decay=0.01, betas=(0.9, 0.98)),
        ]

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        wanted = targets != IGNORE
        if not wanted.any():  # few rows may have no masked token: nothing to learn, and the mean would be no number
            return
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        loss = nn.functional.cross_entropy(self.model.lm_head(hidden[wanted]), targets[wanted])
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = learning_rate_scale(self.current_epoch * STEPS_AN_EPOCH + batch_idx, self.recipe)
        for optimizer, rate in zip(optimizers, (self.recipe.matrix_lr, self.recipe.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(inputs))

    def on_train_epoch_end(self) -> None:
        step, loss = (self.current_epoch + 1) * STEPS_AN_EPOCH, float(self.trainer.callback_metrics["loss_epoch"])
        if not math.isfinite(loss):
            rates = f"recipe.matrix_lr={self.recipe.matrix_lr} and recipe.lr={self.recipe.lr}"
            raise UserError(f"{rates}: the loss is {loss} at step {step}, use smaller ones and another run=")
        with self.curve.open("a") as file:
            file.write(json.dumps({"step": step, "loss": round(loss, 5)}) + "\n")

    @property
    def seconds(self) -> float:
        """Spent so far, stretches before an interruption included, but not what was lost after their checkpoints."""
        return self.seconds_before + monotonic() - self.began

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over its time, and cut off the curve what was written after it."""
        self.seconds_before = checkpoint["seconds"]
        lines = self.curve.read_text().splitlines(keepends=True) if self.curve.exists() else []
        self.curve.write_text("".join(lines[: checkpoint["epoch"] + 1]))

    def on_train_start(self) -> None:
        recipe, start = self.recipe, self.current_epoch * STEPS_AN_EPOCH
        print(
            f"recipe {recipe.name}: {self.parameter_count:,} parameters, {recipe.steps} steps of {recipe.batch_size} "
            f"problems{f', from step {start} on' if start else ''} → {self.curve.parent}",
            flush=True,
        )

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def learning_rate_scale(step: int, recipe: Recipe) -> float:
    """Linear warm-up, a plateau, then a linear fall to zero over the last ``decay`` share of the steps."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    return min(warm, (recipe.steps - step) / (recipe.steps * recipe.decay))


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A native Llama network; ``is_causal=False`` in its configuration makes the attention full."""
    masked = recipe.objective == "masked"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    config.is_causal = not masked
    if masked:
        config.mask_token_id = tokenizer.mask_token_id
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = not masked
    return model


class WholeFiles(TorchCheckpointIO):
    """Replaces a checkpoint at one stroke, wherever temporary files are: it may be read or the run killed meanwhile."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        draft = Path(path).with_name(f".{Path(path).name}")
        super().save_checkpoint(checkpoint, draft, storage_options)
        os.replace(draft, path)


def train(recipe: Recipe, seed: int, folder: Path) -> None:
    """Train in a folder, or go on from its checkpoint; one that is finished is left alone.

    Raises:
        UserError: for a recipe or a folder that cannot be used, before anything is written.
    """
    refuse_unusable(recipe, seed)
    settings = {"recipe": asdict(recipe), "seed": seed}
    refuse_foreign(folder, settings)
    usage = f"decode with: {_command(recipe, folder / 'model')}"
    if (folder / "model" / "training.json").exists():  # written last
        print(f"{folder} is finished, nothing to do; {usage}")
        return
    with claimed(folder) as claim:
        claim.write_json("settings.json", settings)
        training = _fit(recipe, seed, folder)
        export(training, folder / "model", settings)
    print(f"{folder / 'model'} after {training.seconds:.0f} s; {usage}")


def _fit(recipe: Recipe, seed: int, folder: Path) -> Training:
    lightning.seed_everything(seed, verbose=False)
    training = Training(recipe, seed, build_tokenizer(words()), folder / "loss.jsonl")
    last = folder / "last.ckpt"
    bars = [RichProgressBar()] if sys.stdout.isatty() else []
    trainer = lightning.Trainer(
        default_root_dir=folder,
        devices=1,  # a step's problems are the recipe's, not as many times that as there are GPUs
        max_epochs=recipe.steps // STEPS_AN_EPOCH,
        callbacks=[ModelCheckpoint(folder, filename="last", enable_version_counter=False), *bars],
        plugins=[WholeFiles()],
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=STEPS_AN_EPOCH,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=bool(bars),
    )
    save_description(training, folder / "model")
    if not last.exists():
        training.curve.unlink(missing_ok=True)  # of a try that ended before its first checkpoint
    trainer.fit(training, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    return training


def save_description(training: Training, folder: Path) -> None:
    """Configuration and tokenizer, so that ``model.path=…/last.ckpt`` decodes while the training goes on."""
    training.model.config.save_pretrained(folder)
    training.model.generation_config.save_pretrained(folder)
    training.tokenizer.save_pretrained(folder)


def export(training: Training, folder: Path, settings: dict[str, Any]) -> None:
    """Write an ordinary model folder (safetensors, configuration, tokenizer) and what made it."""
    training.model.save_pretrained(folder)
    record = {"seconds": round(training.seconds), "config": settings, "parameters": training.parameter_count}
    RunFolder(folder).write_json("training.json", record)


def _command(recipe: Recipe, model: Path) -> str:
    return f"python -m pipeline {DECODE[recipe.objective]} {shlex.quote(f'model.path={model}')} dataset.limit=20"


def folder_of(run: str) -> Path:
    """Where a training goes.

    Raises:
        UserError: for a name that is no folder below ``outputs/train``.
    """
    if not run.strip() or ".." in run or run.startswith("/") or not Path(run).parts:
        raise UserError(f"run={run!r} is no folder name: use one below {OUTPUTS}")
    return OUTPUTS / run


def refuse_foreign(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder whose training has other settings, or that holds something else.

    Raises:
        UserError: naming what differs.
    """
    stored = RunFolder(folder).read_json("settings.json")
    if stored is None:
        if not folder.is_dir() or not any(p.is_file() and p.name[0] != "." for p in folder.iterdir()):
            return
        raise UserError(f"{folder} holds files but no settings.json to continue with: give another run=")
    before, now = ({**s["recipe"], "seed": s["seed"]} for s in (stored, settings))
    if differing := [key for key in now if before.get(key) != now[key]]:
        named = ", ".join(f"{_full(key)}={before.get(key)} instead of {now[key]}" for key in differing)
        raise UserError(f"{folder} was trained with {named}: repeat these settings, or give another run=")


def _full(key: str) -> str:
    return key if key == "seed" else f"recipe.{key}"


@contextmanager
def claimed(folder: Path) -> Iterator[RunFolder]:
    """Make the folder and be its only writer.

    Raises:
        UserError: while another process trains here, or if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): give another run=") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder} is being trained by another process: wait, or give another run=") from error
        except OSError:
            pass  # a file system without locks
        yield RunFolder(folder)


def refuse_unusable(recipe: Recipe, seed: int) -> None:
    """Refuse values that cannot be trained with.

    Raises:
        UserError: naming the first key, its value and what would be right.
    """
    if recipe.objective not in DECODE:
        raise UserError(f"recipe.objective={recipe.objective} is not known: use {' or '.join(DECODE)}")
    for key in ("intermediate_size", "layers", "heads", "batch_size", "warmup"):
        _refuse(key, getattr(recipe, key), getattr(recipe, key) >= 1, "a whole number from 1 up")
    for key in ("matrix_lr", "lr"):
        _refuse(key, getattr(recipe, key), 0 < getattr(recipe, key) < math.inf, "a finite number above 0")
    _refuse("decay", recipe.decay, 0 < recipe.decay <= 1, "a number above 0, at most 1")
    whole = _nearest(recipe.steps, STEPS_AN_EPOCH)
    _refuse("steps", recipe.steps, recipe.steps == whole, f"a multiple of {STEPS_AN_EPOCH}, such as {whole}")
    pairs = 2 * recipe.heads  # rotary embeddings turn pairs of a head's dimensions
    width = _nearest(recipe.hidden_size, pairs)
    fit = f"a multiple of {pairs} (an even size for each of recipe.heads={recipe.heads}), such as {width}"
    _refuse("hidden_size", recipe.hidden_size, recipe.hidden_size == width, fit)
    weights = recipe.level_weights
    shares = len(weights) == len(LEVELS) and min(weights) >= 0 and 0 < sum(weights) < math.inf
    _refuse("level_weights", weights, shares, f"{len(LEVELS)} finite numbers from 0 up, not all of them 0")
    if not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed={seed} is out of range: use a whole number from 0 to {LARGEST_SEED}")


def _refuse(key: str, value: Any, right: bool, wanted: str) -> None:
    if not right:
        raise UserError(f"recipe.{key}={value} does not fit: use {wanted}")


def _nearest(value: int, unit: int) -> int:
    """The nearest positive multiple."""
    return max(1, (value + unit // 2) // unit) * unit


def options_of(cfg: DictConfig) -> Options:
    """The composed configuration as a typed value.

    Raises:
        UserError: for a key that is unknown or without a value.
    """
    for prefix, node, schema in (("", cfg, Options), ("recipe.", cfg.recipe, Recipe)):
        known = [entry.name for entry in fields(schema)]
        if unknown := [str(key) for key in node if key not in known]:
            raise UserError(f"{prefix}{unknown[0]} is no option: the options are {', '.join(known)}")
    refuse_missing(cfg)
    values = plain(cfg)
    return Options(Recipe(**values["recipe"]), values["run"], values["seed"])


class OneAtATime(Callback):
    """Refuses ``-m`` before Hydra writes anything: each training takes an hour and is continued by its own command."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        raise Carried() from UserError("-m is not for training: run the commands one after the other, without it")


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def _train(cfg: DictConfig) -> None:
    quiet_libraries()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a training that goes on
    try:
        options = options_of(cfg)
        train(options.recipe, options.seed, folder_of(options.run))
    except Stopped as stopped:
        print(f"{stopped.state} ({stopped}): the same command continues", file=sys.stderr)
        sys.exit(stopped.code)
    except Exception as error:
        raise Carried() from error


def register() -> None:
    """Make the options' types known to Hydra; ``conf/train.yaml`` starts from them."""
    ConfigStore.instance().store(name="train_schema", node=Options)


def main() -> None:
    register()
    guarded(_train)


if __name__ == "__main__":
    main()
