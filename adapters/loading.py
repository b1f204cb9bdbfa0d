"""From a described model to an adapter: its weights, one tensor at a time, straight to the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters import attention
from adapters.description import Description, first_line
from adapters.families import Family
from adapters.places import Place, weight_files
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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    family = description.family
    try:
        native = family.config(description.config) if family.config else None
    except KeyError as error:
        raise ValueError(f"{place.folder / 'config.json'} lacks {error}") from error
    config = AutoConfig.for_model(**native) if native else AutoConfig.from_pretrained(place.folder)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.tie_weights()  # left undone where weights are not initialised
    trusted = description.options.trust_checkpoint
    tensors = _checkpoint_tensors(place.file, trusted) if place.file else _tensors(place.folder)
    _fill(model, family, tensors, place.file or place.folder)
    return model


def _load_gguf(description: Description, place: Place, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        place.folder, gguf_file=place.gguf, dtype=dtype, attn_implementation=attention.NAME
    )
    return model.to(device)


def _fill(model: torch.nn.Module, family: Family, tensors: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Copy every tensor to its parameter; stop if one is left over on either side."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unfilled, left_over = set(parameters), []
    for name, tensor in tensors:
        native = family.rename(name)
        if native not in parameters:
            left_over.append(f"{name} {tuple(tensor.shape)}")
            continue
        if parameters[native].shape != tensor.shape:
            wanted = tuple(parameters[native].shape)
            raise ValueError(f"{source}: {name} has the shape {tuple(tensor.shape)}, the configuration wants {wanted}")
        with torch.no_grad():
            parameters[native].copy_(tensor)
        unfilled -= {other for other, parameter in parameters.items() if parameter is parameters[native]}
    faults = []
    if left_over:
        faults.append(f"{len(left_over)} tensors have no place ({', '.join(left_over[:5])})")
    if unfilled:
        faults.append(f"{len(unfilled)} parameters got no tensor ({', '.join(sorted(unfilled)[:5])})")
    if faults:
        raise ValueError(f"{source} does not fit {type(model).__name__}: {' and '.join(faults)}")


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
