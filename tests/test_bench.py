"""The bench gives figures; what they are is the machine's affair."""

from __future__ import annotations

import pytest

from pipeline import bench
from pipeline.engine import Engine, Task
from samplers import ThresholdSampler


@pytest.mark.parametrize("adapter", [bench.InstantAdapter, bench.ConstantAdapter])
def test_a_host_figure_is_a_positive_time_of_one_token_a_forward(adapter: type) -> None:
    sampler = ThresholdSampler(block_size=bench.BLOCK, steps=64)
    for outcome in Engine(adapter(), sampler, max_rows=2).decode([Task(i, [5], 64) for i in range(3)], 65):
        assert outcome.counts()["nfe"] == 64 and outcome.failure is None
    assert bench.host(2, 64, adapter, rounds=1) > 0


def test_both_tables_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ROWS", (1, 2))
    monkeypatch.setattr(bench, "CANVASES", (32, 64))
    monkeypatch.setattr("sys.argv", ["bench", "host"])
    bench.main()
    printed = capsys.readouterr().out
    assert printed.count("rows in flight") == 2 and printed.count("canvas 64") == 2
