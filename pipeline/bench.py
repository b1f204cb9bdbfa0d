"""``python -m pipeline.bench host``: what the engine itself costs, with a model that answers at once.

Figures are microseconds of host time a row and tick: sampler, grouping, billing and the hand-over of canvas changes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from adapters.base import Request
from adapters.text import IdCodec, TextCodec
from pipeline.engine import Engine, Task
from samplers import ModelFacts, Prediction, ThresholdSampler

ROWS, CANVASES, BLOCK = (1, 16, 64), (64, 256, 1024), 32


class InstantAdapter:
    """Answers every request with the same token, sure of the first wanted slot only: one token a forward."""

    def __init__(self) -> None:
        self.facts = ModelFacts(vocab_size=128, mask_id=0, end_ids=frozenset({2}))
        self.codec: TextCodec = IdCodec(128)

    def open(self, rows: int, slots: int) -> None:
        """Nothing to reserve."""

    def place(self, row: int, tokens: Sequence[int], stream: int) -> None:
        """Nothing to keep."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def forward(self, requests: Sequence[Request]) -> list[Prediction]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Prediction:
        want = request.forward.want
        return Prediction(want, dict.fromkeys(want, 7), dict.fromkeys(want, 0.5))


def host(rows: int, canvas: int, sequences: int | None = None) -> float:
    """Median over rounds of the microseconds a row and tick at ``rows`` in flight."""
    sampler = ThresholdSampler(block_size=BLOCK, steps=canvas)
    engine = Engine(InstantAdapter(), sampler, max_rows=rows)
    tasks = [Task(i, [5] * 16, canvas) for i in range(sequences or rows)]
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        forwards = sum(len(outcome.log) for outcome in engine.decode(tasks, 16 + canvas))
        rounds.append((time.perf_counter() - began) / forwards)
    return statistics.median(rounds) * 1e6


def print_host() -> None:
    from rich.table import Table

    from pipeline.table import console

    table = Table(title=f"host time a row and tick, µs (block {BLOCK})", title_justify="left")
    for name in ("rows in flight", *(f"canvas {canvas}" for canvas in CANVASES), "longest / shortest canvas"):
        table.add_column(name, justify="right")
    for rows in ROWS:
        figures = [host(rows, canvas) for canvas in CANVASES]
        table.add_row(str(rows), *(f"{figure:.1f}" for figure in figures), f"{figures[-1] / figures[0]:.2f}")
    console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench", description=__doc__)
    parser.add_argument("what", choices=["host"], help="host: the engine's own cost")
    parser.parse_args()
    print_host()


if __name__ == "__main__":
    main()
