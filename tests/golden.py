"""Outputs of the authors' own decoders: cases are found in files, run with our samplers, and compared prompt by prompt.

A test module says which files it takes and how their settings read in our words; the rest is here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import DeviceAdapter
from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from pipeline.as_counted import Decoded, as_counted
from pipeline.engine import Engine, Outcome, Task
from samplers import DecodeState, Prediction, Role, Sampler
from tests.shared import SHARED, shared

Settings = dict[str, Any]
Tally = Callable[[dict[str, Any]], None]  # takes what a case has to say for the table at the end, as plain JSON


@dataclass(frozen=True)
class Ours:
    """A case in our words.

    Attributes:
        length: tokens asked for.
        options: of the model, such as the end ids that the case's code has in it.
        output: what the authors' code returns of the decoded row.
        same_windows: whether our forwards are cut as theirs, so that their lengths can be compared.
        project: whose code reports the number of forwards that the file holds besides the counted one.
        unfinished: whether their code leaves masks, which our engine reports as a failure.
    """

    sampler: Sampler
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    output: Callable[[DecodeState], list[int]] = lambda state: state.tokens
    same_windows: bool = True
    project: str | None = None
    unfinished: bool = False


@dataclass(frozen=True)
class Case:
    """One set of settings and its prompts, with what came of each.

    Attributes:
        file: that holds it, below golden/.
        folder: of the checkpoint, below golden/.
        seeded: prompts of the file and method that need the authors' stream of random numbers, which are not run.
        apart: prompts (and rows of a batch) that a test of its own takes care of.
    """

    name: str
    file: str
    folder: str
    settings: Settings
    content: dict[str, Any]
    seeded: int = 0
    apart: frozenset[tuple[int, int]] = frozenset()

    @property
    def batched(self) -> bool:
        """A prompt is a list of rows; counts are of the whole batch in lock-step, and rows stop where others do."""
        return isinstance(self.content["prompts"][0][0], list)

    def without(self, prompt: int, row: int = 0) -> Case:
        return replace(self, apart=self.apart | {(prompt, row)})

    def prompts(self) -> Iterator[Prompt]:
        """Those that bind: stable ones whose code can be reproduced."""
        return (prompt for prompt in self._all() if prompt.place not in self.apart and not self._excused(prompt))

    def not_required(self) -> dict[str, int]:
        """How many do not bind, by reason."""
        reasons = {"unstable": 0, "not reproducible": 0, "with a test of their own": 0}
        for prompt in self._all():
            if reason := self._excused(prompt) or ("with a test of their own" if prompt.place in self.apart else None):
                reasons[reason] += 1
        return reasons

    def _excused(self, prompt: Prompt) -> str | None:
        index = prompt.place[0]
        if not self.content["stable_under_perturbation"][index]:
            return "unstable"
        return None if self.content.get("reproducible", {index: True})[index] else "not reproducible"

    def _all(self) -> Iterator[Prompt]:
        content, count = self.content, len(self.content["prompts"])
        told = (content[name] for name in ("prompts", "output", "forwards"))
        untold = (content.get(name) or [None] * count for name in ("nfe", "forward_lens"))
        for index, (ids, output, forwards, nfe, lens) in enumerate(zip(*told, *untold, strict=True)):
            if self.batched:
                rows = enumerate(zip(ids, output, strict=True))
                yield from (Prompt((index, row), alone, said, None, None, None) for row, (alone, said) in rows)
            else:
                yield Prompt((index, 0), ids, output, forwards, nfe, lens)


@dataclass(frozen=True)
class Prompt:
    place: tuple[int, int]  # in the case, and in a batch
    ids: list[int]
    output: list[int]
    forwards: int | None  # counted
    nfe: int | None  # reported
    lengths: list[int] | None


def cases(family: str, *files: str, model: str = "model") -> list[Any]:
    """Parameters for pytest: every unseeded case of a family's files, whose checkpoint is ``model`` unless they say."""
    found = []
    for file in files:
        path = SHARED / "golden" / family / file
        content = json.loads(path.read_text()) if path.exists() else {"cases": [], "meta": {}}
        folder = (Path(family) / content["meta"].get("model", model).split(" ")[0]).as_posix()
        seeded = Counter[str]()
        for case in content["cases"]:
            seeded[case["settings"]["algo"]] += len(case["prompts"]) if "seed" in case else 0
        for case in content["cases"]:
            if "seed" not in case:
                more = seeded[case["settings"]["algo"]]
                made = Case(case["name"], f"{family}/{file}", folder, case["settings"], case, more)
                found.append(pytest.param(made, id=case["name"]))
    return found


@cache
def _adapter(folder: str, options: str) -> DeviceAdapter:
    place = shared("golden").joinpath(folder).resolve()
    return load(describe(ModelOptions("golden", path=str(place), **json.loads(options))), torch.device("cpu"))


def adapter_of(case: Case, ours: Ours) -> DeviceAdapter:
    return _adapter(case.folder, json.dumps(ours.options, sort_keys=True))


def decode(case: Case, ours: Ours, sampler: Any = None, max_rows: int = 1) -> list[Outcome]:
    """The case's prompts, in order."""
    adapter = adapter_of(case, ours)
    tasks = [Task(i, prompt.ids, ours.length) for i, prompt in enumerate(case.prompts())]
    lengths = [len(t.prompt) + ours.sampler.canvas_length(len(t.prompt), ours.length, adapter.facts) for t in tasks]
    outcomes = Engine(adapter, sampler or ours.sampler, max_rows).decode(tasks, max(lengths, default=1))
    return sorted(outcomes, key=lambda outcome: outcome.task.index)


@dataclass(frozen=True)
class Verdict:
    """Whether a prompt is equal to theirs, part by part; None is what is not compared.

    Attributes:
        tied: its tokens differ by a choice among exactly equal confidences; nothing else is compared then.
    """

    place: tuple[int, int]
    tokens: bool
    tied: bool = False
    forwards: bool | None = None
    lengths: bool | None = None
    reported: bool | None = None

    def fault(self) -> str | None:
        if not (self.tokens or self.tied):
            return "tokens"
        if self.forwards is False:
            return "forwards"
        if self.reported is False:
            return "forwards as they report them"
        return "lengths of forwards" if self.lengths is False else None


def check(case: Case, ours: Ours, max_rows: int = 4, tally: Tally | None = None) -> int:
    """Compare every prompt that binds; returns how many tokens were compared.

    Raises:
        AssertionError: naming the first that differs.
    """
    outcomes, prompts = decode(case, ours, max_rows=max_rows), list(case.prompts())
    verdicts = [judge(case, ours, outcome, prompt) for outcome, prompt in zip(outcomes, prompts, strict=True)]
    if tally is not None:
        told = {"file": case.file, "method": case.settings["algo"], "case": case.name, "max_rows": max_rows}
        batched = len(prompts) if case.batched else 0
        excused = {**case.not_required(), "batched": batched, "seeded": case.seeded}
        tally({**told, "prompts": [asdict(verdict) for verdict in verdicts], "excused": excused})
    for verdict, outcome in zip(verdicts, outcomes, strict=True):
        assert not verdict.fault(), f"prompt {verdict.place}: {verdict.fault()}; {outcome.error}"
    return sum(len(prompt.output) for prompt in prompts)


def judge(case: Case, ours: Ours, outcome: Outcome, prompt: Prompt) -> Verdict:
    if outcome.state is None or (outcome.failure is not None and not ours.unfinished):
        return Verdict(prompt.place, False)
    said, wanted = ours.output(outcome.state), prompt.output
    if case.batched:  # a neighbour may have made their row longer or shorter
        shorter = min(len(said), len(wanted))
        said, wanted = said[:shorter], wanted[:shorter]
    if said != wanted:
        return Verdict(prompt.place, False, tied=chose_among_equals(case, ours, outcome))
    compares = ours.same_windows and prompt.lengths is not None
    return Verdict(
        prompt.place,
        tokens=True,
        forwards=None if prompt.forwards is None else outcome.counts()["nfe"] == prompt.forwards,
        lengths=[run.window for run in outcome.log if run.role is Role.TARGET] == prompt.lengths if compares else None,
        reported=None if prompt.nfe is None else reported(outcome, ours) == prompt.nfe,
    )


def reported(outcome: Outcome, ours: Ours) -> int | None:
    """Our count of forwards by the rules of the case's project; None, which equals nothing, if none is named."""
    assert outcome.state is not None
    return as_counted(Decoded(outcome.log, outcome.state, [])).get(f"nfe_as_{ours.project}")


class _Watching:
    """Decodes as a sampler does and notes whether a step had to leave out a slot as sure as one it took."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.tied = sampler, False
        self.canvas_length, self.spare_slots = sampler.canvas_length, sampler.spare_slots

    def decode(self, state: DecodeState) -> Any:
        inner = self.sampler.decode(state)
        forward = next(inner)
        while True:
            prediction: Prediction = yield forward
            masked = [i for i in prediction.positions if state.mask[i]]
            try:
                forward = inner.send(prediction)
            except StopIteration:
                return
            finally:
                taken = {prediction.confidence[i] for i in masked if not state.mask[i]}
                self.tied |= any(prediction.confidence[i] in taken for i in masked if state.mask[i])


def chose_among_equals(case: Case, ours: Ours, outcome: Outcome) -> bool:
    """A choice among exactly equal confidences is ours to make: the lowest position, theirs is undefined."""
    watching = _Watching(ours.sampler)
    engine = Engine(adapter_of(case, ours), watching, max_rows=1)  # type: ignore[arg-type]
    list(engine.decode([outcome.task], len(outcome.state.tokens) if outcome.state else 1))
    return watching.tied
