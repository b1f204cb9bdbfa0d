"""The user's own questions: a JSONL file, one object a line, with a question (or a ``messages`` list) and an answer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pipeline.data.base import Dataset, Row, Sample, Verdict, judge, read_jsonl
from pipeline.errors import UserError
from pipeline.scoring.numbers import parse_number

MATCHES = ("number", "text")
ROLES = ("system", "user", "assistant")


@dataclass
class Jsonl(Dataset):
    """Questions and answers of a file.

    ``match=number`` compares the number that the answer gives, ``match=text`` the whole answer without its outer white
    space. A line without an answer (absent or null) is decoded but not scored. ``messages`` is used where a line has no
    ``question_field``; it is put to the model as it stands, without ``prompt_template``.
    """

    name: str = "jsonl"
    question_field: str = "question"
    answer_field: str = "answer"
    id_field: str | None = None
    prompt_template: str = "{question}"
    match: str = "number"

    def validate(self) -> None:
        super().validate()
        if not self.path:
            raise UserError("dataset.path= is not set: dataset=jsonl needs a JSONL file of questions and answers")
        if self.match not in MATCHES:
            raise UserError(f"dataset.match={self.match} does not exist: use one of {', '.join(MATCHES)}")
        if "{question}" not in self.prompt_template:
            raise UserError(
                f"dataset.prompt_template={self.prompt_template!r} does not say where the question goes: "
                "it must hold {question}"
            )

    def load(self) -> list[Sample]:
        seen: dict[str, str] = {}  # id to line number
        samples = []
        for index, row in enumerate(read_jsonl(str(self.path))):
            sample = Sample(self._id(index, row), self._messages(row), self._gold(row))
            if sample.id in seen:
                row.fail(f"repeats the id {sample.id!r} of line {seen[sample.id]}: ids must be unique")
            seen[sample.id] = row.where.rpartition(" ")[2]
            samples.append(sample)
        return samples

    def score(self, sample: Sample, text: str) -> Verdict:
        if self.match == "number":
            return super().score(sample, text)
        answer = text.strip() or None
        return judge(answer, None if sample.gold is None else answer == sample.gold)

    @property
    def protocol(self) -> dict[str, Any]:
        return {**super().protocol, "template": self.prompt_template, "extraction": self.match}

    @property
    def scorer(self) -> str:
        return super().scorer if self.match == "number" else "text-1"

    def _id(self, index: int, row: Row) -> str:
        if self.id_field is None:
            return f"{self.name}-{index}"
        value = row.fields.get(self.id_field)
        if type(value) is int:
            return str(value)
        return row.text(self.id_field, "dataset.id_field")

    def _messages(self, row: Row) -> tuple[dict[str, str], ...]:
        if self.question_field not in row.fields and "messages" in row.fields:
            return self._chat(row)
        question = row.text(self.question_field, "dataset.question_field")
        return ({"role": "user", "content": self.prompt_template.replace("{question}", question)},)

    def _chat(self, row: Row) -> tuple[dict[str, str], ...]:
        messages = row.fields["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            row.fail(
                "has 'messages' that are not a chat: it must be a list of "
                f'{{"role": ..., "content": <text>}} with the roles {", ".join(ROLES)}'
            )
        if messages[-1]["role"] != "user":
            row.fail(
                f"has 'messages' that end with role {messages[-1]['role']!r}: the last one must be the user's question"
            )
        return tuple({"role": m["role"], "content": row.encodable(m["content"])} for m in messages)

    def _gold(self, row: Row) -> str | None:
        value = row.fields.get(self.answer_field)
        if value is None:
            return None
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            value = str(value)
        elif not isinstance(value, str) or not value.strip():
            row.fail(
                f"has {value!r} in field {self.answer_field!r} (dataset.answer_field): it must be a text or a number"
            )
        gold = row.encodable(value).strip()
        return gold if self.match == "text" else self._number(gold, row)

    def _number(self, gold: str, row: Row) -> str:
        """The reference number as it is written: what follows ``####`` in a worked answer, else the whole text."""
        number = gold.rpartition("####")[2].strip()
        if parse_number(number) is None:
            row.fail(
                f"has {gold[-60:]!r} in field {self.answer_field!r} (dataset.answer_field), which is not one number: "
                "write the number alone or after ####, or set dataset.match=text"
            )
        return number


def _is_message(message: object) -> bool:
    """A chat turn with a known role, text and nothing else; only an assistant may have said nothing."""
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and message["role"] in ROLES
        and isinstance(message["content"], str)
    )
