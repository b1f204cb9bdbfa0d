"""A job: everything a run needs, checked before any weight is read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import named, plain, refuse_missing, refuse_unknown
from pipeline.data.base import Dataset, Sample
from pipeline.devices import device_type, refuse_absent_devices, refuse_shared_devices, refuse_slow
from pipeline.errors import UserError, in_words
from pipeline.ngrams import Corpus, Tables, corpus_hash, corpus_of, tables_of
from pipeline.prompts import Prompt, choose_prompt
from pipeline.runs import settings_hash
from pipeline.settings import Settings, imported, refuse_mismatch, resolve
from pipeline.sources import code_hash
from pipeline.tracking import check_options
from samplers import BlockDiffusionSampler, stream_key

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
        corpus: what the n-gram table is counted from, if the sampler reads one and a file was given.
    """

    config: dict[str, Any]
    description: Description
    settings: Settings
    dataset: Dataset
    samples: list[Sample]
    prompt: Prompt
    prompts: list[list[int]]
    corpus: Corpus | None = None

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
            "sampler": self._keyed(self.settings.values),
            "sampler_code": self.sampler_code,
            "gen_length": self.settings.gen_length,
            "stop": list(self.dataset.stop),
            "seed": self.seed,
        }

    @cached_property
    def ngrams(self) -> Tables | None:
        """From a row's prompt to the n-gram table that the sampler reads, if it does."""
        return tables_of(self.settings, self.corpus)

    def _keyed(self, sampler: dict[str, Any]) -> dict[str, Any]:
        """A sampler's settings with the contents of its corpus in place of the path."""
        return sampler if self.corpus is None else {**sampler, "ngram_corpus": corpus_hash(self.corpus)}

    @cached_property
    def sampler_code(self) -> str:
        """Of the code that decodes."""
        sampler = self.settings.sampler
        return code_hash(type(sampler), sampler.statistics() if isinstance(sampler, BlockDiffusionSampler) else ())

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
        asked["sampler"] = self._keyed(asked["sampler"])
        model = {key: value for key, value in self.config["model"].items() if key not in IDLE}
        model |= {"dtype": self.description.dtype, "quantization": model["quantization"] or None}
        known = {"model": model, "gen_length": self.settings.gen_length, "sampler_code": self.sampler_code}
        return settings_hash(asked | known)

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
    config["model"]["training"] = _known_training(config["model"], overridden)
    _refuse_out_of_range(config)
    check_options(config["logger"], in_sweep)
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
    corpus = corpus_of(settings, description)
    return Job(config, description, settings, dataset, samples, prompt, prompts, corpus)


def _known_training(model: dict[str, Any], overridden: Sequence[str]) -> str | None:
    """What a model's YAML says it was trained with; of another place given instead, only if its name says so, too."""
    option = "path" if model["path"] else "hub"
    moved = f"model.{option}" in overridden and "model.training" not in overridden
    if not (moved and model["training"]):
        return model["training"]
    folders = Path(model[option]).expanduser().parts[-3:]  # the hub's cache has models--its--id/snapshots/commit
    name = folders[0] if "snapshots" in folders[1:2] else folders[-1]
    word = rf"(?<![^\W_]){re.escape(model['training'])}(?![^\W_])"
    return model["training"] if re.search(word, name, re.IGNORECASE) else None


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
    cls = imported("dataset._target_", node._target_, Dataset)
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
        reason = in_words(str(error).splitlines()[0])
        raise UserError(f"dataset.{error.full_key or error.key}: {reason}") from error


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
