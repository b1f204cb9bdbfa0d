"""Train the tiny models: ``python -m pipeline.train recipe=tiny`` (or ``tiny_ar``, ``tiny_dream``, ``tiny_sdar``), and
a drafter for the autoregressive one, ``recipe=dflash``.

The folder ``outputs/train/<run>`` holds its settings, the checkpoint, the loss curve and, at the end, a model folder
that ``model=tiny model.path=…`` decodes with. The same command continues an interrupted training and gives the same
weights; other settings need another folder.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from pipeline.cli import Carried, guarded
from pipeline.errors import UserError
from pipeline.files import refusing, try_lock
from pipeline.quiet import quiet_libraries
from pipeline.recipe import Recipe, folder_of, options_of, refuse_unusable, register
from pipeline.runs import RunFolder
from pipeline.stopping import Stopped

MODELS = {  # options of decoding, by family
    **{"llama": "tiny", "dream": "tiny_dream", "sdar": "tiny_sdar"},
    "dflash": "tiny_ar_dflash sampler=dflash",
}


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
    from pipeline.training import begin, export, fit

    training = begin(recipe, seed, folder)
    with claimed(folder) as claim:
        claim.write_json("settings.json", settings)
        fit(training, folder)
        export(training, folder / "model", settings)
    print(f"{folder / 'model'} after {training.seconds:.0f} s; {usage}")


def _command(recipe: Recipe, model: Path) -> str:
    choice = "tiny_ar sampler=autoregressive" if recipe.objective == "causal" else MODELS[recipe.family]
    place = shlex.quote(f"model.path={model}")
    if recipe.objective == "dflash":
        place = shlex.join([f"model.path={recipe.target}", f"model.draft={model}"])
    return f"python -m pipeline model={choice} {place} dataset.limit=20"


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
    unsaid = asdict(Recipe())  # an older version's settings lack options that came later
    before, now = ({**unsaid, **s["recipe"], "seed": s["seed"]} for s in (stored, settings))
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
    with refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder / ".lock")
    if lock is None:
        raise UserError(f"{folder} is being trained by another process: wait, or give another run=")
    with lock:
        yield RunFolder(folder)


class OneAtATime(Callback):
    """Refuses ``-m`` before Hydra writes anything: each training takes an hour and is continued by its own command."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        raise Carried() from UserError("-m is not for training: run the commands one after the other, without it")


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def _train(cfg: DictConfig) -> None:
    quiet_libraries()
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a training that goes on
    try:
        options = options_of(cfg)
        train(options.recipe, options.seed, folder_of(options.run))
    except Stopped as stopped:
        print(f"{stopped.state} ({stopped}): the same command continues", file=sys.stderr)
        sys.exit(stopped.code)
    except Exception as error:
        raise Carried() from error


def main() -> None:
    register()
    guarded(_train)


if __name__ == "__main__":
    main()
