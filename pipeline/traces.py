"""The traces of a run: ``trace/<index>.jsonl``, first a line that says what was decoded, then one line a forward."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.files import refusing

if TYPE_CHECKING:
    from pipeline.engine import Outcome
    from pipeline.job import Job

END = "∎"
HOW = ("committed", "revised", "remasked")
HEADER = frozenset(
    {"id", "model", "sampler", "method", "canvas", "blocks", "mask_id", "texts", "end_ids", "prompt_text", "forwards"}
)
FORWARD = frozenset({"forward", "kind", "window", "cached", "changed", *HOW})
AGAIN = "delete the run's folder and decode it again"


@dataclass(frozen=True)
class Slot:
    """A slot of the canvas after a forward.

    Attributes:
        text: of its token, `END` for an end token; None while undecided.
        confidence: of its last decision, 0..1.
        decided_at: the forward that gave it this token.
        change: what this forward did: one of `HOW`, or None.
        scarred: it was revised or remasked, by this forward or before.
    """

    text: str | None = None
    confidence: float = 0.0
    decided_at: int | None = None
    change: str | None = None
    scarred: bool = False


@dataclass(frozen=True)
class Trace:
    """One sample's decoding.

    Attributes:
        header: as `make_header` made it.
        forwards: records in order, see `Outcome.trace`.
    """

    path: Path
    header: dict[str, Any]
    forwards: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return self.header["id"]

    @property
    def canvas(self) -> range:
        """Slots decoded, as positions in the row."""
        return range(*self.header["canvas"])

    def text(self, token: int) -> str:
        """What a token of the trace is shown as."""
        return END if token in self.header["end_ids"] else self.header["texts"][str(token)]

    def frames(self) -> Iterator[list[Slot]]:
        """The canvas before the first forward, and after each."""
        slots = [Slot() for _ in self.canvas]
        yield slots
        for record in self.forwards:
            slots = [replace(slot, change=None) for slot in slots]
            for place, slot in self._changed(record, slots):
                slots[place] = slot
            yield slots

    def _changed(self, record: dict[str, Any], before: list[Slot]) -> Iterator[tuple[int, Slot]]:
        how = {slot: name for name in HOW for slot in record[name]}
        for at, token, confidence in record["changed"]:
            place, change = at - self.canvas.start, how.get(at)
            old = before[place]
            scarred = old.scarred or change in ("revised", "remasked")
            if change == "remasked" or (change is None and old.text is None):  # a mask, or noise
                yield place, Slot(change=change, scarred=scarred)
            else:
                decided_at = record["forward"] if change else old.decided_at
                yield place, Slot(self.text(token), confidence, decided_at, change, scarred)

    def counts(self) -> Counter[str]:
        """Slots committed, revised and remasked over all forwards."""
        return Counter({name: sum(len(record[name]) for record in self.forwards) for name in HOW})


def kind_of(record: dict[str, Any]) -> str:
    """What a forward was for; ``draft`` if it was a draft model's."""
    return "draft" if record.get("role") == "draft" else record["kind"]


def make_header(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What was decoded, with the texts of all ids of the trace, so that whoever plays it needs no tokenizer."""
    state, index = outcome.state, outcome.task.index
    assert state is not None
    model, sampler, dataset = job.names
    size = job.settings.values.get("block_size")
    prompt, decode = outcome.task.prompt, job.description.codec.decode
    decided = {token for record in outcome.trace for _, token, _ in record["changed"]}
    return {
        "id": job.samples[index].id,
        "index": index,
        "model": model,
        "sampler": sampler,
        "method": job.config["sampler"]["method"],
        "dataset": dataset,
        "prompt": prompt,
        "prompt_text": decode(prompt, raw=True),
        "canvas": [state.canvas.start, state.canvas.stop],
        "asked": state.asked,
        "block_size": size,
        "blocks": [[block.start, block.stop] for block in state.blocks(size)] if size else [],
        "mask_id": state.model.mask_id,
        "end_ids": sorted(state.model.end_ids),
        "texts": {str(token): decode([token], raw=True) for token in sorted({*prompt, *decided})},
        "failure": outcome.failure,
        "forwards": len(outcome.trace),
    }


def read_trace(path: Path) -> Trace:
    """A trace, whole.

    Raises:
        UserError: one sentence, for a file that cannot be read or holds no whole trace.
    """
    with refusing(path, "read"):
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    found = [_line(path, number, line) for number, line in enumerate(lines, start=1)]
    header, forwards = found[0], found[1:]
    if len(forwards) != header["forwards"]:
        raise UserError(f"{path} holds {len(forwards)} of {header['forwards']} forwards: {AGAIN}")
    return Trace(path, header, forwards)


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The first line's header, or another's forward."""
    try:
        found = json.loads(line)
    except ValueError:
        raise UserError(f"{path} line {number} is torn or damaged: {AGAIN}") from None
    what, keys = ("header", HEADER) if number == 1 else ("forward", FORWARD)
    if not isinstance(found, dict) or not keys <= set(found):
        raise UserError(f"{path} line {number} is no {what} of a trace: {AGAIN}")
    return found


def find_traces(folder: Path) -> list[Path]:
    """Files of the traced samples of a run, in dataset order.

    Raises:
        UserError: if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give the folder of a run, such as outputs/mine")
    files = [path for path in (folder / "trace").glob("*.jsonl") if path.stem.isdigit()]
    if not files:
        raise UserError(f"{folder} holds no trace: decode with engine.trace=true, or engine.trace_samples=5")
    return sorted(files, key=lambda path: int(path.stem))


def find_trace(folder: Path, sample: str) -> Trace:
    """The trace of a sample, by its id, or else by its number in the dataset.

    Raises:
        UserError: also if the sample was not traced.
    """
    files = find_traces(folder)
    ids = {_id_of(path): path for path in files}
    numbers = {path.stem: path for path in files}
    path = ids.get(sample) or numbers.get(sample)
    if path is None:
        raise UserError(f"--sample {sample} has no trace in {folder}: choose from {_few(ids)}")
    return read_trace(path)


def _id_of(path: Path) -> str | None:
    """The id in a file's first line; None if that is damaged, which does not concern another sample."""
    try:
        with refusing(path, "read"), path.open("rb") as file:
            return _line(path, 1, file.readline())["id"]
    except UserError:
        return None


def _few(names: Iterable[str | None]) -> str:
    known = [name for name in names if name is not None]
    return ", ".join(known[:8]) + (f" … ({len(known)} in all)" if len(known) > 8 else "")
