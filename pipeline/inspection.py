"""What is told of a model: label by label, or in one line of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adapters.draft_config import is_dflash, tapped_layers
from adapters.families import language_part
from pipeline.devices import in_words
from pipeline.list import fitting

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from adapters.facts import Inspection
    from adapters.memory import Sizes

SLOTS = 1000  # that memory for keys and values is told of
READ = ("row i", "row i - 1")
OVERVIEW = ("model", "family", "parameters", "active", "attention", "block", "token i at", "weights", "cache a row")


def describe(found: Inspection, cfg: DictConfig, config_dir: str | None = None) -> Iterator[tuple[str, str]]:
    """What is told of one model, in order: label and text; ``config_dir`` holds samplers of the user's own."""
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
    if found.drafter:
        yield "drafter", _drafter(found, found.drafter)
    if found.overrides:
        yield "overrides", ", ".join(f"model.{name}={value}" for name, value in found.overrides.items())
    yield "samplers", ", ".join(fitting(found.facts, config_dir)) or "none"
    yield from _whereabouts(found)


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
        in_words(sizes.weight_bytes(dtype)),
        in_words(sizes.cache_bytes(SLOTS, dtype)),
    )


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
    facts, config = found.facts, language_part(found.source.config)
    mask = "no mask" if facts.mask_id is None else f"mask {facts.mask_id}"
    ends = ", ".join(map(str, sorted(facts.end_ids))) or "unknown"
    padding = config.get("pad_token_id")
    pad = "" if padding is None else f"; padding {padding}"
    return f"{mask}; ends {ends}{pad}; vocabulary {facts.vocab_size}"


def _drafter(found: Inspection, drafter: Inspection) -> str:
    draft, dtype = drafter.facts, found.options.dtype or found.published_dtype
    needs = (
        f"{_count(drafter.sizes.parameters)} parameters, {in_words(drafter.sizes.weight_bytes(dtype))} in {dtype}, "
        f"cache {in_words(drafter.sizes.cache_bytes(SLOTS, dtype))} a row; weights here: {_weights(drafter)}"
    )
    if not is_dflash(drafter.source.config):
        kind = f"a diffusion model of its own: {draft.attention} attention, mask {draft.mask_id}"
        return f"{found.options.draft}, {kind}; {needs}"
    taps = ", ".join(map(str, tapped_layers(drafter.source.config)))
    return (
        f"{found.options.draft}, DFlash: blocks of {draft.trained_block} with the last known token, "
        f"mask {draft.mask_id}, fed by layers {taps}; {needs}"
    )


def _dtype(found: Inspection) -> str:
    own, asked = found.published_dtype, found.options.dtype
    if asked or own == "float32":
        return asked or own
    return f"{own} on a GPU, float32 on a CPU"


def _memory(found: Inspection, cfg: DictConfig) -> Iterator[tuple[str, str]]:
    sizes, dtype = found.sizes, found.options.dtype or found.published_dtype
    kinds = dict.fromkeys((dtype, "bfloat16", "float32"))
    yield "weights", ", ".join(f"{in_words(sizes.weight_bytes(kind))} in {kind}" for kind in kinds)
    yield "cache", f"{in_words(sizes.cache_bytes(SLOTS, dtype))} a row of {SLOTS} slots in {dtype}"
    rows, logits = cfg.engine.max_rows, cfg.engine.logits_mib
    networks = [sizes, *([found.drafter.sizes] if found.drafter else [])]
    held = sum(each.weight_bytes(dtype) + each.cache_bytes(SLOTS * rows, dtype) for each in networks)
    drafter = ", the drafter" if found.drafter else ""
    yield (
        "together",
        f"{in_words(held + logits * 2**20)} in {dtype} with {rows} such rows{drafter} and {logits} MiB of logits; "
        "activations add to it",
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
    here = "yes" if found.fit.shapes else "no, only the index"
    of = "" if found.fit.faultless else f"of {found.fit.tensors} tensors, "
    return f"{here}: {of}{found.fit.sentence()}"
