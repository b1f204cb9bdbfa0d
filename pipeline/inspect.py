"""``python -m pipeline.inspect model=llada2_mini``: what a model is and what it needs, without its weights.

``model.path=…`` looks at a folder, and at whether its tensors fit. Without ``model=``: all models, one line each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pipeline.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from adapters.facts import Inspection
    from adapters.memory import Sizes

WIDTH = 100
SLOTS = 1000  # that memory for keys and values is told of
READ = ("row i", "row i - 1")
OVERVIEW = ("model", "family", "parameters", "active", "attention", "block", "token i at", "weights", "cache a row")


def inspect_model(cfg: DictConfig, overridden: Sequence[str] = ()) -> Inspection:
    """Look at the model of a configuration.

    Args:
        overridden: keys given on the command line.

    Raises:
        UserError: one sentence, if there is none or it is no model.
    """
    from adapters.facts import inspect
    from adapters.places import ModelOptions
    from pipeline.config import named, plain

    try:
        return inspect(ModelOptions(**plain(named(cfg, overridden).model)))
    except ValueError as error:
        raise UserError(str(error)) from error


def describe(found: Inspection, cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """What is told of one model, in order: label and text."""
    sizes, facts, source = found.sizes, found.facts, found.source
    yield "family", f"{found.family.name}, model_type {source.config.get('model_type')}"
    yield "architecture", f"{sizes.architecture}, native in transformers"
    yield "parameters", _parameters(sizes)
    yield (
        "layers",
        (
            f"{sizes.layers} of width {sizes.hidden}, {sizes.heads} heads of {sizes.head_size}, "
            f"{sizes.key_value_heads} for keys and values"
        ),
    )
    if sizes.experts:
        shared = f", {sizes.shared_experts} shared by all" if sizes.shared_experts else ""
        yield "experts", f"{sizes.experts} a layer, {sizes.experts_per_token} a token{shared}"
    yield "attention", _attention(found)
    yield "token i", f"is read at {READ[facts.shift]}"
    yield "ids", _ids(found)
    yield "longest row", "not stated" if facts.max_positions is None else f"{facts.max_positions} slots"
    yield "dtype", _dtype(found)
    yield from _memory(found, cfg)
    if found.overrides:
        yield "overrides", ", ".join(f"model.{name}={value}" for name, value in found.overrides.items())
    yield "samplers", ", ".join(fitting(found)) or "none"
    yield from _whereabouts(found)


def fitting(found: Inspection) -> list[str]:
    """Samplers that can decode the model."""
    from samplers import SAMPLERS

    names = []
    for name, sampler in SAMPLERS.items():
        try:
            sampler.check(found.facts)
        except ValueError:
            continue
        names.append(name)
    return names


def overview(found: Inspection) -> tuple[str, ...]:
    """One line of the table of all models, see `OVERVIEW`."""
    sizes, facts, dtype = found.sizes, found.facts, found.published_dtype
    return (
        str(found.options.name),
        found.family.name,
        _count(sizes.parameters),
        _count(sizes.active) if sizes.experts else "",
        facts.attention,
        str(facts.trained_block or ""),
        READ[facts.shift],
        size(sizes.weight_bytes(dtype)),
        size(sizes.cache_bytes(SLOTS, dtype)),
    )


def size(count: float) -> str:
    """Bytes in words."""
    unit, scale = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{count / scale:.3g} {unit}"


def _count(parameters: int) -> str:
    unit, scale = ("B", 10**9) if parameters >= 10**9 else ("M", 10**6)
    return f"{parameters / scale:.2f} {unit}"


def _parameters(sizes: Sizes) -> str:
    active = f", {_count(sizes.active)} of them for a token" if sizes.experts else ""
    without = ", the vision tower not counted" if sizes.architecture == "diffusion_gemma" else ""
    return f"{_count(sizes.parameters)}{active}{', head tied to the embedding' if sizes.tied else ''}{without}"


def _attention(found: Inspection) -> str:
    facts = found.facts
    start = {"prompt": "the prompt's end", "zero": "position 0"}[facts.block_origin]
    block = f" of {facts.trained_block}" if facts.trained_block else ""
    return {
        "full": "full: a row's keys depend on what comes later, cached ones are approximate",
        "causal": "causal: cached keys are exact",
        "canvas": "causal over what is committed, a canvas sees all of itself: cached keys are exact",
        "blocks": f"by blocks{block} counted from {start}: cached keys of finished blocks are exact",
    }[facts.attention]


def _ids(found: Inspection) -> str:
    from adapters.families import language_part

    facts, config = found.facts, language_part(found.source.config)
    mask = "no mask" if facts.mask_id is None else f"mask {facts.mask_id}"
    ends = ", ".join(map(str, sorted(facts.end_ids))) or "unknown"
    padding = config.get("pad_token_id")
    pad = "" if padding is None else f"; padding {padding}"
    return f"{mask}; ends {ends}{pad}; vocabulary {facts.vocab_size}"


def _dtype(found: Inspection) -> str:
    own, asked = found.published_dtype, found.options.dtype
    if asked or own == "float32":
        return asked or own
    return f"{own} on a GPU, float32 on a CPU"


def _memory(found: Inspection, cfg: DictConfig) -> Iterator[tuple[str, str]]:
    sizes, dtype = found.sizes, found.options.dtype or found.published_dtype
    kinds = dict.fromkeys((dtype, "bfloat16", "float32"))
    yield "weights", ", ".join(f"{size(sizes.weight_bytes(kind))} in {kind}" for kind in kinds)
    yield "cache", f"{size(sizes.cache_bytes(SLOTS, dtype))} a row of {SLOTS} slots in {dtype}"
    rows, logits = cfg.engine.max_rows, cfg.engine.logits_mib
    whole = sizes.weight_bytes(dtype) + sizes.cache_bytes(SLOTS * rows, dtype) + logits * 2**20
    yield (
        "together",
        f"{size(whole)} in {dtype} with {rows} such rows and {logits} MiB of logits; activations add to it",
    )


def _whereabouts(found: Inspection) -> Iterator[tuple[str, str]]:
    options, source = found.options, found.source
    if options.hub and not options.path:
        yield "hub", f"{options.hub}, {options.revision or 'no revision pinned'}"
    if options.base and not options.path:
        yield "base", f"{options.base}, {options.base_revision or 'no revision pinned'}"
    yield "told from", source.told
    if source.adapter:
        yield "LoRA", str(source.adapter)
    yield "weights here", _weights(found)


def _weights(found: Inspection) -> str:
    if found.source.file:
        return f"{found.source.file.name}, which is looked into when it is loaded"
    if found.source.folder is None:
        package = found.options.package
        return f"no, nor is the index{f'; the package {package} carries them' if package else ''}"
    if found.fit is None and any(found.source.folder.glob("*.safetensors")):
        return "yes, looked into when they are loaded"
    if found.fit is None:
        return "no, nor is the index" if not any(found.source.folder.glob("*.bin")) else "as .bin, not looked into"
    return f"{'yes' if found.fit.shapes else 'no, only the index'}: {found.fit.sentence()}"


# ---- what is printed -------------------------------------------------------------------------------------------------


def print_model(cfg: DictConfig, choice: str, overridden: Sequence[str] = (), config_dir: str | None = None) -> None:
    """One model, on one screen.

    Raises:
        UserError: one sentence; also if its tensors do not fit, after all the rest was told.
    """
    found = inspect_model(cfg, overridden)
    about, *notes = _comments(choice, config_dir)
    elsewhere = bool({"model.path", "model.hub"} & set(overridden))  # then the YAML tells of another checkpoint
    table = Table(
        title=found.options.name if elsewhere else about,
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
        width=WIDTH,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in describe(found, cfg):
        table.add_row(label, text)
    if notes or elsewhere:
        table.add_row(f"of {choice}" if elsewhere else "notes", " ".join([*([about] if elsewhere else []), *notes]))
    _console().print(table)
    if found.fit and not found.fit.faultless:
        raise UserError(f"{found.source.folder} does not fit {found.sizes.architecture}: {found.fit.sentence()}")


def print_models(overrides: Sequence[str] = (), config_dir: str | None = None) -> None:
    """All models that have a configuration, one line each; what differs by options is told of a single one."""
    table = Table(box=None, pad_edge=False)
    for name in OVERVIEW:
        table.add_column(name, no_wrap=True, justify="right" if name in ("parameters", "active", "block") else "left")
    for name, found in all_models(overrides, config_dir):
        table.add_row(*(overview(found) if not isinstance(found, UserError) else (name, "not here")))
    Console(width=None if Console().is_terminal else 140).print(table)


def all_models(
    overrides: Sequence[str] = (), config_dir: str | None = None
) -> Iterator[tuple[str, Inspection | UserError]]:
    """Every option of the axis ``model`` that is a checkpoint, or why it can't be looked at."""
    from pipeline.compose import compose, options

    for name in options("model", config_dir):
        cfg = compose([f"model={name}", *overrides], config_dir)
        if cfg.model.kind == "checkpoint":
            try:
                yield name, inspect_model(cfg)
            except UserError as error:
                yield name, error


def _comments(choice: str, config_dir: str | None) -> list[str]:
    """What an option's YAML says of itself, in the comment it begins with."""
    from pipeline.compose import conf_folder

    folders = [*([Path(config_dir)] if config_dir else []), conf_folder()]
    files = [folder / "model" / f"{choice}.yaml" for folder in folders]
    said = []
    for line in next(file for file in files if file.is_file()).read_text().splitlines():
        if not line.startswith("#"):
            break
        said.append(line.removeprefix("#").strip())
    return said or [choice]


def _console() -> Console:
    return Console(width=WIDTH, markup=False, highlight=False)


def main() -> None:
    import os

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig  # noqa: F401 - hydra looks the annotation up

    from pipeline import config
    from pipeline.cli import Carried, guarded
    from pipeline.overrides import config_dir, keys, raw
    from pipeline.sweep import register_launchers

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a look must not download anything
    config.register()
    register_launchers()

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def look(cfg: DictConfig) -> None:
        composed = HydraConfig.get()
        overrides, folder = raw(composed.overrides.task), config_dir()
        try:
            if any(key == "model" or key.startswith("model.") for key in keys(overrides)):
                print_model(cfg, composed.runtime.choices["model"], keys(overrides), folder)
            else:
                print_models(overrides, folder)
        except Exception as error:
            raise Carried from error

    guarded(look)


if __name__ == "__main__":
    main()
