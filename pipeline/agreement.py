"""How far a model of ours agrees with what the authors' code computed: prompts, logits, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adapters.base import DeviceAdapter, Request
from adapters.text import TextCodec
from pipeline.engine import Engine, Outcome, Task
from pipeline.errors import UserError
from pipeline.reference import Reference, ReferenceForward
from samplers import Attend, Forward

if TYPE_CHECKING:
    from pipeline.settings import Settings

FLOAT32 = 2e-5  # largest difference of a logit
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
        near = self.spread <= HALF[self.dtype] if self.dtype in HALF else self.absolute <= FLOAT32
        return near and all(gap <= self.slack for *_, gap in self.differing)

    @property
    def slack(self) -> float:
        """A gap between two logits that the differences can turn round: a tie."""
        return 2 * max(self.absolute, FLOAT32)


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
    ours = raw_logits(adapter, forward.ids, wanted, forward.attend)
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


def raw_logits(adapter: DeviceAdapter, tokens: Sequence[int], rows: Sequence[int], attend: Attend) -> torch.Tensor:
    """What the network says at ``rows``: (N, V), float32, on the CPU. The head is overheard in an ordinary forward."""
    kept: list[torch.Tensor] = []
    head = adapter.head

    def listening(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        kept.append(logits.to("cpu", torch.float32, copy=True))  # the read-out overwrites them
        return logits

    adapter.open(1, len(tokens) + adapter.facts.shift)
    adapter.place(0, tokens, 0)
    want = [row + adapter.facts.shift for row in rows]
    adapter.head = listening  # type: ignore[method-assign]
    try:
        adapter.forward([Request(0, Forward(range(len(tokens)), want, attend=attend), [], [])])
    finally:
        del adapter.head
    return torch.cat(kept)


def compare_answers(adapter: DeviceAdapter, reference: Reference, settings: Settings, slack: float) -> list[Finding]:
    """Decode every prompt as the reference was; the first differing token of each answer.

    Args:
        slack: see `ForwardResult.slack`.
    """
    numbers = sorted(reference.answers)
    tasks = [Task(n, reference.prompts[n], settings.gen_length, traced=True) for n in numbers]
    longest = max(map(len, reference.prompts)) + settings.gen_length
    found = []
    for outcome in Engine(adapter, settings.sampler, max_rows=1).decode(tasks, longest):
        if outcome.failure or outcome.state is None:
            raise UserError(f"prompt {outcome.task.index} of the reference: {outcome.error}")
        found.append((outcome, reference.answers[outcome.task.index]))
    # only now: asking for logits reopens the adapter
    replayed = [_Answer(adapter, outcome, theirs, slack).finding() for outcome, theirs in found]
    return [finding for finding in replayed if finding]


class _Answer:
    """An answer of ours beside theirs."""

    def __init__(self, adapter: DeviceAdapter, outcome: Outcome, theirs: list[int], slack: float) -> None:
        assert outcome.state is not None
        self.adapter, self.outcome, self.theirs, self.slack = adapter, outcome, theirs, slack
        self.state, self.first = outcome.state, outcome.state.prompt_length
        ends = [n for n, token in enumerate(theirs) if token in adapter.facts.end_ids]
        seen = min([len(theirs), len(self.state.canvas), *(end + 1 for end in ends)])
        ours = self.state.tokens[self.first :]
        self.differing = [n for n in range(seen) if ours[n] != theirs[n]]

    def finding(self) -> Finding | None:
        """Name the first token that differs, and, where another was decided before it, that one too."""
        if not self.differing:
            return None
        lowest, earliest = self.differing[0], min(self.differing, key=lambda n: (self._forward_of(n), n))
        count = f"{len(self.differing)} of {len(self.theirs)} tokens differ"
        text = f"answer {self.outcome.task.index}: {count}; token {lowest} {self._pair(lowest)}"
        ours, theirs, gap = self._probabilities(earliest)
        which = "" if earliest == lowest else f", token {earliest} {self._pair(earliest)}"
        tie = gap <= self.slack
        verdict = "a tie" if tie else "no tie"
        said = f"decided first of these{which}: our probabilities {ours:.6f} and {theirs:.6f}, {verdict}"
        return Finding(f"{text}; {said}", tie)

    def _pair(self, place: int) -> str:
        ours, theirs = self.state.tokens[self.first + place], self.theirs[place]
        return f"is {_token(self.adapter.codec, ours)}, the reference has {_token(self.adapter.codec, theirs)}"

    def _forward_of(self, place: int) -> int:
        """Forwards made before the slot got its token."""
        return self.state.committed_at[self.first + place]

    def _probabilities(self, place: int) -> tuple[float, float, float]:
        """Of our token and theirs where ours was decided, and how far apart their logits are; without a cache."""
        slot = self.first + place
        tokens, window = self._before(slot)
        row = slot - self.adapter.facts.shift
        logits = raw_logits(self.adapter, tokens[:window], [row], self._attend())[0]
        ours, theirs = self.state.tokens[slot], self.theirs[place]
        said = logits.softmax(-1)
        return float(said[ours]), float(said[theirs]), abs(float(logits[ours] - logits[theirs]))

    def _before(self, slot: int) -> tuple[list[int], int]:
        """The row as it stood when the slot was decided, and where the window of that forward ended."""
        mask = self.adapter.facts.mask_id
        tokens = [*self.outcome.task.prompt, *[mask or 0] * len(self.state.canvas)]
        for record in self.outcome.trace:
            if any(changed == slot and token == self.state.tokens[slot] for changed, token, _ in record["changed"]):
                return tokens, record["window"][1]
            for changed, token, _ in record["changed"]:
                tokens[changed] = token
        raise AssertionError("no forward decided the slot")

    def _attend(self) -> Attend:
        facts = self.adapter.facts
        first = 0 if facts.block_origin == "zero" else self.first
        return Attend(facts.attention, first, facts.trained_block or 1)


def coarser(*dtypes: str) -> str:
    """The dtype whose tolerance is the wider one."""
    return max(dtypes, key=lambda dtype: HALF.get(dtype, 0))


def tolerance_in_words(dtype: str) -> str:
    if dtype in HALF:
        return f"{dtype}, root mean square at most {HALF[dtype]:.2e} of the largest logit"
    return f"{dtype}, largest difference at most {FLOAT32:.0e}"


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return min(len(ours), len(theirs)) if place is None and len(ours) != len(theirs) else place


def _shown(ids: Sequence[int], place: int, codec: TextCodec) -> str:
    return _token(codec, ids[place]) if place < len(ids) else "nothing more"


def _token(codec: TextCodec, token: int) -> str:
    return f"{token} {codec.decode([token], raw=True)!r}"
