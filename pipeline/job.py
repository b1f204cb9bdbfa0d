"""A job: everything a run needs, checked before any weight is read."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import plain, refuse_missing, refuse_unknown
from pipeline.data.base import Dataset, Sample
from pipeline.errors import UserError
from pipeline.runs import settings_hash
from pipeline.settings import Settings, refuse_mismatch, resolve
from pipeline.tracking import check_options
from samplers import Sampler, cache, rules, state, stream_key

if TYPE_CHECKING:
    from adapters.description import Description

_described: dict[str, Description] = {}  # jobs of a sweep share what was read of a model


@dataclass
class Job:
    """One model, one sampler, one dataset, ready to decode.

    Attributes:
        config: the resolved configuration as given.
        samples: the dataset's samples in order, `prompts` their ids.
    """

    config: dict[str, Any]
    description: Description
    settings: Settings
    dataset: Dataset
    samples: list[Sample]
    prompts: list[list[int]]

    @property
    def names(self) -> tuple[str, str, str]:
        """Of model, sampler and dataset."""
        return self.config["model"]["name"], self.config["sampler"]["name"], self.config["dataset"]["name"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @cached_property
    def protocol_hash(self) -> str:
        """Of the question put to the model; decoding and scorer are not part of it."""
        return settings_hash(self.dataset.protocol)

    @cached_property
    def decoding(self) -> dict[str, Any]:
        """All that can change a sample's tokens, besides its prompt."""
        return {
            "weights": self.description.identity(),
            "dtype": self.description.dtype,
            "attention": self.description.facts.attention,
            "end_ids": sorted(self.description.facts.end_ids),
            "sampler": self.settings.values,
            "sampler_code": code_hash(type(self.settings.sampler)),
            "gen_length": self.settings.gen_length,
            "stop": list(self.dataset.stop),
            "seed": self.seed,
        }

    @cached_property
    def effective(self) -> dict[str, Any]:
        """The configuration with the sampler's effective settings in place of its options."""
        sampler = {key: self.config["sampler"][key] for key in ("_target_", "name", "method")}
        return {**self.config, "sampler": {**sampler, **self.settings.values}}

    @cached_property
    def hash(self) -> str:
        """Equal for jobs that would give the same rows; names a job's folder in a sweep."""
        asked = {key: self.effective[key] for key in ("model", "sampler", "dataset", "seed")}
        code = self.decoding["sampler_code"]
        return settings_hash({**asked, "gen_length": self.settings.gen_length, "sampler_code": code})

    def key(self, index: int) -> str:
        """A row's key: the hash of all that can change its tokens."""
        return settings_hash([self.decoding, self.samples[index].id, self.prompts[index]])

    def stream(self, index: int) -> int:
        """Key of a sample's random numbers: by its id, so that order and limit don't matter."""
        identity = hashlib.sha256(self.samples[index].id.encode()).digest()
        return stream_key(self.seed, int.from_bytes(identity[:7], "big"))

    @property
    def slots(self) -> int:
        """Length of the longest row that fits the model."""
        longest = max(map(len, self.prompts)) + self.settings.gen_length
        return min(longest, self.description.facts.max_positions or longest)


def prepare(cfg: DictConfig, overridden: Sequence[str] = (), in_sweep: bool = False) -> Job:
    """Check a configuration against its model's description and its data, and read both; no weights.

    Args:
        overridden: keys given on the command line.
        in_sweep: options that the sampler does not use are dropped instead of refused.

    Raises:
        UserError: one sentence that ends the matter.
    """
    refuse_unknown(cfg)
    refuse_missing(cfg)
    config = plain(cfg)
    _refuse_out_of_range(config)
    check_options(config["logger"])
    dataset = make_dataset(cfg.dataset)
    refuse_absent_devices(**config["trainer"])
    samples = dataset.samples()
    description = describe_model(config["model"], config["trainer"]["accelerator"])
    refuse_mismatch(cfg, description.facts)
    settings = resolve(
        cfg.sampler, dataset.gen_length, description.facts, dataset.block_size, overridden, drop_unused=in_sweep
    )
    prompts = [description.codec.encode_chat(sample.messages) for sample in samples]
    return Job(config, description, settings, dataset, samples, prompts)


def device_type(accelerator: str) -> str:
    """``cuda`` or ``cpu``: an accelerator left open is a GPU of NVIDIA's or AMD's if there is one, else the CPU."""
    import torch

    return "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"


def describe_model(options: dict[str, Any], accelerator: str = "auto") -> Description:
    """`adapters.description.describe`, once a process for equal options."""
    from adapters.description import describe
    from adapters.places import ModelOptions

    device = device_type(accelerator)
    key = json.dumps([options, device], sort_keys=True)
    if key not in _described:
        try:
            _described[key] = describe(ModelOptions(**options), device)
        except ValueError as error:
            raise UserError(str(error)) from error
    return _described[key]


def make_dataset(node: DictConfig) -> Dataset:
    """The dataset its YAML names, its options checked by name and type against the class.

    Raises:
        UserError: for a class that cannot be imported, an unknown option or a wrong type.
    """
    from hydra.utils import get_class

    try:
        cls = get_class(node._target_)
    except Exception as error:  # hydra wraps whatever the user's module raises
        raise UserError(f"dataset._target_={node._target_} cannot be imported: {error}") from error
    given = {key: value for key, value in plain(node).items() if key != "_target_"}
    known = [entry.name for entry in fields(cls)]
    if unknown := [key for key in given if key not in known]:
        raise UserError(
            f"dataset.{unknown[0]}={given[unknown[0]]} is not used by dataset={node.name}: leave it out, its options "
            f"are {', '.join(known)}"
        )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), given))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"dataset.{error.full_key or error.key}: {str(error).splitlines()[0]}") from error


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


def code_hash(cls: type[Sampler]) -> str:
    """Of the modules of a sampler's class and bases, and of what they share; comments and docstrings don't count."""
    modules = {inspect.getmodule(base) for base in cls.__mro__ if issubclass(base, Sampler)} | {cache, rules, state}
    trees = [_tree(inspect.getsource(module)) for module in modules if module]
    return hashlib.sha256("".join(sorted(trees)).encode()).hexdigest()[:10]


def _tree(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _refuse_out_of_range(config: dict[str, Any]) -> None:
    at_least = {
        "engine.max_rows": (config["engine"]["max_rows"], 1),
        "engine.logits_mib": (config["engine"]["logits_mib"], 1),
        "engine.timing_samples": (config["engine"]["timing_samples"], 0),
        "engine.trace_samples": (config["engine"]["trace_samples"], 0),
        "trainer.devices": (config["trainer"]["devices"], 1),
        "seed": (config["seed"], 0),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise UserError(f"{name}={value} is out of range: use a whole number from {least} up")
    for name in ("run", "sweep"):
        refuse_bad_name(name, config[name], config["output_root"])


def refuse_bad_name(option: str, name: str | None, root: str) -> None:
    """Refuse a name that is no folder below the outputs.

    Raises:
        UserError: for an absolute or empty one, or one with ``.`` or ``..`` in it.
    """
    if name is not None and any(part.strip() in ("", ".", "..") for part in name.split("/")):
        raise UserError(f"{option}={name!r} is no folder name: use one below {root}, such as {option}=first")


def facts_of(job: Job) -> dict[str, Any]:
    """What is true of the job's model, as plain data."""
    facts = asdict(job.description.facts)
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in facts.items()}
