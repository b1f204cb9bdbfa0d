"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), from the hub or from a file.

The protocol is our own: zero shots, one user turn, an answer that ends with ``#### <number>`` as the references do.
Scores of other protocols (5-shot lm-eval, LLaDA's, Dream's, …) are not comparable with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.data.base import Dataset, HubFiles, Row, Sample, read_jsonl
from pipeline.errors import UserError
from pipeline.scoring.numbers import parse_number

HUB = "openai/gsm8k"
SPLITS = ("test", "train")


@dataclass
class Gsm8k(Dataset):
    """1,319 test questions (``split=train``: 7,473). ``path`` reads a JSONL file with question and answer instead."""

    template: ClassVar[str] = (
        "{question}\n\nReason step by step, and end your answer with a line of the form: #### <number>"
    )

    name: str = "gsm8k"
    split: str = "test"
    revision: str = "740312add88f781978c0658806c59bc2815b9866"  # a commit of the hub repository

    def validate(self) -> None:
        super().validate()
        if self.split not in SPLITS:
            raise UserError(f"dataset.split={self.split} does not exist: use one of {', '.join(SPLITS)}")

    def source(self) -> HubFiles | None:
        return None if self.path else HubFiles(HUB, self.revision, ("main/*", "README.md"))

    def load(self) -> list[Sample]:
        rows = read_jsonl(self.path) if self.path else self._hub_rows()
        return [self._sample(index, row) for index, row in enumerate(rows)]

    def _sample(self, index: int, row: Row) -> Sample:
        question, answer = row.text("question", "dataset=gsm8k"), row.text("answer", "dataset=gsm8k")
        _, marker, gold = answer.rpartition("####")
        if not marker or parse_number(gold) is None:
            row.fail(
                "has an answer that does not end with '#### <number>': dataset=gsm8k needs that; try dataset=jsonl"
            )
        content = self.template.replace("{question}", question)
        return Sample(f"{self.name}-{self.split}-{index}", ({"role": "user", "content": content},), gold.strip())

    def _hub_rows(self) -> list[Row]:
        from datasets import load_dataset

        try:
            table = load_dataset(HUB, "main", split=self.split, revision=self.revision)
        except Exception as error:  # the faults of hub, network and cache have no common class
            raise UserError(
                f"dataset={self.name} could not be loaded from the hub ({HUB} at dataset.revision={self.revision}: "
                f"{type(error).__name__}): without a network or a cached copy, "
                "set dataset.path= to a JSONL file with the fields question and answer"
            ) from error
        return [Row(f"{HUB} row {index}", dict(fields)) for index, fields in enumerate(table)]

    @property
    def protocol(self) -> dict[str, object]:
        return {**super().protocol, "split": self.split}
