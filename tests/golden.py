"""Outputs of the authors' own decoders: cases are found in files, run with our samplers, and compared prompt by prompt.

A test module says which files it takes and how their settings read in our words; the rest is here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import DeviceAdapter
from adapters.description import describe
from adapters.loading import load
from adapters.places import ModelOptions
from pipeline.engine import Engine, Outcome, Task
from samplers import DecodeState, Prediction, Sampler
from tests.shared import SHARED, shared

Settings = dict[str, Any]


@dataclass(frozen=True)
class Ours:
    """A case in our words.

    Attributes:
        length: tokens asked for.
        options: of the model, such as the end ids that the case's code has in it.
        output: what the authors' code returns of the decoded row.
        same_windows: whether our forwards are cut as theirs, so that their lengths can be compared.
        reported: what their code reports as its number of forwards, where that is not what was counted.
        unfinished: whether their code leaves masks, which our engine reports as a failure.
    """

    sampler: Sampler
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    output: Callable[[DecodeState], list[int]] = lambda state: state.tokens
    same_windows: bool = True
    reported: Callable[[Outcome], int] = lambda outcome: outcome.counts()["nfe"]
    unfinished: bool = False


@dataclass(frozen=True)
class Case:
    """One set of settings and its prompts, with what came of each."""

    name: str
    folder: str  # of the checkpoint, below golden/
    settings: Settings
    content: dict[str, Any]

    @property
    def batched(self) -> bool:
        """A prompt is a list of rows; counts are of the whole batch in lock-step, and rows stop where others do."""
        return isinstance(self.content["prompts"][0][0], list)

    def prompts(self) -> Iterator[Prompt]:
        """Those that bind: stable ones whose code can be reproduced."""
        content, count = self.content, len(self.content["prompts"])
        told = (content[name] for name in ("stable_under_perturbation", "prompts", "output", "forwards"))
        untold = (content.get(name) or [None] * count for name in ("nfe", "forward_lens"))
        repeatable = content.get("reproducible", [True] * count)  # by prompt, where it is said at all
        for stable, prompt, output, forwards, nfe, lens, repeats in zip(*told, *untold, repeatable, strict=True):
            if not (stable and repeats):
                continue
            if self.batched:
                yield from (Prompt(row, said, None, None, None) for row, said in zip(prompt, output, strict=True))
            else:
                yield Prompt(prompt, output, forwards, nfe, lens)


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    output: list[int]
    forwards: int | None  # counted
    nfe: int | None  # reported
    lengths: list[int] | None


def cases(family: str, *files: str) -> list[Any]:
    """Parameters for pytest: every unseeded case of a family's files."""
    found = []
    for file in files:
        path = SHARED / "golden" / family / file
        content = json.loads(path.read_text()) if path.exists() else {"cases": [], "meta": {}}
        model = content["meta"].get("model", "model").split(" ")[0]
        for case in content["cases"]:
            if "seed" not in case:
                folder = str((Path(family) / model).as_posix())
                found.append(pytest.param(Case(case["name"], folder, case["settings"], case), id=case["name"]))
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


def check(case: Case, ours: Ours, max_rows: int = 4) -> int:
    """Compare every prompt that binds; returns how many tokens were compared.

    Raises:
        AssertionError: naming the first that differs.
    """
    compared = 0
    for outcome, prompt in zip(decode(case, ours, max_rows=max_rows), case.prompts(), strict=True):
        where = f"prompt {outcome.task.index}"
        assert outcome.state is not None and (outcome.failure is None or ours.unfinished), f"{where}: {outcome.error}"
        compared += len(prompt.output)
        said = ours.output(outcome.state)
        if case.batched:  # a neighbour may have made their row longer or shorter
            shorter = min(len(said), len(prompt.output))
            said, wanted = said[:shorter], prompt.output[:shorter]
        else:
            wanted = prompt.output
        if said != wanted and chose_among_equals(case, ours, outcome):
            continue
        assert said == wanted, f"{where}: tokens"
        assert prompt.forwards is None or outcome.counts()["nfe"] == prompt.forwards, f"{where}: forwards"
        assert prompt.nfe is None or ours.reported(outcome) == prompt.nfe, f"{where}: forwards as they report them"
        if ours.same_windows and prompt.lengths is not None:
            assert [run.window for run in outcome.log] == prompt.lengths, f"{where}: lengths of forwards"
    return compared


class _Watching:
    """Decodes as a sampler does and notes whether a step had to leave out a slot as sure as one it took."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.tied, self.canvas_length = sampler, False, sampler.canvas_length

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
