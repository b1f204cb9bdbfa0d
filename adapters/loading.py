"""From a described model to an adapter: its weights, one tensor at a time, straight to the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.description import Description
from adapters.native import build, first_line, native_config
from adapters.places import Place, weight_files
from adapters.tensors import pieces
from adapters.toy import ToyMaskedLMAdapter
from adapters.transformer import TransformerAdapter

if TYPE_CHECKING:
    from adapters.base import DeviceAdapter


def load(description: Description, device: torch.device, logits_mib: int = 256) -> DeviceAdapter:
    """Read the weights onto the device.

    Raises:
        ValueError: one sentence, if a file is broken, a tensor has no place or a wrong shape, or a parameter gets none.
    """
    if description.place is None:
        toy = ToyMaskedLMAdapter()
        toy.read_out.bytes = logits_mib * 2**20
        return toy
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    attention.register()
    dtype = getattr(torch, description.dtype)
    read = _load_gguf if description.place.gguf else _load_native
    adapter = TransformerAdapter(
        read(description, description.place, dtype, device), description.facts, description.codec, logits_mib
    )
    _check_head(adapter)
    return adapter


def _load_native(description: Description, place: Place, dtype: torch.dtype, device: torch.device) -> Any:
    model = build(native_config(description.family, description.config), dtype, device)
    trusted = description.options.trust_checkpoint
    tensors = _checkpoint_tensors(place.file, trusted) if place.file else _tensors(place.folder)
    _fill(model, description, tensors)
    return model


def _load_gguf(description: Description, place: Place, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        place.folder, gguf_file=place.gguf, dtype=dtype, attn_implementation=attention.NAME
    )
    return model.to(device)


def _fill(model: torch.nn.Module, description: Description, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor to its place; stop if one is left over on either side."""
    assert description.place
    source = description.place.file or description.place.folder
    targets = model.state_dict(keep_vars=True)
    left, left_over = {name: target.numel() for name, target in targets.items()}, []
    for name, tensor in tensors:
        for piece in pieces(description.family.rules, name, description.config):
            if piece.target not in targets:
                left_over.append(f"{name} {tuple(tensor.shape)}")
                continue
            place, part = piece.view(targets[piece.target]), piece.cut(tensor)
            if place.shape != part.shape:
                raise ValueError(
                    f"{source}: {name} has the shape {tuple(part.shape)}, the configuration wants {tuple(place.shape)}"
                )
            with torch.no_grad():
                place.copy_(part)
            left[piece.target] -= part.numel()
    unfilled = [name for name, elements in left.items() if elements and not _shares(targets, name, left)]
    faults = []
    if left_over:
        faults.append(f"{len(left_over)} tensors have no place ({', '.join(left_over[:5])})")
    if unfilled:
        faults.append(f"{len(unfilled)} parameters got no tensor ({', '.join(sorted(unfilled)[:5])})")
    if faults:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {' and '.join(faults)}")


def _shares(targets: dict[str, torch.Tensor], name: str, left: dict[str, int]) -> bool:
    """Whether a tied parameter was filled under its other name."""
    return any(targets[name] is other and left[twin] == 0 for twin, other in targets.items() if twin != name)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole .safetensors file ({first_line(error)})") from error


def _checkpoint_tensors(file: Path, trusted: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The language model's part of a Lightning checkpoint; its module calls it ``model``."""
    import pickle

    try:
        content = torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        kinds = re.findall(r"GLOBAL ([\w.]+) was not", str(error)) or ["something that is no tensor"]
        raise ValueError(
            f"model.path={file} holds {kinds[0]}, which could run code when read: "
            "set model.trust_checkpoint=true only if you know where the file is from"
        ) from error
    for name, tensor in content["state_dict"].items():
        yield name.removeprefix("model."), tensor


@torch.inference_mode()
def _check_head(adapter: TransformerAdapter) -> None:
    """Refuse an architecture that does more to its logits than its head: we run layers and head apart."""
    ids = torch.arange(4, device=adapter.device)[None] % adapter.facts.vocab_size
    own = adapter.model(input_ids=ids, use_cache=False, visibility=attention.Visibility(causal=True)).logits
    body = adapter.body(input_ids=ids, use_cache=False, visibility=attention.Visibility(causal=True))
    apart = adapter.head(body.last_hidden_state)
    if not torch.allclose(
        own, apart, rtol=0, atol=0, equal_nan=True
    ):  # weights that are no numbers fail later, by sample
        raise ValueError(f"{type(adapter.model).__name__} transforms its logits after the head: it is not served yet")
