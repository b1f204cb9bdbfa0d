"""Forwards and tokens as other projects' own codes count them, for comparing with the numbers of their papers.

What was run stays what it is: a project's rules are applied to our log, whichever sampler wrote it. docs/metrics.md
tells how each differs from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.text import IdCodec, TextCodec
from samplers import DecodeState, Kind, Role
from samplers.d3llm import UNCOUNTED
from samplers.rules import FILLED

if TYPE_CHECKING:
    from pipeline.engine import Run

POOLED = frozenset({"fastdllm", "d3llm"})  # sum over sum; the others take the mean of the samples' ratios


class Counts(NamedTuple):
    """None is what a project's code does not count, or what our log does not tell."""

    nfe: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded sample, as far as it is counted.

    Attributes:
        ids: of the answer, no more than asked for, up to the first undecided slot.
        respelled: tokens of its text, see `respelled`; None if they can't be told.
    """

    log: Sequence[Run]
    state: DecodeState
    ids: Sequence[int]
    respelled: int | None = None

    def runs(self, *kinds: Kind) -> int:
        return sum(run.kind in kinds for run in self.log)

    def written(self) -> list[int]:
        """Decided ids of the whole canvas."""
        return [self.state.tokens[slot] for slot in self.state.canvas if not self.state.mask[slot]]


def fastdllm(sample: Decoded) -> Counts:
    """Every call, and the tokens of the text; its codes for Dream and for version 2 count no forwards."""
    return Counts(None, None) if sample.state.model.shift else Counts(len(sample.log), sample.respelled)


def d3llm(sample: Decoded) -> Counts:
    """Rounds of its loop, also one that only closes behind an end token; whatever is no end token, wherever it is."""
    return Counts(len(sample.log) + sample.state.notes[UNCOUNTED], _without_ends(sample, sample.written()))


def dmax(sample: Decoded) -> Counts:
    """All of prefill is one forward; the tokens are what is left of prompt and canvas, less the prompt's length.

    So an end token inside the prompt makes the answer shorter by one.
    """
    further = max(sample.runs(Kind.PREFILL) - 1, 0)
    length = sample.state.prompt_length
    row = [*sample.state.tokens[:length], *sample.written()]
    return Counts(len(sample.log) - further, _without_ends(sample, row) - length)


def diffulex(sample: Decoded) -> Counts:
    """Every step; accepted tokens, those behind an end token too, unless the sampler wrote some by itself."""
    return Counts(len(sample.log), None if sample.state.notes[FILLED] else len(sample.written()))


def llada2(sample: Decoded) -> Counts:
    """Steps of `generate`, which keeps no keys, and what it returns: up to the first end token, and that too."""
    ends = sample.state.model.end_ids
    returned = next((count for count, token in enumerate(sample.ids, 1) if token in ends), len(sample.ids))
    return Counts(len(sample.log) - sample.runs(Kind.PREFILL, Kind.COMMIT), returned)


PROJECTS: dict[str, Callable[[Decoded], Counts]] = {
    "fastdllm": fastdllm,
    "d3llm": d3llm,
    "dmax": dmax,
    "diffulex": diffulex,
    "llada2": llada2,
}
FIELDS = tuple(f"{figure}_as_{project}" for project in PROJECTS for figure in ("nfe", "tokens"))


def as_counted(sample: Decoded) -> dict[str, int | None]:
    """A row's `FIELDS`; all None for what none of the projects decodes: plain continuation, and drafts."""
    drafted = any(run.role is Role.DRAFT or run.kind is Kind.VERIFY for run in sample.log)
    if drafted or sample.state.model.mask_id is None:
        return dict.fromkeys(FIELDS)
    counted = {project: count(sample) for project, count in PROJECTS.items()}
    return {f"{name}_as_{project}": told for project, both in counted.items() for name, told in both._asdict().items()}


def tokens_per_forward(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """``tokens_per_forward_as_<project>``; None if a row lacks one of the numbers: the others are no fair sample."""
    return {
        f"tokens_per_forward_as_{project}": _ratio(_pairs(rows, project), project in POOLED) for project in PROJECTS
    }


def respelled(codec: TextCodec, ids: Sequence[int], ends: Collection[int], stops: Sequence[str]) -> int | None:
    """Tokens that are no end token in the text of ``ids``, cut at the first stop string and tokenized again.

    As in Fast-dLLM's code a special token is one, and what the tokenizer puts before any text counts once. None without
    a tokenizer, and for text that it cannot spell.
    """
    if isinstance(codec, IdCodec):
        return None
    text = codec.decode(ids, raw=True)
    text = text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
    marks = {codec.decode([i], raw=True): i not in ends for i in {*ids, *ends} if i in ends or not codec.decode([i])}
    parts, specials = [text], 0
    for mark, counts in marks.items():
        pieces = [piece for part in parts for piece in (part.split(mark) if mark else [part])]
        specials += counts * (len(pieces) - len(parts))
        parts = pieces
    try:
        start, *lengths = (len(codec.encode_raw([{"role": "user", "content": part}])) for part in ["", *parts])
    except ValueError:
        return None
    return specials + start + sum(length - start for length in lengths)


def _without_ends(sample: Decoded, ids: Sequence[int]) -> int:
    return sum(token not in sample.state.model.end_ids for token in ids)


def _pairs(rows: Sequence[Mapping[str, Any]], project: str) -> list[tuple[int, int]]:
    """Tokens and forwards of each row, where there were any; Diffulex leaves prefill out of its ratio only."""
    pairs: list[tuple[int, int]] = []
    for row in rows:
        tokens, nfe = row.get(f"tokens_as_{project}"), row.get(f"nfe_as_{project}")
        if tokens is None or nfe is None:
            return []
        steps = nfe - row["nfe_prefill"] if project == "diffulex" else nfe
        pairs += [(tokens, steps)] if steps > 0 else []
    return pairs


def _ratio(pairs: Sequence[tuple[int, int]], pooled: bool) -> float | None:
    if not pairs:
        return None
    if pooled:
        return sum(tokens for tokens, _ in pairs) / sum(nfe for _, nfe in pairs)
    return sum(tokens / nfe for tokens, nfe in pairs) / len(pairs)
