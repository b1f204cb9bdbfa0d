"""``python -m pipeline.download model=… dataset=…``: fetch and check all that a run needs, for nodes without a network.

Lists are written with commas: ``model=llada,dream dataset=gsm8k``. Afterwards runs work with ``HF_HUB_OFFLINE=1``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline.errors import UserError
from pipeline.fetching import Wanted, fetch_and_check

if TYPE_CHECKING:
    from adapters.places import ModelOptions


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
    from adapters.options import refuse_unknown
    from adapters.places import ModelOptions
    from pipeline.config import plain

    options = ModelOptions(**plain(node))
    refuse_unknown(options)  # before anything is fetched
    if options.kind == "checkpoint" and options.hub and not options.path:
        wanted = _model(f"model={options.name}", options.hub, options.revision, "model.revision")
        fetch_and_check(wanted)
        pins = [*wanted.pins, *_fetch_base(options, wanted.repository.folder)]
    else:
        pins = _fetch_base(options, Path(options.path).expanduser()) if options.path else []
    _check_model(options)
    if not pins and (options.path or not options.hub):
        print(f"model={options.name}: nothing to fetch for {options.path or 'the toy'}")
    return pins


def _model(label: str, hub: str, revision: str | None, option: str) -> Wanted:
    from adapters.checkpoints.arrival import patterns_of
    from adapters.checkpoints.hub import look_up

    whole = look_up(hub, revision)
    try:
        patterns = patterns_of([file.name for file in whole.files])
    except ValueError as error:
        raise UserError(f"{label}: {hub} cannot be used, {error}") from error
    return Wanted(label, whole.matching(patterns), option)


def _fetch_base(options: ModelOptions, folder: Path) -> list[str]:
    """What lies under a LoRA checkpoint, if it is one and its base is on the hub."""
    from adapters.checkpoints.files import LORA_CONFIG, read_json

    if not (folder / LORA_CONFIG).is_file():
        return []
    base = options.base or read_json(folder / LORA_CONFIG).get("base_model_name_or_path")
    if not base or base.startswith("tiny/") or Path(base).expanduser().exists():
        return []
    wanted = _model(f"base of model={options.name}", base, options.base_revision, "model.base_revision")
    fetch_and_check(wanted)
    return wanted.pins


def _check_model(options: ModelOptions) -> None:
    """Find and read it as a run would, but for the weights; that also files the revision for runs without a network."""
    from adapters.checkpoints import spread
    from adapters.description import describe
    from adapters.loading import check

    if options.device_map not in (None, "auto"):
        spread.check(options.device_map)
    bare = replace(options, device_map=None, quantization={}, compile=False)  # these ask for the machine that runs it
    description = describe(bare)
    if description.place and not description.place.gguf:
        count = check(description)
        print(f"model={options.name}: {count} tensors fit {description.family.name}")


# ---- datasets --------------------------------------------------------------------------------------------------------


def _fetch_dataset(node: DictConfig) -> list[str]:
    """A dataset from the hub is fetched, checked and prepared; any other is read, which tells whether it is there."""
    from adapters.checkpoints.hub import look_up
    from pipeline.job import make_dataset

    if OmegaConf.is_missing(node, "path"):
        print(f"dataset={node.name}: nothing to fetch, its questions lie at dataset.path")
        return []
    dataset = make_dataset(node)
    dataset.validate()
    wanted = None
    if source := dataset.source():
        found = look_up(source.hub, source.revision, "dataset").matching(list(source.patterns))
        wanted = Wanted(f"dataset={dataset.name}", found, "dataset.revision")
        fetch_and_check(wanted)
    else:
        print(f"dataset={dataset.name}: nothing to fetch")
    print(f"dataset={dataset.name}: {len(dataset.samples())} samples")
    return wanted.pins if wanted else []


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipeline.download", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for a run: model=… dataset=…")
    parser.add_argument("--config-dir", help="a folder of further options")
    return parser.parse_intermixed_args(words)


def main() -> None:
    """The command; exit code 0, 2 for what cannot be fetched or is broken, 130 after Ctrl-C."""
    from pipeline.cli import guarded, refuse_sweep
    from pipeline.quiet import quiet_libraries

    guarded(lambda: refuse_sweep(sys.argv[1:]))
    options: Any = _options(sys.argv[1:])
    quiet_libraries()
    guarded(lambda: download(options.overrides, options.config_dir))


if __name__ == "__main__":
    main()
