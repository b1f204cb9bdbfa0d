"""Where a job runs: which device, with how much memory, and what does not fit there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.ranks import world

if TYPE_CHECKING:
    from adapters.description import Description

MOST_ON_CPU = 10**9  # parameters that a CPU runs unasked


def device_type(accelerator: str) -> str:
    """``cuda`` or ``cpu``: an accelerator left open is a GPU of NVIDIA's or AMD's if there is one, else the CPU."""
    import torch

    return "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"


def refuse_absent_devices(accelerator: str, devices: int) -> None:
    """Refuse an accelerator that is unknown or not there, or more GPUs than there are.

    Raises:
        UserError: naming what there is.
    """
    import torch

    gpus, apple = torch.cuda.device_count(), torch.backends.mps.is_available()
    there = {"auto": True, "cpu": True, "gpu": bool(gpus or apple), "cuda": bool(gpus), "mps": apple}
    usable = ", ".join(name for name, usable in there.items() if usable)
    if accelerator not in there:
        raise UserError(f"trainer.accelerator={accelerator} is not known: use one of {', '.join(there)}")
    if not there[accelerator]:
        raise UserError(f"trainer.accelerator={accelerator}: this machine has none, use {usable}")
    most = 1 if apple and accelerator != "cpu" else gpus if accelerator != "cpu" else 0
    if most and devices > most:
        raise UserError(f"trainer.devices={devices} is more than there are: use at most {most}")


def refuse_shared_devices(device_map: str | None, devices: int) -> None:
    """Refuse a model spread over all GPUs beside several processes, each of which would want all of them.

    Raises:
        UserError: naming both options.
    """
    if device_map is not None and (processes := max(devices, world()[1])) > 1:
        raise UserError(
            f"model.device_map={device_map} spreads one model over all GPUs, but {processes} processes would each do "
            "so: use trainer.devices=1 without torchrun, or model.device_map=null"
        )


def refuse_slow(description: Description, accelerator: str) -> None:
    """Refuse a large model on a CPU, unless ``model.allow_cpu`` is set.

    Raises:
        UserError: naming model, parameters and option.
    """
    options, parameters = description.options, description.parameters or 0
    if parameters > MOST_ON_CPU and _kind(accelerator) == "cpu" and not options.allow_cpu:
        raise UserError(
            f"model={options.name} has {parameters / 1e9:.3g} B parameters, which a CPU takes minutes a token for: "
            "use a GPU, or set model.allow_cpu=true"
        )


def device_line(description: Description, trainer: dict[str, Any]) -> str:
    """Device, dtype and memory: ``NVIDIA H200 bfloat16, weights 14.9 GiB of 139 GiB``."""
    import torch

    kind, together = _kind(trainer["accelerator"]), description.options.device_map is not None
    count = max(trainer["devices"], world()[1])
    name, memory = kind, _machine_memory()
    if kind == "cuda":
        count = torch.cuda.device_count() if together else count
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = device.name, device.total_memory * (count if together else 1)
    sizes = [f"weights {in_words(description.weight_bytes)}"] if description.weight_bytes else []
    sizes += [in_words(memory) + (" each" if kind == "cuda" and count > 1 and not together else "")] if memory else []
    return f"{f'{count} × ' if count > 1 else ''}{name} {description.dtype}, {' of '.join(sizes)}".removesuffix(", ")


def _kind(accelerator: str) -> str:
    """``cuda``, ``mps`` or ``cpu``, as it will be taken."""
    return "mps" if accelerator == "mps" or (accelerator == "gpu" and _only_apple()) else device_type(accelerator)


def _only_apple() -> bool:
    import torch

    return torch.backends.mps.is_available() and not torch.cuda.is_available()


def _machine_memory() -> int | None:
    """Bytes of this machine, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def in_words(count: float) -> str:
    """Bytes of memory, in powers of 1024."""
    unit, scale = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{count / scale:.3g} {unit}"
