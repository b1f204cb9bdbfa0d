"""What a training is told: the recipe's shape, and what can't be trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from pipeline.config import plain, refuse_missing
from pipeline.data.arithmetic import LEVELS
from pipeline.errors import UserError
from pipeline.job import refuse_bad_name

OUTPUTS = Path("outputs/train")
OBJECTIVES = ("masked", "causal", "dflash")
STEPS_AN_EPOCH = 50  # an "epoch" is the stretch between two checkpoints
LARGEST_SEED = 2**32 - 1  # NumPy's, which Lightning seeds too
GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # DFlash's, by block size
OF_DRAFTERS = ("target", "taps", "anchors", "gamma")  # options


@dataclass(frozen=True)
class Family:
    """A published kind of model, in whose layout the result is written.

    Attributes:
        objectives: what it is trained with.
        smallest_block: least ``block_size``; None where attention is full and there are no blocks.
        shift: the prediction for token i is read at row ``i - shift``.
    """

    objectives: tuple[str, ...]
    smallest_block: int | None = None
    shift: int = 0


FAMILIES = {
    "llama": Family(("masked", "causal")),
    "dream": Family(("masked",), shift=1),
    "sdar": Family(("masked",), smallest_block=1),  # counted from position 0
    "dflash": Family(("dflash",), smallest_block=2),  # the last known token and a draft
}


@dataclass
class Recipe:
    """What is trained and how, as in ``conf/recipe/<name>.yaml``.

    Attributes:
        name: also the folder's, unless ``run=`` gives another.
        objective: ``masked`` (diffusion), ``causal`` (next token) or ``dflash`` (a drafter beside a frozen target).
        level_weights: shares of problems with 1, 2, … operations; they need not add up to one.
        matrix_lr, lr: of Muon for the layers' matrices, of AdamW for the rest.
        warmup: steps in which both rates rise.
        decay: share of the steps, at the end, in which both fall to zero.
        family: ``llama`` (native; masked means LLaDA style), ``dream``, ``sdar`` or ``dflash``, see `FAMILIES`.
        block_size: of a family that has blocks.
        start: a model folder or ``tiny/…`` whose tensors are taken over by name; null starts from scratch.
        target: a drafter's, a model folder or ``tiny/…``.
        taps: layers of the target, counted from 0, that a drafter sees; null spreads them as published.
        anchors: at most so many blocks of each answer are drafted in a step.
        gamma: slot k of a block weighs exp(-(k - 1) / gamma); null is `GAMMAS`.
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
    family: str = "llama"
    block_size: int | None = None
    start: str | None = None
    target: str | None = None
    taps: list[int] | None = None
    anchors: int | None = None
    gamma: float | None = None


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


def folder_of(run: str) -> Path:
    """Where a training goes.

    Raises:
        UserError: for a name that is no folder below ``outputs/train``.
    """
    refuse_bad_name("run", run, str(OUTPUTS))
    return OUTPUTS / run


def refuse_unusable(recipe: Recipe, seed: int) -> None:
    """Refuse values that cannot be trained with.

    Raises:
        UserError: naming the first key, its value and what would be right.
    """
    if recipe.objective not in OBJECTIVES:
        raise UserError(
            f"recipe.objective={recipe.objective} is not known: use {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}"
        )
    _refuse_unfit_family(recipe)
    _refuse_unfit_drafter(recipe)
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


def _refuse_unfit_family(recipe: Recipe) -> None:
    if recipe.family not in FAMILIES:
        raise UserError(f"recipe.family={recipe.family} is not known: use one of {', '.join(FAMILIES)}")
    known = FAMILIES[recipe.family]
    if recipe.objective not in known.objectives:
        fit = next(name for name, family in FAMILIES.items() if recipe.objective in family.objectives)
        raise UserError(
            f"recipe.family={recipe.family} is trained with recipe.objective={' or '.join(known.objectives)}: "
            f"{recipe.objective} needs {fit}"
        )
    least, size = known.smallest_block, recipe.block_size
    if least is not None and (size is None or size < least):
        raise UserError(
            f"recipe.block_size={_said(size)} does not fit recipe.family={recipe.family}: "
            f"use a whole number from {least} up"
        )
    if least is None and size is not None:
        raise UserError(f"recipe.block_size={size} is not used by recipe.family={recipe.family}: leave it null")


def _refuse_unfit_drafter(recipe: Recipe) -> None:
    if recipe.objective != "dflash":
        unused: tuple[str, ...] = OF_DRAFTERS
    else:
        unused = ("start",)
        _refuse("target", _said(recipe.target), bool(recipe.target), "a model folder, or tiny/ar")
        _refuse("anchors", _said(recipe.anchors), (recipe.anchors or 0) >= 1, "a whole number from 1 up")
        gamma = GAMMAS.get(recipe.block_size or 0) if recipe.gamma is None else recipe.gamma
        known = ", ".join(f"{value:g} for {size}" for size, value in GAMMAS.items())
        right = gamma is not None and 0 < gamma < math.inf
        wanted = f"a finite number above 0 (published for recipe.block_size: {known})"
        _refuse("gamma", _said(recipe.gamma), right, wanted)
    for key in unused:
        if (value := getattr(recipe, key)) is not None:
            raise UserError(f"recipe.{key}={value} is not used by recipe.objective={recipe.objective}: leave it null")


def _said(value: Any) -> Any:
    """As it is written in YAML."""
    return "null" if value is None else value


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


def register() -> None:
    """Make the options' types known to Hydra; ``conf/train.yaml`` starts from them."""
    ConfigStore.instance().store(name="train_schema", node=Options)
