"""What transformers reads itself: quantised files, and those that hold other tensors than the native network."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from adapters import attention
from adapters.native import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapters.checkpoints.network import Reading
    from adapters.description import Description


def needed(description: Description, skeleton: PreTrainedModel) -> bool:
    """Whether transformers has to read a model; one of a family with rules of its own is read by these."""
    if description.family.native:
        return False
    return bool(description.config.get("quantization_config")) or converts(skeleton)


def converts(skeleton: PreTrainedModel) -> bool:
    """Whether transformers makes an architecture's tensors out of others that its files hold."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(skeleton, add_legacy=False))


def read(reading: Reading, by_class: Any, **further: Any) -> PreTrainedModel:
    """Read by transformers' own loader, whose report is held to the same rule: nothing left over on either side.

    Raises:
        ValueError: one sentence, if it fails, or something is left over.
    """
    try:
        found = by_class.from_pretrained(
            reading.place.folder, **arguments(reading), **further, output_loading_info=True
        )
    except Exception as error:  # it raises whatever its readers and quantisers do
        raise ValueError(f"{reading.source}: transformers cannot read it: {first_line(error)}") from error
    model, report = found
    wrong = {
        "tensors have no place": report["unexpected_keys"],
        "parameters got no tensor": report["missing_keys"],
        "tensors have a wrong shape": [name for name, *_ in report["mismatched_keys"]],
    }
    faults = [f"{len(names)} {said} ({', '.join(sorted(names)[:3])})" for said, names in wrong.items() if names]
    if faults:
        raise ValueError(f"{reading.source} does not fit {type(model).__name__}: {' and '.join(faults)}")
    return model if reading.spreads or _can_place() else model.to(reading.device)


def arguments(reading: Reading) -> dict[str, Any]:
    """Those of `from_pretrained`."""
    where: Any = "auto" if reading.spreads else {"": reading.device}
    return {
        "dtype": reading.dtype,
        "attn_implementation": attention.NAME,
        "ignore_mismatched_sizes": True,  # the report tells of them in our words
        **({"device_map": where} if _can_place() else {}),
    }


def _can_place() -> bool:
    """Whether transformers can read straight to a device."""
    return find_spec("accelerate") is not None
