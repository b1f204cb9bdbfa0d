"""``python -m pipeline.check sampler=mine --config-dir my_conf``: what must be true of any sampler, of yours.

It decodes on small random networks of every kind the sampler accepts, without a model, in seconds. Exit code 0 if all
holds, 1 if something does not: then the smallest example found is told in words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pipeline.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pipeline.conformance import Property, Trial

WIDTH = 100
SEEDS = (0, 1)
BLOCK_SIZES = (4, 3)


@dataclass
class Finding:
    """A property, how often it was looked at, and the smallest example against it."""

    words: str
    looked_at: int
    example: str | None = None
    hidden: int = 0  # cases that broke before anything of the property could be seen

    @property
    def verdict(self) -> str:
        if self.example or self.looked_at:
            return "failed" if self.example else "held"
        return "not looked at" if self.hidden else "does not apply"


def check(options: dict[str, Any]) -> list[Finding]:
    """Look at a sampler, given the ``sampler`` part of a configuration.

    Raises:
        UserError: if no kind of model is one it accepts, with what it says of one of them.
    """
    from pipeline.conformance import PROPERTIES

    trials = list(_trials(options))
    return [_finding(prop, trials) for prop in PROPERTIES]


def _trials(options: dict[str, Any]) -> Iterator[Trial]:
    from pipeline.conformance import MODELS, Trial, accepted, situations

    found = [Trial(options, at) for model in MODELS for size in BLOCK_SIZES for at in situations(model, size, SEEDS)]
    usable = [trial for trial in found if accepted(trial)]
    if not usable:
        found[0].settings()  # says why not
    yield from usable


def _finding(prop: Property, trials: list[Trial]) -> Finding:
    from pipeline.conformance import BrokenError, ends, fault_of, smallest

    finding = Finding(prop.words, 0)
    for trial in trials:
        if trial.broken and prop.fault is not ends:
            finding.hidden += 1
            continue
        try:
            finding.looked_at += prop.applies(trial)
        except BrokenError:
            finding.looked_at += 1
        if fault_of(prop, trial):
            trial = smallest(prop, trial)
            finding.example = f"{trial.words()}: {fault_of(prop, trial)}"
            break
    return finding


def _print(name: str, findings: list[Finding]) -> None:
    console = Console(width=WIDTH, markup=False, highlight=False)
    table = Table(title=f"sampler={name}", title_justify="left", box=None, pad_edge=False)
    table.add_column("property")
    table.add_column("")
    table.add_column("cases", justify="right")
    for finding in findings:
        table.add_row(finding.words, finding.verdict, str(finding.looked_at) if finding.looked_at else "")
    console.print(table)
    for finding in findings:
        if finding.example:
            console.print(f"\n{finding.words}: failed with\n  {finding.example}", soft_wrap=True)


def _look(cfg: DictConfig, overrides: list[str]) -> None:
    from pipeline.config import plain
    from pipeline.overrides import keys

    other = [key for key in keys(overrides) if key.partition(".")[0] != "sampler"]
    if other:
        raise UserError(f"{other[0]} is no option of pipeline.check: it takes sampler=… and sampler's options")
    findings = check(plain(cfg.sampler))
    _print(cfg.sampler.name, findings)
    if any(finding.example for finding in findings):
        sys.exit(1)


def main() -> None:
    from pipeline.cli import looking

    looking(_look)


if __name__ == "__main__":
    main()
