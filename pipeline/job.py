"""A job: everything a run needs, checked before any weight is read."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import named, plain, refuse_missing, refuse_unknown
from pipeline.data.base import Dataset, Sample
from pipeline.devices import device_type, refuse_absent_devices, refuse_shared_devices, refuse_slow
from pipeline.errors import UserError
from pipeline.prompts import Prompt, choose_prompt
from pipeline.runs import settings_hash
from pipeline.settings import Settings, refuse_mismatch, resolve
from pipeline.tracking import check_options
from samplers import Sampler, cache, rules, state, stream_key

if TYPE_CHECKING:
    from adapters.description import Description

_described: dict[str, Description] = {}  # jobs of a sweep share what was read of a model
# options of a model that change no token
IDLE = ("name", "training", "device_map", "allow_cpu", "trust_checkpoint", "published")
# what a model's attention tells of its training
PATTERNS = {"full": "masked diffusion with full attention", "blocks": "block-causal diffusion"}


@dataclass
class Job:
    """One model, one sampler, one dataset, ready to decode.

    Attributes:
        config: the resolved configuration as given, the model named.
        samples: the dataset's samples in order, `prompts` their ids, put as `prompt` says.
    """

    config: dict[str, Any]
    description: Description
    settings: Settings
    dataset: Dataset
    samples: list[Sample]
    prompt: Prompt
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
        return settings_hash({**self.dataset.protocol, **self.prompt.protocol})

    @cached_property
    def decoding(self) -> dict[str, Any]:
        """All that can change a sample's tokens, besides its prompt."""
        options, facts = self.description.options, self.description.facts
        return {
            "weights": self.description.identity(),
            "dtype": self.description.dtype,
            "confidence_dtype": options.confidence_dtype,
            "quantization": options.quantization or None,
            "attention_kernel": options.attention_kernel,
            "compile": options.compile,
            "attention": facts.attention,
            "shift": facts.shift,
            "block_origin": facts.block_origin,
            "trained_block": facts.trained_block,
            "mask_id": facts.mask_id,
            "end_ids": sorted(facts.end_ids),
            "sampler": self.settings.values,
            "sampler_code": code_hash(type(self.settings.sampler)),
            "gen_length": self.settings.gen_length,
            "stop": list(self.dataset.stop),
            "seed": self.seed,
        }

    @cached_property
    def effective(self) -> dict[str, Any]:
        """The configuration with what prompt and sampler came to in place of their options."""
        sampler = {key: self.config["sampler"][key] for key in ("_target_", "name", "method", "trained_for")}
        prompt = {"template": self.prompt.template}
        return {**self.config, "prompt": prompt, "sampler": {**sampler, **self.settings.values}}

    @cached_property
    def hash(self) -> str:
        """Equal for jobs that would give the same rows; names a job's folder in a sweep."""
        asked = {key: self.effective[key] for key in ("prompt", "sampler", "dataset", "seed")}
        model = {key: value for key, value in self.config["model"].items() if key not in IDLE}
        model |= {"dtype": self.description.dtype, "quantization": model["quantization"] or None}
        code = code_hash(type(self.settings.sampler))
        return settings_hash({**asked, "model": model, "gen_length": self.settings.gen_length, "sampler_code": code})

    @property
    def trained_for(self) -> str | None:
        """The training that the preset, or else its sampler, presumes, in words."""
        return self.config["sampler"]["trained_for"] or type(self.settings.sampler).trained_for

    @property
    def training_note(self) -> str | None:
        """One line if the sampler presumes a training by none of the names that the model's goes by."""
        names = [self.config["model"]["training"], PATTERNS.get(self.description.facts.attention)]
        if self.description.place:  # the toy is of no family
            names.append(self.description.family.name)
        wanted = self.trained_for
        if wanted is None or any(name and re.search(rf"\b{re.escape(name)}\b", wanted, re.I) for name in names):
            return None
        model, sampler, _ = self.names
        return f"sampler={sampler} presumes a training that model={model} is not known to have had: {wanted}"

    def key(self, index: int) -> str:
        """A row's key: the hash of all that can change its tokens."""
        return self._keys[index]

    @cached_property
    def _keys(self) -> list[str]:
        samples = zip(self.samples, self.prompts, strict=True)
        return [settings_hash([self.decoding, sample.id, prompt]) for sample, prompt in samples]

    def stream(self, index: int) -> int:
        """Key of a sample's random numbers: by its id, so that order and limit don't matter."""
        identity = hashlib.sha256(self.samples[index].id.encode()).digest()
        return stream_key(self.seed, int.from_bytes(identity[:7], "big"))

    @property
    def slots(self) -> int:
        """Length of the longest row that fits the model."""
        return self.settings.slots(self.prompts, self.description.facts)


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
    cfg = named(cfg, overridden)
    config = plain(cfg)
    _refuse_out_of_range(config)
    check_options(config["logger"])
    dataset = make_dataset(cfg.dataset)
    refuse_absent_devices(**config["trainer"])
    refuse_shared_devices(config["model"]["device_map"], config["trainer"]["devices"])
    samples = dataset.samples()
    description = describe_model(config["model"], config["trainer"]["accelerator"], overridden)
    refuse_slow(description, config["trainer"]["accelerator"])
    refuse_mismatch(cfg, description.facts)
    settings = resolve(
        cfg.sampler, dataset.gen_length, description.facts, dataset.block_size, overridden, drop_unused=in_sweep
    )
    prompt = choose_prompt(config["prompt"]["template"], description.codec, config["model"])
    prompts = prompt.encode_all(description.codec, samples)
    return Job(config, description, settings, dataset, samples, prompt, prompts)


def describe_model(options: dict[str, Any], accelerator: str = "auto", overridden: Sequence[str] = ()) -> Description:
    """`adapters.description.describe`, once a process for equal options.

    Raises:
        UserError: also for an option in ``overridden``, the command line's keys, that does nothing for the model.
    """
    from adapters.description import describe
    from adapters.places import ModelOptions

    device = device_type(accelerator)
    key = json.dumps([options, device], sort_keys=True)
    if key not in _described:
        try:
            _described[key] = describe(ModelOptions(**options), device)
        except ValueError as error:
            raise UserError(str(error)) from error
    _refuse_unused(_described[key], overridden)
    return _described[key]


def _refuse_unused(description: Description, overridden: Sequence[str]) -> None:
    """Refuse an option of the command line that does nothing for the model; a YAML's is told in a note instead."""
    from adapters.options import unused

    for name, reason in unused(description).items():
        if f"model.{name}" in overridden:
            value = vars(description.options)[name]
            raise UserError(f"model.{name}={value} is not used: {reason}, leave it out")


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
