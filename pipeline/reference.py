"""What `tools/dump_reference.py` wrote: ids, logits and answers of the authors' own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from samplers import Attend

if TYPE_CHECKING:
    from torch import Tensor

ENTRY, FORMAT = "blockdiff_reference", 1
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ReferenceForward:
    """One forward. T tokens, V vocabulary, N rows kept, K rows whose argmax is known; rows are raw, never shifted.

    Attributes:
        ids: (T,).
        rows, logits: (N,) and (N, V), float32.
        known: (K,) rows of ``argmax`` and ``margin``.
        argmax, margin: (K,) id of the largest logit, and how far it is above the second largest.
        attend: what a position may see.
    """

    name: str
    ids: list[int]
    rows: list[int]
    logits: Tensor
    known: list[int]
    argmax: Tensor
    margin: Tensor
    attend: Attend


@dataclass(frozen=True)
class Decoding:
    """How the answers were decoded.

    Attributes:
        settings: arguments of the authors' function.
        ours: sampler and its options that do the same; None where nobody has said which.
        gen_length: slots of the canvas.
    """

    settings: dict[str, Any]
    ours: dict[str, Any] | None
    gen_length: int


@dataclass(frozen=True)
class Reference:
    """A dump, read.

    Attributes:
        about: family, model, versions and settings, as written.
        dtype: of the weights, by its name in torch.
        texts, prompts: of each prompt its text, if it is known, and its ids.
        answers: by prompt, ids without the prompt.
    """

    about: dict[str, Any]
    dtype: str
    texts: list[str | None]
    prompts: list[list[int]]
    forwards: list[ReferenceForward]
    decoding: Decoding | None
    answers: dict[int, list[int]]


def read_reference(path: str) -> Reference:
    """Read a dump whole.

    Raises:
        UserError: one sentence, if it is absent, broken, or no such dump.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            metadata, names = opened.metadata() or {}, set(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in names}
    except OSError as error:
        raise UserError(f"--reference={path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"--reference={path} is no whole .safetensors file: {error}") from error
    if ENTRY not in metadata:
        raise UserError(f"--reference={path} is no reference: it must be written by tools/dump_reference.py")
    try:
        return _parsed(json.loads(metadata[ENTRY]), tensors)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"--reference={path} is damaged or of another version ({type(error).__name__}: {error}): write it again "
            "with tools/dump_reference.py"
        ) from error


def _parsed(about: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']} is not {FORMAT}")
    if about["dtype"] not in DTYPES:
        raise ValueError(f"dtype {about['dtype']} is none of {', '.join(DTYPES)}")
    if about["rows"] != "raw":
        raise ValueError(f"rows are {about['rows']}, not raw")
    numbers = range(len(about["prompts"]))
    found = about.get("decoding")
    return Reference(
        about=about,
        dtype=about["dtype"],
        texts=[prompt["text"] for prompt in about["prompts"]],
        prompts=[tensors[f"prompts.{number}"].tolist() for number in numbers],
        forwards=[
            _forward(entry, lambda part, name=entry["name"]: tensors.get(f"forwards.{name}.{part}"))  # type: ignore[misc]
            for entry in about["forwards"]
        ],
        decoding=Decoding(found["settings"], found["ours"], int(found["gen_length"])) if found else None,
        answers={n: tensors[f"decoded.{n}"].tolist() for n in numbers if f"decoded.{n}" in tensors},
    )


def _forward(entry: dict[str, Any], part: Callable[[str], Tensor | None]) -> ReferenceForward:
    ids, rows, logits = part("ids"), part("rows"), part("logits")
    if ids is None or rows is None or logits is None or len(rows) != len(logits):
        raise ValueError(f"the forward {entry['name']} lacks ids, rows or logits")
    argmax, margin = part("argmax"), part("margin")
    known = list(range(len(ids)))
    if argmax is None or margin is None:
        best = logits.topk(2, dim=-1)
        known, argmax, margin = rows.tolist(), best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
    kept = [place for place, token in enumerate(argmax.tolist()) if token >= 0]  # a cached prefix has none
    return ReferenceForward(
        entry["name"],
        ids.tolist(),
        rows.tolist(),
        logits.float(),
        [known[place] for place in kept],
        argmax[kept],
        margin[kept],
        Attend(**entry["attend"]),
    )
