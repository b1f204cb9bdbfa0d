"""Options of a model that cannot be had, refused before a weight is read.

Torch and what builds on it are imported only for what was asked of them: inspecting a model does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.memory import BYTES
from adapters.places import ModelOptions, Place, is_local, lora_base
from adapters.text import IdCodec

if TYPE_CHECKING:
    from adapters.description import Description


def refuse_unknown(options: ModelOptions) -> None:
    """Refuse a value that is none of its option's.

    Raises:
        ValueError: one sentence.
    """
    choices: dict[str, tuple[str | None, tuple[str | None, ...]]] = {
        "kind": (options.kind, ("checkpoint", "toy")),
        "dtype": (options.dtype, (None, *BYTES)),
        "confidence_dtype": (options.confidence_dtype, ("float32", "model")),
    }
    if options.attention_kernel != ModelOptions.attention_kernel:
        from adapters.transformer import KERNELS

        choices["attention_kernel"] = (options.attention_kernel, KERNELS)
    for name, (value, known) in choices.items():
        if value not in known:
            *most, last = (word for word in known if word is not None)
            raise ValueError(f"model.{name}={value} is unknown: use {', '.join(most)} or {last}")


def refuse_unused_by_toy(options: ModelOptions) -> None:
    """The toy has no weights: refuse what only a checkpoint uses, by name.

    Raises:
        ValueError: one sentence.
    """
    used = ("name", "kind", "training", "chat_template")  # a template is refused with the tokenizer it lacks
    for name, value in chosen(options).items():
        if name not in used:
            raise ValueError(
                f"model.{name}={value} is not used: model.kind=toy has no weights and no configuration, leave it out"
            )


def chosen(options: ModelOptions) -> dict[str, Any]:
    """The options that say something other than their default."""
    default = vars(ModelOptions())
    return {n: v for n, v in vars(options).items() if v != default[n] and v not in (None, {}, [])}


def unused(description: Description) -> dict[str, str]:
    """Chosen options that do nothing for a checkpoint, each with the reason.

    Permissions (`allow_cpu`, `trust_checkpoint`) and what was recorded of the hub do not count.
    """
    place, options = description.place, description.options
    if place is None:
        return {}
    reasons: dict[str, str] = {}
    if options.path:
        reasons |= dict.fromkeys(("hub", "revision", "package"), f"model.path={options.path} is what is read")
    if not options.hub:
        reasons.setdefault("revision", "model.hub is null")
    if place.adapter is None:
        reasons |= dict.fromkeys(("base", "base_revision"), f"{place.folder} is no LoRA")
    elif (base := lora_base(options, place.adapter)) and is_local(base):
        reasons["base_revision"] = f"the base model {base} is a folder"
    if not options.draft:
        reasons["draft_revision"] = "model.draft is null"
    elif is_local(options.draft):
        reasons["draft_revision"] = f"the drafter {options.draft} is a folder"
    if isinstance(description.codec, IdCodec):
        reasons["end_tokens"] = f"{place.folder} has no tokenizer; give model.end_ids"
    if description.family.adapter != "transformer":
        reasons["attention_kernel"] = f"{description.family.name} attends in its own way"
    return {name: reason for name, reason in reasons.items() if name in chosen(options)}


def refuse_absent(options: ModelOptions, device: str) -> None:
    """Refuse what this machine lacks: a package, a compiler, a quantiser.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: one sentence.
    """
    if options.device_map is not None:
        from adapters.checkpoints import spread

        spread.check(options.device_map)
    if options.quantization:
        from adapters.checkpoints import quantized

        quantized.check(options.quantization)
    if options.compile:
        from adapters.compiling import check_compiler

        check_compiler(device)


def refuse_quantising_twice(options: ModelOptions, place: Place) -> None:
    """A .gguf file is quantised as it is: known before its header is read or a quantiser is looked for.

    Raises:
        ValueError: one sentence.
    """
    if options.quantization and place.gguf:
        raise ValueError("model.quantization does not go with a .gguf file: leave it out")


def refuse_combined(description: Description) -> None:
    """Refuse what does not go with this checkpoint, a LoRA's own settings included.

    Raises:
        ValueError: one sentence.
    """
    place, family = description.place, description.family
    assert place
    stored_quantised = bool(description.config.get("quantization_config"))
    if description.options.quantization and (place.adapter or stored_quantised):
        kind = "a LoRA" if place.adapter else "a checkpoint that is quantised already"
        raise ValueError(f"model.quantization does not go with {kind}: leave it out")
    if stored_quantised and family.native and not place.gguf:
        raise ValueError(f"{place.folder} is quantised under {family.name}'s names: it is not served")
    if place.adapter:
        from adapters.checkpoints import lora

        lora.check(place.adapter)
    if (description.options.quantization or place.file) and not place.gguf and not family.native:
        _refuse_converted(description)


def _refuse_converted(description: Description) -> None:
    """Refuse what only our own loader can do, where transformers has to read."""
    from adapters.checkpoints import converted

    skeleton, place = description.skeleton(), description.place
    assert place
    if converted.needed(description, skeleton):
        if place.file:
            raise ValueError(f"{place.file}: a training's checkpoint of {type(skeleton).__name__} is not served")
        raise ValueError(f"model.quantization is not served for {type(skeleton).__name__}: leave it out")
