"""``python -m pipeline.bench host``: what the engine itself costs, with a model that answers at once.

Figures are microseconds of host time a row and tick. The first table holds sampler, grouping, billing and the hand-over
of canvas changes; the second also what every adapter does around its network, on this machine's CPU: canvas update,
packing, read-out over a small vocabulary, splitting. There tensor work counts too, which on a GPU is not the host's:
gathering a window's ids is all that grows with the canvas.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from adapters.base import DeviceAdapter, Group, MaskedLMAdapter, Request
from adapters.text import IdCodec, TextCodec
from pipeline.engine import Engine, Task
from samplers import ModelFacts, Prediction, ThresholdSampler

if TYPE_CHECKING:
    import torch

ROWS, CANVASES, BLOCK, PROMPT, ROUNDS = (1, 16, 64), (64, 256, 1024), 32, 16, 5
FACTS = ModelFacts(vocab_size=128, mask_id=0, end_ids=frozenset({2}))


class InstantAdapter:
    """Answers every request with the same token, sure of the first wanted slot only: one token a forward."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.codec: TextCodec = IdCodec(FACTS.vocab_size)

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


class ConstantAdapter(DeviceAdapter):
    """A network whose last hidden states, and so its logits, are one constant: all around it is the adapters' own."""

    def __init__(self) -> None:
        import torch

        super().__init__(FACTS, IdCodec(FACTS.vocab_size), torch.device("cpu"))
        self.constant = torch.zeros(1, 1, FACTS.vocab_size)

    def hidden(self, group: Group) -> torch.Tensor:
        return self.constant.expand(*group.ids.shape, -1)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


def host(
    rows: int, canvas: int, adapter: Callable[[], MaskedLMAdapter] = InstantAdapter, rounds: int = ROUNDS
) -> float:
    """Microseconds a row and tick at ``rows`` in flight, in the quickest round: others share the machine."""
    engine = Engine(adapter(), ThresholdSampler(block_size=BLOCK, steps=canvas), max_rows=rows)
    tasks = [Task(i, [5] * PROMPT, canvas) for i in range(rows)]
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        forwards = sum(len(outcome.log) for outcome in engine.decode(tasks, PROMPT + canvas))
        seconds.append((time.perf_counter() - began) / forwards)
    return min(seconds) * 1e6


def print_host() -> None:
    _print_table("engine and sampler alone", InstantAdapter)
    _print_table("with an adapter around a constant network", ConstantAdapter)


def _print_table(title: str, adapter: Callable[[], MaskedLMAdapter]) -> None:
    from rich.table import Table

    from pipeline.table import console

    table = Table(title=f"host time a row and tick, µs, block {BLOCK}: {title}", title_justify="left")
    for name in ("rows in flight", *(f"canvas {canvas}" for canvas in CANVASES), "longest / shortest canvas"):
        table.add_column(name, justify="right")
    for rows in ROWS:
        figures = [host(rows, canvas, adapter) for canvas in CANVASES]
        table.add_row(str(rows), *(f"{figure:.1f}" for figure in figures), f"{figures[-1] / figures[0]:.2f}")
    console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.bench", description=__doc__)
    parser.add_argument("what", choices=["host"], help="host: the engine's own cost")
    parser.parse_args()
    print_host()


if __name__ == "__main__":
    main()
