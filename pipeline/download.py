"""``python -m pipeline.download model=… dataset=…``: fetch and check all that a run needs, for nodes without a network.

Lists are written with commas: ``model=llada,dream dataset=gsm8k``. Afterwards runs work with ``HF_HUB_OFFLINE=1``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline.errors import UserError

if TYPE_CHECKING:
    from adapters.hub import Repository
    from adapters.places import ModelOptions
    from pipeline.data.base import Dataset

ROOM = 2**28  # bytes left free beside what is fetched: locks, links, and what else is written meanwhile


@dataclass(frozen=True)
class Wanted:
    """One thing to fetch: what the command line calls it, where it lies, and the option that pins it."""

    label: str
    repository: Repository
    option: str

    @property
    def pins(self) -> list[str]:
        """The override that fixes the commit, unless it is fixed already."""
        fixed = self.repository.revision == self.repository.commit
        return [] if fixed else [f"{self.label}: {self.option}={self.repository.commit}"]


def download(overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Fetch and check the models and datasets of a command line; says on stdout what and how much.

    Raises:
        UserError: one sentence, if something does not come, does not fit on the disk, or is not what it should be.
    """
    from pipeline.config import named
    from pipeline.overrides import keys

    configurations = _compose(overrides, config_dir)
    models = {OmegaConf.to_yaml(cfg.model): named(cfg, keys(list(overrides))).model for cfg in configurations}
    datasets = {OmegaConf.to_yaml(cfg.dataset): cfg.dataset for cfg in configurations}
    try:
        pins = [pin for node in models.values() for pin in _fetch_model(node)]
        pins += [pin for node in datasets.values() for pin in _fetch_dataset(node)]
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    for pin in pins:
        print(f"to pin {pin}")
    print("ready for HF_HUB_OFFLINE=1")


def _compose(overrides: Sequence[str], config_dir: str | None) -> list[DictConfig]:
    """One configuration for each model and dataset of the lists."""
    from pipeline.compose import compose

    lists = {"model": [""], "dataset": [""]}
    rest = []
    for word in overrides:
        group, _, value = word.partition("=")
        if group in lists:
            lists[group] = [f"{group}={name}" for name in value.split(",")]
        else:
            rest.append(word)
    pairs = [(model, dataset) for model in lists["model"] for dataset in lists["dataset"]]
    return [compose([word for word in (*pair, *rest) if word], config_dir) for pair in pairs]


# ---- models ----------------------------------------------------------------------------------------------------------


def _fetch_model(node: DictConfig) -> list[str]:
    """Fetch a model and check it as far as that goes without reading its weights; returns what pins it."""
    from adapters.places import ModelOptions
    from pipeline.config import plain

    options = ModelOptions(**plain(node))
    if options.kind == "checkpoint" and options.hub and not options.path:
        wanted = _model(f"model={options.name}", options.hub, options.revision, "model.revision")
        _fetch(wanted)
        pins = [*wanted.pins, *_fetch_base(options, wanted.repository.folder)]
    else:
        print(f"model={options.name}: nothing to fetch for {options.path or 'the toy'}")
        pins = _fetch_base(options, Path(options.path).expanduser()) if options.path else []
        if not pins:
            return []
    _check_model(options)
    return pins


def _model(label: str, hub: str, revision: str | None, option: str) -> Wanted:
    from adapters.arrival import patterns_of
    from adapters.hub import look_up

    whole = look_up(hub, revision)
    try:
        patterns = patterns_of([file.name for file in whole.files])
    except ValueError as error:
        raise UserError(f"{label}: {hub} cannot be used, {error}") from error
    return Wanted(label, whole.matching(patterns), option)


def _fetch_base(options: ModelOptions, folder: Path) -> list[str]:
    """What lies under a LoRA checkpoint, if it is one and its base is on the hub."""
    from adapters.places import LORA_CONFIG

    if not (folder / LORA_CONFIG).is_file():
        return []
    base = options.base or json.loads((folder / LORA_CONFIG).read_text()).get("base_model_name_or_path")
    if not base or base.startswith("tiny/") or Path(base).expanduser().exists():
        return []
    wanted = _model(f"base of model={options.name}", base, options.base_revision, "model.base_revision")
    _fetch(wanted)
    return wanted.pins


def _check_model(options: ModelOptions) -> None:
    """Find and read it as a run would, but for the weights; that also files the revision for runs without a network."""
    from adapters.arrival import check_headers
    from adapters.description import describe

    description = describe(options)
    if description.place and not description.place.gguf:
        count = check_headers(description)
        print(f"model={options.name}: {count} tensors fit {description.family.name}")


# ---- datasets --------------------------------------------------------------------------------------------------------


def _fetch_dataset(node: DictConfig) -> list[str]:
    """A dataset from the hub is fetched, checked and prepared; any other is read, which tells whether it is there."""
    from adapters.hub import look_up
    from pipeline.job import make_dataset

    if OmegaConf.is_missing(node, "path"):
        print(f"dataset={node.name}: nothing to fetch, its questions lie at dataset.path")
        return []
    dataset = make_dataset(node)
    dataset.validate()
    source = _source(dataset)
    wanted = None
    if source:
        hub, revision, patterns = source
        found = look_up(hub, revision, "dataset").matching(patterns)
        wanted = Wanted(f"dataset={dataset.name}", found, "dataset.revision")
        _fetch(wanted)
    else:
        print(f"dataset={dataset.name}: nothing to fetch")
    print(f"dataset={dataset.name}: {len(dataset.samples())} samples")
    return wanted.pins if wanted else []


def _source(dataset: Dataset) -> tuple[str, str, list[str]] | None:
    """Hub id, revision and files of a dataset that comes from the hub."""
    from pipeline.data.gsm8k import HUB, Gsm8k

    if isinstance(dataset, Gsm8k) and not dataset.path:
        return HUB, dataset.revision, ["main/*", "README.md"]
    return None


# ---- both ------------------------------------------------------------------------------------------------------------


def _fetch(wanted: Wanted) -> None:
    """The small files first: they tell whether the weights are worth fetching."""
    from adapters.arrival import check_plan
    from adapters.hub import check_content, fetch

    repository = wanted.repository
    _announce(wanted)
    for file in repository.files:  # what an earlier call left is checked too, before anything is added to it
        if path := repository.cached(file):
            check_content(path, file)
    for file in [file for file in repository.absent if not file.is_weights]:
        fetch(repository, file)
    if repository.kind == "model":
        check_plan(repository)
    for file in repository.absent:
        fetch(repository, file)
    print(f"{wanted.label}: {len(repository.files)} files are what the hub states")


def _announce(wanted: Wanted) -> None:
    """Print what is to be fetched; refuse what does not fit on the disk."""
    from adapters.hub import cache_folder

    repository, cache = wanted.repository, cache_folder()
    absent = repository.absent
    print(f"{wanted.label}: {repository.hub} at {repository.revision} (commit {repository.commit})")
    for file in sorted(repository.files, key=lambda file: file.name):
        print(f"  {file.name:<44} {size(file.size):>10}{'' if file in absent else '  here already'}")
    place = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    needed, free = sum(file.size for file in absent), shutil.disk_usage(place).free
    print(f"  to fetch: {len(absent)} files, {size(needed)}, to {cache}, where {size(free)} are free", flush=True)
    if needed and needed + ROOM > free:
        raise UserError(
            f"{wanted.label} needs {size(needed + ROOM)} in {cache}, where {size(free)} are free: "
            "make room, or set HF_HOME to a folder on a larger disk"
        )


def size(count: int) -> str:
    """Bytes as a person reads them, in powers of 1000 as disks are sold."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipeline.download", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for a run: model=… dataset=…")
    parser.add_argument("--config-dir", help="a folder of further options")
    return parser.parse_intermixed_args(words)


def main() -> None:
    """The command; exit code 0, 2 for what cannot be fetched or is broken, 130 after Ctrl-C."""
    from pipeline.cli import guarded
    from pipeline.quiet import quiet_libraries

    options: Any = _options(sys.argv[1:])
    quiet_libraries()
    guarded(lambda: download(options.overrides, options.config_dir))


if __name__ == "__main__":
    main()
