"""Generated multi-step word problems with worked answers, small enough for a network of a million parameters.

A problem of level n takes n operations, each on numbers below 100:

    Tom has 4 bags of 6 pens. He buys 7 more. He loses 5. How many pens now?
     4 * 6 = 24, 24 + 7 = 31, 31 - 5 = 26 #### 26

Train and test are disjoint by construction: the numbers and operations of a problem, without its names and things,
decide which split it belongs to, so no test problem differs from a training problem in its words alone.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

from pipeline.data.base import Dataset, Sample
from pipeline.errors import UserError

LEVELS = (1, 2, 3, 4)
LARGEST = 99
TEST_SHARE = 10  # one problem in ten is a test problem
SPLITS = ("train", "test")
MOST_PROBLEMS = 50_000  # every level and split has more distinct problems than this

PEOPLE = {"Tom": "He", "Ann": "She", "Ben": "He", "Eva": "She", "Max": "He", "Mia": "She", "Sam": "He", "Zoe": "She"}
THINGS = ("pens", "cards", "shells", "coins", "books", "stamps", "apples", "nuts")
CONTAINERS = ("bags", "boxes", "rows", "jars")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("loses", "sells", "drops", "uses")
OTHER_WORDS = ("has", "of", "more", "doubles", "keeps", "half", "them", "How", "many", "now")


def words() -> list[str]:
    """Every word a problem can contain, in a fixed order: the tiny models' vocabulary is built from it."""
    people = [*PEOPLE, "He", "She"]
    return [*people, *THINGS, *CONTAINERS, *GAINS, *LOSSES, *OTHER_WORDS]


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer (ending in ``#### <number>``) and the number alone."""

    question: str
    answer: str
    gold: int
    level: int
    operations: tuple[tuple[int, str, int, int], ...]

    @property
    def split(self) -> str:
        """``train`` or ``test``, decided by the operations only."""
        return "test" if zlib.crc32(repr(self.operations).encode()) % TEST_SHARE == 0 else "train"


def _change(total: int, rng: random.Random) -> tuple[str, str, int, int]:
    """One change to a total: (sentence after the pronoun, operation, operand, new total), always within 0..LARGEST."""
    while True:
        kind = rng.choices(("+", "-", "* 2", "/ 2"), weights=(4, 4, 1, 1))[0]
        if kind == "+" and total < LARGEST:
            n = rng.randint(1, min(20, LARGEST - total))
            return f"{rng.choice(GAINS)} {n} more", "+", n, total + n
        if kind == "-" and total > 0:
            n = rng.randint(1, min(20, total))
            return f"{rng.choice(LOSSES)} {n}", "-", n, total - n
        if kind == "* 2" and 0 < total <= LARGEST // 2:
            return "doubles them", "*", 2, total * 2
        if kind == "/ 2" and total > 0 and total % 2 == 0:
            return "keeps half", "/", 2, total // 2


def make_problem(level: int, rng: random.Random) -> Problem:
    """Draw one problem of ``level`` operations.

    Raises:
        ValueError: for a level that does not exist.
    """
    if level not in LEVELS:
        raise ValueError(f"dataset.level={level} does not exist: use one of {', '.join(map(str, LEVELS))}")
    name, thing = rng.choice(list(PEOPLE)), rng.choice(THINGS)
    operations: list[tuple[int, str, int, int]] = []
    if rng.random() < 0.5:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        total = a * b
        operations.append((a, "*", b, total))
        sentences = [f"{name} has {a} {rng.choice(CONTAINERS)} of {b} {thing}."]
    else:
        total = rng.randint(1, LARGEST)
        sentences = [f"{name} has {total} {thing}."]
    while len(operations) < level:
        sentence, sign, operand, result = _change(total, rng)
        operations.append((total, sign, operand, result))
        sentences.append(f"{PEOPLE[name]} {sentence}.")
        total = result
    worked = ", ".join(f"{a} {sign} {b} = {c}" for a, sign, b, c in operations)
    question = " ".join([*sentences, f"How many {thing} now?"])
    return Problem(question, f" {worked} #### {total}", total, level, tuple(operations))


def make_problems(split: str, level: int, count: int, seed: int = 0) -> list[Problem]:
    """``count`` distinct problems of one split and level; the same arguments give the same list."""
    rng = random.Random(f"{split}-{level}-{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(level, rng)
        if problem.split == split:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


@dataclass
class ArithmeticDataset(Dataset):
    """``size`` generated problems of one level and split. The question is put alone, without an instruction."""

    name: str = "arithmetic"
    gen_length: int = 32
    level: int = 4
    split: str = "test"
    seed: int = 0
    size: int = 500

    def validate(self) -> None:
        super().validate()
        if self.path is not None:
            raise UserError(f"dataset.path={self.path} is not used by dataset=arithmetic: try dataset=jsonl for a file")
        for key, choices in (("level", LEVELS), ("split", SPLITS)):
            if getattr(self, key) not in choices:
                wanted = ", ".join(map(str, choices))
                raise UserError(f"dataset.{key}={getattr(self, key)} does not exist: use one of {wanted}")
        if not 1 <= self.size <= MOST_PROBLEMS:
            raise UserError(f"dataset.size={self.size} is out of range: use 1 to {MOST_PROBLEMS}")

    def load(self) -> list[Sample]:
        problems = make_problems(self.split, self.level, self.size, self.seed)
        prefix = f"{self.name}-{self.split}-{self.level}"
        return [
            Sample(f"{prefix}-{index}", ({"role": "user", "content": problem.question},), str(problem.gold))
            for index, problem in enumerate(problems)
        ]

    @property
    def protocol(self) -> dict[str, Any]:
        return {**super().protocol, "level": self.level, "split": self.split, "seed": self.seed}
