"""How far a model of ours agrees with what the authors' code computed: prompts and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapters.base import DeviceAdapter
from adapters.text import TextCodec
from pipeline.errors import UserError
from pipeline.reference import Reference, ReferenceForward

# Largest difference of a logit, over the largest logit. Measured on five golden checkpoints and on tiny_ar: sums in
# another order at most 1e-6; half of an epsilon of 1e-5 on top 1.5e-5; a rotary base that is 0.1 % off 1.5e-4 and more.
FLOAT32 = 5e-6
TIE = 2e-5  # two logits this near are a tie however well the forwards agree
# In half precision the largest of many differences says little; their root mean square, over the largest logit, tells
# rounding from a fault: two units in the last place. Measured on four golden checkpoints: rounding 0.5 to 0.8 % in
# bfloat16, 0.07 to 0.08 % in float16; half the rotary base 2.6 to 8 %, a wrong mask 15 % and more.
HALF = {"bfloat16": 2 * 2.0**-7, "float16": 2 * 2.0**-10}


@dataclass(frozen=True)
class ForwardResult:
    """How a forward of ours differs from theirs.

    Attributes:
        absolute, relative: largest difference of a logit, and over the largest logit.
        spread: root mean square of all differences, over the largest logit.
        dtype: whose tolerance holds.
        differing: (row, our argmax, theirs, distance of their best two) where the argmax differs.
        compared: rows whose argmax is known.
    """

    name: str
    absolute: float
    relative: float
    spread: float
    dtype: str
    differing: list[tuple[int, int, int, float]]
    compared: int

    @property
    def agrees(self) -> bool:
        """Within tolerance, where another argmax is a tie."""
        near = self.spread <= HALF[self.dtype] if self.dtype in HALF else self.relative <= FLOAT32
        return near and all(gap <= self.slack for *_, gap in self.differing)

    @property
    def slack(self) -> float:
        """A gap between two logits that the differences can turn round: a tie."""
        return 2 * max(self.absolute, TIE)


@dataclass(frozen=True)
class Finding:
    """One difference between prompts or answers in a sentence; a tie is none that counts."""

    text: str
    tie: bool = False


def compare_prompts(reference: Reference, codec: TextCodec) -> list[Finding] | None:
    """Tokenizer and template: the ids of every prompt whose text is known; None if none is."""
    encode = codec.encode_chat if reference.about["chat_template"] else codec.encode_raw
    known = [(n, text) for n, text in enumerate(reference.texts) if text is not None]
    found = []
    for number, text in known:
        try:
            ours = encode([{"role": "user", "content": text}])
        except ValueError as error:
            raise UserError(f"prompt {number} of the reference cannot be put to this model: {error}") from error
        place = _first_difference(ours, reference.prompts[number])
        if place is not None:
            pair = [_shown(ids, place, codec) for ids in (ours, reference.prompts[number])]
            found.append(Finding(f"prompt {number}: token {place} is {pair[0]}, the reference has {pair[1]}"))
    return found if known else None


def compare_forward(adapter: DeviceAdapter, forward: ReferenceForward, dtype: str) -> ForwardResult:
    """Our logits against theirs, computed without a cache whatever theirs were."""
    wanted = sorted({*forward.rows, *forward.known})
    place = {row: n for n, row in enumerate(wanted)}
    ours = adapter.logits(forward.ids, wanted, forward.attend).cpu()
    difference = (ours[[place[row] for row in forward.rows]] - forward.logits).abs()
    largest, absolute = max(float(forward.logits.abs().max()), 1e-30), float(difference.max())
    if absolute != absolute:
        raise UserError(f"forward {forward.name}: logits are not numbers, here or in the reference")
    argmax = ours[[place[row] for row in forward.known]].argmax(-1).tolist()
    rows = zip(forward.known, argmax, forward.argmax.tolist(), forward.margin.tolist(), strict=True)
    return ForwardResult(
        forward.name,
        absolute,
        absolute / largest,
        float(difference.square().mean().sqrt()) / largest,
        dtype,
        [row for row in rows if row[1] != row[2]],
        len(forward.known),
    )


def coarser(*dtypes: str) -> str:
    """The dtype whose tolerance is the wider one."""
    return max(dtypes, key=lambda dtype: HALF.get(dtype, 0))


def tolerance_in_words(dtype: str) -> str:
    if dtype in HALF:
        return f"{dtype}, root mean square at most {HALF[dtype]:.2e} of the largest logit"
    return f"{dtype}, largest difference at most {FLOAT32:.0e} of the largest logit"


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return min(len(ours), len(theirs)) if place is None and len(ours) != len(theirs) else place


def _shown(ids: Sequence[int], place: int, codec: TextCodec) -> str:
    return token_in_words(codec, ids[place]) if place < len(ids) else "nothing more"


def token_in_words(codec: TextCodec, token: int) -> str:
    """A token by its id and its text."""
    return f"{token} {codec.decode([token], raw=True)!r}"
