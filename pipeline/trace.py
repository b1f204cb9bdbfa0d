"""``python -m pipeline.trace <run folder> --sample <id>``: play how a sample was decoded, forward by forward.

In the terminal, and as a page of its own, ``trace/<index>.html`` in the run's folder. Without ``--sample``: the samples
that have a trace.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.errors import UserError
from pipeline.trace_page import write_page
from pipeline.traces import HOW, Slot, Trace, find_trace, find_traces, kind_of, read_trace

UNDECIDED, WIDTH = "·", 110
UNSURE, SURE = (235, 120, 40), (70, 190, 235)  # confidence 0 and 1
CHANGES = {"committed": "bold", "revised": "bold reverse magenta", "remasked": "bold reverse red"}


def visible_text(text: str | None) -> str:
    """A token's text on one line, with signs for what cannot be seen."""
    if text is None:
        return UNDECIDED
    shown = text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥").strip(" ")
    return "".join(sign if sign.isprintable() else "�" for sign in shown) or "␣"


def colour(confidence: float) -> str:
    """As a style: from orange (unsure) to blue (sure)."""
    share = min(1.0, max(0.0, confidence))
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in zip(UNSURE, SURE))


class Player:
    """A trace as something to look at, step by step; step 0 is before the first forward."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.frames = list(trace.frames())
        texts = ([visible_text(frame[place].text) for frame in self.frames] for place in range(len(trace.canvas)))
        self.widths = [max(map(len, of_slot)) for of_slot in texts]  # each slot keeps its place through all steps

    @property
    def steps(self) -> int:
        return len(self.trace.forwards)

    def frame(self, step: int) -> Group:
        """One screen."""
        header = self.trace.header
        title = Text(f"{header['method'] or header['sampler']} · {header['model']} · {header['id']}", "bold")
        prompt = Text(visible_text(header["prompt_text"]), "dim")
        return Group(title, prompt, Text(), self.canvas(step), Text(), Text(self.told(step)), self._legend())

    def canvas(self, step: int) -> Text:
        """The canvas, a line a block; slots of the window underlined."""
        first, window = self.trace.canvas.start, range(*self.trace.forwards[step - 1]["window"]) if step else range(0)
        edges = {start - first for start, _ in self.trace.header["blocks"]}
        text = Text()
        for place, slot in enumerate(self.frames[step]):
            if place in edges and place:
                text.append("\n")
            style = f"{_style(slot)} underline" if place + first in window else _style(slot)
            text.append(visible_text(slot.text).center(self.widths[place]), style)
            text.append(" ")
        return text

    def told(self, step: int) -> str:
        """The line below: which forward this is, where it ran and what it changed."""
        decided = sum(slot.text is not None for slot in self.frames[step])
        state = f"{decided} of {len(self.frames[step])} decided"
        if not step:
            return f"forward 0/{self.steps}  {state}"
        record = self.trace.forwards[step - 1]
        changes = ", ".join(f"{len(record[how])} {how}" for how in HOW if record[how]) or "nothing changed"
        if record.get("proposed"):
            changes = f"accepted {record['accepted']} of {record['proposed']} drafts, {changes}"
        (low, high), (start, stop) = record["window"], record["cached"]
        context = f"  context {start}–{stop}" if stop > start else ""
        return f"forward {step}/{self.steps}  {kind_of(record)}  window {low}–{high}{context}  {changes}  {state}"

    def _legend(self) -> Text:
        text = Text("unsure ", "dim")
        for tenth in range(11):
            text.append("█", colour(tenth / 10))
        text.append(" sure   underlined: window   ", "dim")
        for how in ("revised", "remasked"):
            text.append(f" {how} ", CHANGES[how]).append(" ")
        return text

    def play(self, console: Console, speed: float) -> None:
        """All steps, ``speed`` a second; the last one stays."""
        with Live(self.frame(0), console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for step in range(1, self.steps + 1):
                time.sleep(1 / speed)
                live.update(self.frame(step), refresh=True)


def _style(slot: Slot) -> str:
    if slot.change in ("revised", "remasked"):
        return CHANGES[slot.change]
    if slot.text is None:
        return "dim"
    return f"{CHANGES['committed']} reverse {colour(slot.confidence)}" if slot.change else colour(slot.confidence)


def list_traces(folder: Path) -> tuple[Table, list[UserError]]:
    """The traced samples of a run, one a line, and what is wrong with those that are damaged.

    Raises:
        UserError: if there is none.
    """
    table, damages = Table("sample", "forwards", *HOW, "file", box=None, pad_edge=False), []
    for path in find_traces(folder):
        try:
            trace = read_trace(path)
        except UserError as error:
            damages.append(error)
            continue
        counts = trace.counts()
        figures = [str(len(trace.forwards)), *(str(counts[how]) for how in HOW)]
        table.add_row(Text(trace.id), *figures, Text(str(path)))
    return table, damages


def show(console: Console, trace: Trace, step: int | None, speed: float) -> None:
    """Play a trace in a terminal; elsewhere, or with ``step``, print one step, by default the last.

    Raises:
        UserError: for a step that there is not.
    """
    player = Player(trace)
    if step is not None and not 0 <= step <= player.steps:
        raise UserError(f"--step {step} is out of range: this trace has the steps 0 to {player.steps}")
    if console.is_terminal and step is None:
        player.play(console, speed)
    else:
        console.print(player.frame(player.steps if step is None else step))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipeline.trace", description=__doc__.partition(": ")[2])
    parser.add_argument("run", type=Path, help="a run's folder, decoded with engine.trace=true")
    parser.add_argument("--sample", help="id of the sample, or its number in the dataset")
    parser.add_argument("--speed", type=float, default=6.0, help="forwards a second (6)")
    parser.add_argument("--step", type=int, help="print the canvas after this forward instead of playing all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 for bad input."""
    given = _arguments(arguments)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    try:
        if not 0 < given.speed < float("inf"):
            raise UserError(f"--speed {given.speed} is out of range: use a number above 0, forwards a second")
        if given.sample is None:
            return _list(console, given.run)
        trace = find_trace(given.run, given.sample)
        show(console, trace, given.step, given.speed)
        print(f"page: {write_page(trace)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _list(console: Console, folder: Path) -> int:
    table, damages = list_traces(folder)
    console.print(table)
    for error in damages:
        print(f"error: {error}", file=sys.stderr)
    return 2 if damages else 0


if __name__ == "__main__":
    sys.exit(main())
