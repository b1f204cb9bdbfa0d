"""What a dataset is: questions put to a model, reference answers, and a judgement of what the model said."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pipeline.errors import UserError
from pipeline.scoring import numbers


@dataclass(frozen=True)
class Sample:
    """One question. ``id`` is unique in the dataset and stable under shuffling and limits; ``gold`` may be unknown."""

    id: str
    messages: tuple[dict[str, str], ...]
    gold: str | None


@dataclass(frozen=True)
class Verdict:
    """What an answer says (None: nothing found) and whether it is right (None: there is no reference to compare with).

    ``failure`` is ``no_answer``, ``wrong`` or None; an answer without a reference can only fail with ``no_answer``.
    """

    extracted: str | None
    correct: bool | None
    failure: str | None


@dataclass(frozen=True)
class HubFiles:
    """Files of a dataset's repository on the hub: those whose names match one of ``patterns``."""

    hub: str
    revision: str
    patterns: tuple[str, ...]


@dataclass
class Dataset(ABC):
    """A task and its protocol. The fields are the options of ``conf/dataset/<name>.yaml``; subclasses add ``load``."""

    template: ClassVar[str] = "{question}"  # the user's turn

    name: str = ""
    gen_length: int = 256
    limit: int | None = None
    shuffle_seed: int | None = None
    path: str | None = None
    stop: list[str] = field(default_factory=list)
    block_size: int | None = None

    @abstractmethod
    def load(self) -> list[Sample]:
        """Every sample, in the order of the source.

        Raises:
            UserError: for a source that is absent, broken or not what it should be.
        """

    def source(self) -> HubFiles | None:
        """What `load` takes from the hub, so that it can be fetched beforehand; None if nothing."""
        return None

    def samples(self) -> list[Sample]:
        """The samples of a run: checked, shuffled (if ``shuffle_seed`` is set), then limited to the first ``limit``.

        Raises:
            UserError: for an option out of range, an empty dataset, or an id that appears twice.
        """
        self.validate()
        samples = self.load()
        if not samples:
            raise UserError(f"dataset={self.name} has no samples: {self._origin()} must hold at least one question")
        [(commonest, times)] = Counter(sample.id for sample in samples).most_common(1)
        if times > 1:
            raise UserError(f"dataset={self.name} holds the id {commonest!r} {times} times: ids must be unique")
        if self.shuffle_seed is not None:
            random.Random(f"shuffle-{self.shuffle_seed}").shuffle(samples)
        return samples[: self.limit]

    def validate(self) -> None:
        """Refuse options out of range, before anything is read."""
        for key in ("gen_length", "limit", "block_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"dataset.{key}={value} is too small: it must be at least 1")
        if wrong := [stop for stop in self.stop if not isinstance(stop, str)]:
            raise UserError(f"dataset.stop holds {wrong[0]!r}: it must be a list of texts, such as ['Question:']")
        if "" in self.stop:
            raise UserError("dataset.stop holds an empty string, which would end every answer at once: remove it")

    def score(self, sample: Sample, text: str) -> Verdict:
        """Judge the visible answer (cut at its end token and stop string) by the number it gives."""
        number = numbers.extract_number(text)
        if number is None:
            return judge(None, None if sample.gold is None else False)
        return judge(
            numbers.number_text(number), None if sample.gold is None else numbers.same_number(number, sample.gold)
        )

    @property
    def protocol(self) -> dict[str, Any]:
        """What the model is asked and how its answer is found, as plain JSON; how it decodes is no part of it."""
        return {
            "dataset": self.name,
            "template": self.template,
            "shots": 0,
            "gen_length": self.gen_length,
            "stop": list(self.stop),
            "extraction": "number",
        }

    @property
    def scorer(self) -> str:
        """Name and version of what compares an answer with its reference."""
        return numbers.SCORER

    def _origin(self) -> str:
        return f"dataset.path={self.path}" if self.path else "its source"


def judge(extracted: str | None, correct: bool | None) -> Verdict:
    """The verdict on what was extracted; ``correct`` is None where there is no reference."""
    if extracted is None:
        return Verdict(None, None if correct is None else False, "no_answer")
    return Verdict(extracted, correct, "wrong" if correct is False else None)


@dataclass(frozen=True)
class Row:
    """One line of a JSONL file; ``where`` names it in errors."""

    where: str
    fields: dict[str, Any]

    def fail(self, fault: str) -> NoReturn:
        """Raise the user's error about this line."""
        raise UserError(f"{self.where} {fault}")

    def text(self, key: str, option: str) -> str:
        """A field that must hold text; ``option`` says which setting names the field."""
        if key not in self.fields:
            self.fail(f"has no field {key!r} ({option}): it has {', '.join(map(repr, self.fields)) or 'none'}")
        value = self.fields[key]
        if not isinstance(value, str) or not value.strip():
            self.fail(f"has {_shown(value)} in field {key!r} ({option}): it must be a text that is not empty")
        return self.encodable(value)

    def encodable(self, text: str) -> str:
        """``text``, unless it holds half a surrogate pair, which no tokenizer and no file could take."""
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"holds half of a surrogate pair in {_shown(text)}: write the whole character")
        return text


def read_jsonl(path: str) -> list[Row]:
    """The rows of a UTF-8 JSONL file; a byte order mark, CRLF line ends and blank lines are harmless.

    Raises:
        UserError: for a file that is absent, empty or not UTF-8, or a line (named) that is not a JSON object.
    """
    try:
        data = Path(path).expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"dataset.path={path} cannot be read ({reason}): it must be a JSONL file") from error
    lines = enumerate(data.split(b"\n"), start=1)
    rows = [_parse(line, f"dataset.path={path} line {number}") for number, line in lines if line.strip()]
    if not rows:
        raise UserError(f"dataset.path={path} is empty: it must hold one JSON object a line")
    return rows


def _parse(line: bytes, where: str) -> Row:
    try:
        fields = json.loads(line.decode(), parse_float=Decimal, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error}): it must be one JSON object on one line") from error
    if not isinstance(fields, dict):
        raise UserError(f'{where} holds {_shown(fields)}: it must be a JSON object such as {{"question": ...}}')
    return Row(where, fields)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _shown(value: object) -> str:
    """A value as an error shows it: short, and in JSON's words."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
