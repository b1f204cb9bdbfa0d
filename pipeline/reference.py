"""What `tools/dump_reference.py` wrote: ids, logits and answers of the authors' own code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from samplers import Attend

if TYPE_CHECKING:
    from torch import Tensor

ENTRY, FORMAT = "blockdiff_reference", 2
DTYPES = ("float32", "bfloat16", "float16")
PATTERNS = ("full", "blocks", "causal")
STAND_IN = "masked diffusion on a native architecture"  # sees and reads what LLaDA does
FAMILIES = {  # of the script: those of ours that are the same
    "llada": ("LLaDA", STAND_IN),
    "llada_moe": ("LLaDA-MoE",),
    "llada2": ("LLaDA2",),
    "dream": ("Dream",),
    "sdar": ("SDAR", "SDAR-MoE"),
    "fast_dllm_v2": ("Fast-dLLM v2",),
    "causal": ("causal language model",),
}


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
        vocab_size: logits a position.
        mask_id, end_ids: of the authors' model; an answer is over at the first end id.
        texts, prompts: of each prompt its text, if it is known, and its ids.
        answers: by prompt, ids without the prompt.
    """

    about: dict[str, Any]
    dtype: str
    vocab_size: int
    mask_id: int | None
    end_ids: frozenset[int]
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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"--reference={path} is damaged or of another version ({said}): write it again with tools/dump_reference.py"
        ) from error


def _parsed(about: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    _require(isinstance(about, dict), "its description is no object")
    _require(about["format"] == FORMAT, f"format {about['format']} is not {FORMAT}")
    _refuse_strange(about)
    numbers = range(len(about["prompts"]))
    forwards = [_forward(entry, tensors) for entry in about["forwards"]]
    sizes = {forward.logits.shape[1] for forward in forwards}
    _require(len(sizes) == 1, f"its forwards have {sorted(sizes)} logits a position")
    found = about["decoding"]
    reference = Reference(
        about=about,
        dtype=about["dtype"],
        vocab_size=sizes.pop(),
        mask_id=about["mask_id"],
        end_ids=frozenset(about["end_ids"]),
        texts=[prompt["text"] for prompt in about["prompts"]],
        prompts=[_ids(tensors, f"prompts.{number}") for number in numbers],
        forwards=forwards,
        decoding=_decoding(found) if found is not None else None,
        answers={n: _ids(tensors, f"decoded.{n}") for n in numbers if f"decoded.{n}" in tensors},
    )
    _refuse_strange_ids(reference)
    _refuse_torn_answers(reference)
    return reference


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise ValueError(said)


def _refuse_strange(about: dict[str, Any]) -> None:
    """Refuse a value that is none of its key's, and a key that is missing."""
    for key, known in (("dtype", DTYPES), ("family", tuple(FAMILIES)), ("rows", ("raw",))):
        _require(about[key] in known, f"{key} {about[key]} is none of {', '.join(known)}")
    for key in ("model", "device"):
        _require(isinstance(about[key], str), f"{key} is no text")
    _require(isinstance(about["chat_template"], bool), "chat_template is neither true nor false")
    _require(about["mask_id"] is None or _is_number(about["mask_id"]), f"mask_id {about['mask_id']} is no id")
    _require(isinstance(about["end_ids"], list) and all(map(_is_number, about["end_ids"])), "end_ids are no ids")
    for key in ("prompts", "forwards"):
        listed = about[key]
        _require(isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed), f"{key} are no objects")
    _require(len(about["forwards"]) > 0, "it has no forward")
    for prompt in about["prompts"]:
        _require(prompt["text"] is None or isinstance(prompt["text"], str), f"a prompt is {prompt['text']}, no text")


def _is_number(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _decoding(found: Any) -> Decoding:
    _require(isinstance(found, dict), "decoding is no object")
    settings, ours, gen_length = found["settings"], found["ours"], found["gen_length"]
    _require(isinstance(settings, dict), "decoding.settings is no object")
    named = isinstance(ours, dict) and isinstance(ours.get("sampler"), str)
    _require(ours is None or named, "decoding.ours is no object that names a sampler")
    _require(_is_number(gen_length, 1), f"decoding.gen_length is {gen_length}")
    return Decoding(settings, ours, gen_length)


def _ids(tensors: dict[str, Tensor], name: str) -> list[int]:
    """A list of whole numbers, of one at least."""
    found = tensors[name]
    whole = not (found.is_floating_point() or found.is_complex())
    _require(found.ndim == 1 and len(found) > 0 and whole, f"{name} is no list of ids")
    return found.tolist()


def _refuse_strange_ids(reference: Reference) -> None:
    """Refuse an id that is none of the vocabulary."""
    own = [] if reference.mask_id is None else [reference.mask_id]
    lists = {
        "mask_id and end_ids": [*own, *reference.end_ids],
        **{f"prompts.{n}": ids for n, ids in enumerate(reference.prompts)},
        **{f"decoded.{n}": ids for n, ids in reference.answers.items()},
        **{f"forwards.{forward.name}.ids": forward.ids for forward in reference.forwards},
        **{f"forwards.{forward.name}.argmax": forward.argmax.tolist() for forward in reference.forwards},
    }
    for name, ids in lists.items():
        wrong = next((token for token in ids if not 0 <= token < reference.vocab_size), None)
        _require(wrong is None, f"{name}: {wrong} is no id below {reference.vocab_size}")


def _refuse_torn_answers(reference: Reference) -> None:
    """An answer is over at an end id, or else it fills the canvas."""
    _require(not reference.answers or reference.decoding is not None, "it has answers, but does not say how they came")
    for number, ids in reference.answers.items():
        assert reference.decoding
        most = reference.decoding.gen_length
        _require(len(ids) <= most, f"decoded.{number} has {len(ids)} ids, more than gen_length {most}")
        ended = any(token in reference.end_ids for token in ids)
        _require(
            ended or len(ids) == most, f"decoded.{number} neither ends nor fills gen_length: {len(ids)} of {most} ids"
        )


def _forward(entry: dict[str, Any], tensors: dict[str, Tensor]) -> ReferenceForward:
    name, attend = entry["name"], Attend(**entry["attend"])
    start = f"forwards.{name}."
    parts = ("ids", "rows", "logits", "argmax", "margin")
    if lost := [part for part in parts if start + part not in tensors]:
        raise ValueError(f"the forward {name} lacks {', '.join(lost)}")
    ids, rows = _ids(tensors, start + "ids"), _ids(tensors, start + "rows")
    logits, argmax, margin = (tensors[start + part] for part in parts[2:])
    cached = entry.get("cached", 0)
    _require(_is_number(cached) and cached < len(ids), f"{start}cached is {cached} of {len(ids)} positions")
    first = attend.pattern != "blocks" or (_is_number(attend.first) and _is_number(attend.size, 1))
    _require(attend.pattern in PATTERNS and first, f"the forward {name} attends {entry['attend']}")
    _require(
        logits.ndim == 2 and len(logits) == len(rows) and logits.shape[1] > 1, f"{start}logits are not of its rows"
    )
    _require(len(set(rows)) == len(rows), f"{start}rows names a row twice")
    wrong = next((row for row in rows if not cached <= row < len(ids)), None)
    _require(wrong is None, f"{start}rows: {wrong} is no row of {cached} to {len(ids) - 1}")
    _require(argmax.shape == margin.shape == (len(ids),), f"{start}argmax and margin are not of {len(ids)} rows")
    _require(bool(logits.isfinite().all() and margin.isfinite().all()), f"{start}logits or margin are no numbers")
    known = list(range(cached, len(ids)))
    own = logits.gather(1, argmax[rows, None].long().clamp(0, logits.shape[1] - 1))[:, 0]
    _require(bool((own == logits.max(-1).values).all()), f"{start}argmax is not that of the logits")
    return ReferenceForward(name, ids, rows, logits.float(), known, argmax[cached:], margin[cached:], attend)
