"""The drafter that comes with a causal model, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.checkpoints.files import content_hash, read_json
from adapters.draft_config import DraftConfig, facts_of_drafter, is_dflash, read_draft_config, refuse_foreign_target
from adapters.memory import draft_sizes
from adapters.native import native_config
from adapters.places import ModelOptions, Place, locate_drafter, refuse_unreadable
from adapters.text import TokenizerCodec
from samplers import ModelFacts

if TYPE_CHECKING:
    from adapters.description import Description

SHARED = 0.5  # least share of the smaller vocabulary that two tokenizers must have in common


@dataclass(frozen=True)
class Drafter:
    """Exactly one of `config`, DFlash's, and `model`, a masked diffusion model's, is there."""

    place: Place
    facts: ModelFacts
    config: DraftConfig | None = None
    model: Description | None = None

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def parameters(self) -> int | None:
        """Of its network, without what its target lends; None for quantised files."""
        return draft_sizes(self.config.native.to_dict()).parameters if self.config else self._model.parameters

    @property
    def _model(self) -> Description:
        assert self.model is not None
        return self.model

    def identity(self) -> str:
        """A hash of the files' contents."""
        return content_hash(self.place.files())


def describe_drafter(options: ModelOptions, target: Description, device: str) -> Drafter:
    """Read the configuration of a model's drafter and hold it against its target.

    Raises:
        ValueError: one sentence, if it is not there, or does not fit.
    """
    given = f"model.draft={options.draft}"
    if target.facts.attention != "causal":
        raise ValueError(f"{given} drafts for a causal model, model={options.name} is none: leave it out")
    place = locate_drafter(options)
    try:
        for part in place.files():  # without weights, refused now rather than at loading
            refuse_unreadable(part)
        if is_dflash(read_json(place.folder / "config.json")):
            return _dflash(place, target)
        return _diffusion_model(options, place, target, device)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from error


def _dflash(place: Place, target: Description) -> Drafter:
    config = read_draft_config(place.folder)
    refuse_foreign_target(config, native_config(target.family, target.config), target.facts.vocab_size)
    return Drafter(place, facts_of_drafter(config.stated, target.facts), config=config)


def _diffusion_model(options: ModelOptions, place: Place, target: Description, device: str) -> Drafter:
    from adapters.description import describe

    path = str(place.file or place.folder)
    model = describe(ModelOptions(options.name, path=path, dtype=options.dtype, allow_cpu=options.allow_cpu), device)
    if model.facts.mask_id is None:
        raise ValueError("it has no mask token: a drafter is DFlash's, or a masked diffusion model")
    _refuse_foreign_tokens(model, target)
    return Drafter(place, model.facts, model=model)


def _refuse_foreign_tokens(drafter: Description, target: Description) -> None:
    """What the drafter writes the target must read as the same tokens."""
    if drafter.facts.vocab_size > target.facts.vocab_size:
        raise ValueError(
            f"it has {drafter.facts.vocab_size} ids, more than its target's {target.facts.vocab_size}: "
            "use one of the same vocabulary"
        )
    if not (isinstance(drafter.codec, TokenizerCodec) and isinstance(target.codec, TokenizerCodec)):
        return
    own, theirs = drafter.codec.tokenizer.get_vocab(), target.codec.tokenizer.get_vocab()
    common = own.keys() & theirs.keys()
    differing = next((token for token in sorted(common) if own[token] != theirs[token]), None)
    if differing is not None or len(common) < SHARED * min(len(own), len(theirs)):
        told = f", such as {differing!r}" if differing is not None else ""
        raise ValueError(f"its tokenizer has other ids than its target's{told}: use one of the same vocabulary")
