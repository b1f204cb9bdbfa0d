"""The mask and the ends of an answer: ids that the files and the options name, held against the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.checkpoints.sources import Tokens
from adapters.families import Family
from adapters.places import ModelOptions

if TYPE_CHECKING:
    from adapters.facts import Stated


def refuse_ids(stated: Stated, vocab_size: int, mask_id: int | None, end_ids: frozenset[int]) -> None:
    """Refuse ids that no logit stands for, and a mask that would end the answer.

    Raises:
        ValueError: one sentence.
    """
    for source, config in (("", stated.config), (" of generation_config.json", stated.generation)):
        value = config.get("eos_token_id")
        for id_ in [value] if isinstance(value, int) else value or []:
            if id_ >= vocab_size:
                raise ValueError(f"eos_token_id={id_}{source} is no id of the vocabulary: use 0 to {vocab_size - 1}")
    if mask_id is not None and mask_id >= vocab_size:
        own = "" if stated.config.get("mask_token_id") is not None else ", the family's own,"
        raise ValueError(f"mask_token_id={mask_id}{own} is no id of the vocabulary: use 0 to {vocab_size - 1}")
    if mask_id in end_ids:
        raise ValueError(f"{mask_id} is the mask and an end id: set model.mask_id or model.end_ids to tell them apart")


def end_ids_of(options: ModelOptions, family: Family, stated: Stated, tokens: Tokens) -> frozenset[int]:
    """All that end an answer: those that either configuration names, the tokenizer's own, and `options.end_tokens`.

    Raises:
        ValueError: if one of these is no token.
    """
    if options.end_ids is not None:
        return frozenset(options.end_ids)
    ids: set[int] = set()
    for config in (stated.config, stated.generation):
        value = config.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    if tokens.end is not None and tokens.end in tokens.ids:
        ids.add(tokens.ids[tokens.end])
    for token in options.end_tokens if tokens.ids else []:
        if token not in tokens.ids:
            raise ValueError(f"model.end_tokens: {token} is not a token of model={options.name}")
        ids.add(tokens.ids[token])
    return frozenset(ids) or family.end_ids
