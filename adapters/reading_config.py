"""A published ``config.json`` in the words of the native architecture that serves it: read in one way by all.

Inspecting and running share it; torch is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.assumptions import refuse_unassumed
from adapters.checkpoints.files import read_json
from adapters.decoder_sizes import FORMULAS
from adapters.families import Family, language_part
from adapters.keys import COMMON, DECODER, IDS, Json, Kind, refuse_unfitting, refuse_wrong

GENERATION: dict[str, Kind] = {"eos_token_id": IDS}  # of generation_config.json


def native_arguments(family: Family, config: Json) -> dict[str, Any]:
    """Arguments of `transformers.AutoConfig.for_model`.

    Raises:
        KeyError: if a key is absent.
        ValueError: one sentence, if a value is none, or says what the native architecture does not compute.
    """
    refuse_wrong(config, COMMON)
    refuse_wrong(language_part(config), COMMON)
    written_down = family.native is not None or config.get("model_type") in FORMULAS
    if written_down:
        stated = {key: value for key, value in config.items() if value is not None}
        refuse_unassumed(family.assumes, stated, family.name)
        refuse_wrong(stated, DECODER)
        refuse_unfitting(stated)
        if family.native is not None:
            return family.native(stated)
    return dict(config)


def read_generation(folder: Path) -> dict[str, Any]:
    """The ``generation_config.json`` of a folder; empty if there is none.

    Raises:
        ValueError: one sentence, if it is no object, or a value is none.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    found = read_json(file)
    try:
        refuse_wrong(found, GENERATION)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return found
