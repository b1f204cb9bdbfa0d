"""Tables at the end of a test run, from what the tests left in their reports: so it's the same in several processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DIFFERENCE, CASE = "largest_difference", "golden_case"  # names of the properties

HEAD = ("cases file", "method", "cases", "prompts", "tokens", "forwards", "lengths", "own count", "not required")


def told(reports: Iterable[Any], name: str) -> Iterator[Any]:
    """Values of a property in the reports of tests that ran."""
    for report in reports:
        if getattr(report, "when", None) == "call":
            yield from (value for found, value in report.user_properties if found == name)


def differences(noted: Iterable[tuple[str, str, float]]) -> list[str]:
    """The largest of each family, over tensors told as (family, name, difference)."""
    largest: dict[tuple[str, str], float] = {}
    for family, name, difference in noted:
        largest[family, name] = max(difference, largest.get((family, name), 0.0))
    lines = []
    for family in sorted({family for family, _ in largest}):
        worst, name = max((difference, name) for (of, name), difference in largest.items() if of == family)
        checked = sum(of == family for of, _ in largest)
        lines.append(f"{family:<16} {worst:.2e}  ({name}; {checked} tensors)")
    return lines


@dataclass
class Group:
    """Cases of one file and one method.

    Attributes:
        prompts: by case and place, everything that was said of them, once for each number of rows in flight.
        excused: by reason and case, the largest number that was told.
    """

    prompts: dict[Any, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    excused: dict[tuple[str, str], int] = field(default_factory=dict)
    cases: set[str] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)

    def add(self, entry: dict[str, Any]) -> None:
        self.cases.add(entry["case"])
        self.rows.add(entry["max_rows"])
        for verdict in entry["prompts"]:
            self.prompts[entry["case"], *verdict["place"]].append(verdict)
        for reason, count in entry["excused"].items():
            key = reason, "" if reason == "seeded" else entry["case"]  # these are told of all cases at once
            self.excused[key] = max(count, self.excused.get(key, 0))

    def equal(self, part: str) -> tuple[int, int]:
        """Prompts equal in every run, and those compared."""
        said = [[verdict[part] for verdict in verdicts] for verdicts in self.prompts.values()]
        compared = [values for values in said if any(value is not None for value in values)]
        return sum(all(value is not False for value in values) for values in compared), len(compared)

    def reasons(self) -> dict[str, int]:
        summed: dict[str, int] = defaultdict(int)
        for (reason, _), count in self.excused.items():
            summed[reason] += count
        summed["tied"] = sum(any(verdict["tied"] for verdict in verdicts) for verdicts in self.prompts.values())
        return {reason: count for reason, count in summed.items() if count}


def golden(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of the table of golden cases: one for each file and method, and their sum."""
    groups: dict[tuple[str, str], Group] = defaultdict(Group)
    for entry in entries:
        groups[entry["file"], entry["method"]].add(entry)
    if not groups:
        return []
    table = [HEAD, *(_line(file, method, [groups[file, method]]) for file, method in sorted(groups))]
    table.append(_line("all", "", list(groups.values())))
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD))]
    rows = sorted(set().union(*(group.rows for group in groups.values())))
    return [
        *("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table),
        f"equal/compared prompts, equal at max_rows={' and '.join(map(str, rows))}; "
        "own count: forwards as the authors' code reports them",
        "not required: tied = tokens differ by a choice among exactly equal confidences; batched = rows of which only "
        "tokens are compared; the others are not compared",
    ]


def _line(file: str, method: str, groups: list[Group]) -> tuple[str, ...]:
    cells = []
    for part in ("tokens", "forwards", "lengths", "reported"):
        equal, compared = (sum(counts) for counts in zip(*(group.equal(part) for group in groups), strict=True))
        cells.append(f"{equal}/{compared}" if compared else "-")
    reasons: dict[str, int] = defaultdict(int)
    for group in groups:
        for reason, count in group.reasons().items():
            reasons[reason] += count
    cases, prompts = (str(sum(len(held) for held in each)) for each in zip(*((g.cases, g.prompts) for g in groups)))
    return file, method, cases, prompts, *cells, ", ".join(f"{count} {reason}" for reason, count in reasons.items())
