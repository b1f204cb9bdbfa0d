"""A LoRA folder merged into its base model through `peft`, whatever names the base was published under."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.checkpoints.files import LORA_CONFIG, lora_files, read_json
from adapters.checkpoints.reading import Checkpoint, PickledShards, SafetensorsShards
from adapters.native import first_line
from adapters.tensors import Json, Piece, Rule, pieces

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

WRAP = "base_model.model."  # peft's names begin so
PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[A-Za-z_]+)(?P<end>\.weight|\.bias)?")
# settings that change what is computed in ways that merging or renaming does not cover
UNSERVED = (
    *("target_parameters", "layer_replication", "megatron_config", "trainable_token_indices", "use_bdlora"),
    *("alora_invocation_tokens", "use_qalora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
DROPPED = ("layers_to_transform", "layers_pattern", "exclude_modules")  # the tensors' names say it already


@dataclass(frozen=True)
class Names:
    """How the base's published names become native ones."""

    rules: tuple[Rule, ...]
    config: Json
    folder: Path

    def pieces(self, module: str, kind: str) -> list[Piece]:
        """Where the published module's ``weight`` or ``bias`` lies in the native network.

        Raises:
            ValueError: if it is one of several that are stacked there.
        """
        found = pieces(self.rules, f"{module}.{kind}", self.config)
        if any(piece.expert is not None or piece.parts > 1 or not piece.target.endswith(kind) for piece in found):
            raise ValueError(f"{self.folder}: {module} is an expert, whose weights are stacked: it can't be merged")
        return found

    def modules(self, module: str) -> list[str]:
        """The native modules that a published one becomes."""
        return [piece.target.removesuffix(".weight") for piece in self.pieces(module, "weight")]


def merge(model: PreTrainedModel, folder: Path, rules: tuple[Rule, ...], config: Json) -> PreTrainedModel:
    """Add the LoRA to the network's weights; it leaves nothing else behind.

    Raises:
        ValueError: one sentence, if `peft` is absent, a setting is not served, or a tensor fits nowhere.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    checkpoint = stored(folder)
    stated = read_settings(folder)
    names = Names(rules, config, folder)
    tensors = _native_tensors(checkpoint, names, set(model.state_dict()))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PEFT config's `base_model_name_or_path` was renamed", UserWarning)
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            wrapped = get_peft_model(model, _native_settings(stated, checkpoint, names))
        result: Any = set_peft_model_state_dict(wrapped, tensors)
        lost = [name for name in result.missing_keys if "lora_" in name] + list(result.unexpected_keys)
        if lost:
            raise ValueError(f"peft found no place or no tensor for {', '.join(lost[:3])}")
        merged: Any = wrapped.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft raises whatever torch raises
        raise ValueError(f"{folder} cannot be merged into its base: {first_line(error)}") from error
    return merged


def read_settings(folder: Path) -> dict[str, Any]:
    """The LoRA's ``adapter_config.json``.

    Raises:
        ValueError: one sentence, if `peft` is absent or a setting is not served.
    """
    if find_spec("peft") is None:
        raise ValueError(f"{folder} is a LoRA, which is merged by the package peft: pip install peft")
    from dataclasses import fields

    from peft import LoraConfig

    file = folder / LORA_CONFIG
    stated = read_json(file)
    if stated.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{file}: peft_type={stated['peft_type']} is not served, only LORA")
    known = {entry.name for entry in fields(LoraConfig)}
    for name, value in stated.items():
        if value and (name in UNSERVED or name not in known):
            raise ValueError(f"{file}: {name}={json.dumps(value)[:60]} is not served")
    return {name: value for name, value in stated.items() if name in known}


def check(folder: Path) -> None:
    """Hold the settings against the headers of the LoRA's own file.

    Raises:
        ValueError: one sentence, if a setting is not served or is none, or a tensor's rank is not the one stated.
    """
    stated, file = read_settings(folder), folder / LORA_CONFIG
    _refuse_wrong_kinds(stated, file)
    for name, shape in stored(folder).shapes().items():
        match = PART.fullmatch(name.removeprefix(WRAP))
        if match is None or match["part"] not in ("lora_A", "lora_embedding_A"):
            continue
        rank = _looked_up(stated.get("rank_pattern"), match["module"], stated.get("r", 8))
        if shape[0] != rank:
            said = f"r={rank}" if "r" in stated else f"no r, which means {rank}"
            raise ValueError(f"{file} says {said}, but {name} is of rank {shape[0]}: it belongs to other weights")


def _refuse_wrong_kinds(stated: dict[str, Any], file: Path) -> None:
    patterns = {key: stated.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    for key, value in patterns.items():
        if not isinstance(value, dict):
            raise ValueError(f"{file}: {key}={json.dumps(value)[:60]} is no object of names and numbers")
    ranks = {"r": stated.get("r", 8), **patterns["rank_pattern"]}
    for key, value in ranks.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{file}: {key}={json.dumps(value)[:60]} is no rank: it is a whole number from 1 up")
    for key, value in {"lora_alpha": stated.get("lora_alpha", 8), **patterns["alpha_pattern"]}.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"{file}: {key}={json.dumps(value)[:60]} is no number")


def stored(folder: Path) -> Checkpoint:
    """The LoRA's own tensors."""
    files = lora_files(folder)
    return PickledShards(files) if files[0].suffix == ".bin" else SafetensorsShards(files)


def _native_tensors(checkpoint: Checkpoint, names: Names, known: set[str]) -> dict[str, torch.Tensor]:
    """The LoRA's tensors under native names: of a module that is cut apart, `A` is shared and `B` is cut."""
    found = {}
    for name, tensor in checkpoint.tensors():
        bare = name.removeprefix(WRAP)
        match = PART.fullmatch(bare)
        module, kind = (match["module"], "weight") if match else bare.rsplit(".", 1)
        for piece in names.pieces(module, kind):
            if piece.target not in known:
                raise ValueError(f"{names.folder}: {name} has no place in the base model")
            native = piece.target.removesuffix(f".{kind}")
            shared = match is not None and match["part"] in ("lora_A", "lora_embedding_A")
            rest = f"{match['part']}{match['end'] or ''}" if match else kind
            found[f"{WRAP}{native}.{rest}"] = (tensor if shared else piece.cut(tensor)).clone()
    return found


def _native_settings(stated: dict[str, Any], checkpoint: Checkpoint, names: Names) -> LoraConfig:
    """The LoRA's settings with every module by its native name; ranks and scales are looked up by the published one."""
    from peft import LoraConfig

    adapted, saved = _modules(checkpoint)
    _refuse_absent(stated, adapted, names.folder)
    targets: list[str] = []
    ranks: dict[str, int] = {}
    scales: dict[str, int] = {}
    for module in adapted:
        rank = _looked_up(stated.get("rank_pattern"), module, stated.get("r", 8))
        scale = _looked_up(stated.get("alpha_pattern"), module, stated.get("lora_alpha", 8))
        native = names.modules(module)
        targets += native
        ranks |= {re.escape(name): rank for name in native}
        scales |= {re.escape(name): scale for name in native}
    kept = {name: value for name, value in stated.items() if name not in DROPPED}
    whole = [name for module in saved for name in names.modules(module)] if stated.get("modules_to_save") else None
    own = {"target_modules": targets, "rank_pattern": ranks, "alpha_pattern": scales, "modules_to_save": whole}
    return LoraConfig(**{**kept, **own, "task_type": None, "auto_mapping": None, "inference_mode": True})


def _modules(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Published modules with a LoRA, and those of which the file holds the weights themselves."""
    adapted, saved = set(), set()
    for name in checkpoint.shapes():
        bare = name.removeprefix(WRAP)
        if match := PART.fullmatch(bare):
            adapted.add(match["module"])
        else:
            saved.add(bare.rpartition(".")[0])
    return sorted(adapted), sorted(saved)


def _looked_up(patterns: dict[str, int] | None, module: str, otherwise: int) -> int:
    from peft.utils.other import get_pattern_key

    return (patterns or {}).get(get_pattern_key(list(patterns or {}), module), otherwise)


def _refuse_absent(stated: dict[str, Any], adapted: list[str], folder: Path) -> None:
    """Each module that the settings list must have tensors: otherwise the file is not whole."""
    listed = stated.get("target_modules")
    if not isinstance(listed, list):
        return
    for target in listed:
        if not any(module == target or module.endswith(f".{target}") for module in adapted):
            file = lora_files(folder)[0]
            raise ValueError(f"{folder}: {LORA_CONFIG} adapts {target}, but {file.name} holds none of it")
