"""What all adapters share: only changes go up, only wanted rows are read, in one transfer."""

from __future__ import annotations

import pytest
import torch

from adapters.base import Request
from samplers import Forward
from tests.forwards import ids, logits, placed, request
from tests.models import random_llama


def test_stale_ids_behind_a_shorter_row_are_never_run() -> None:
    adapter = random_llama()
    placed(adapter, ids(30, 1), ids(12, 3))
    adapter.place(0, ids(10, 2), 0)
    group = [request(0, range(10)), request(1, range(12))]
    reused = logits(adapter, *group)
    placed(adapter, ids(10, 2), ids(12, 3))
    assert all(torch.equal(a, b) for a, b in zip(reused, logits(adapter, *group)))


def test_changes_reach_the_device_whatever_their_number_and_order() -> None:
    adapter, tokens = random_llama(), ids(12, 1)
    placed(adapter, tokens)
    adapter.forward([request(0, range(12), {3: 7, 5: 9})])
    changed = Request(0, Forward(range(12), [0]), [2, 4, 2], [8, 8, 8])  # a slot decided twice in one tick
    adapter.forward([changed])
    assert adapter.canvas[0, :12].tolist() == [*tokens[:2], 8, 7, 8, 9, *tokens[6:]]


def test_only_wanted_rows_reach_the_head_and_one_transfer_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, rows, transfers = placed(random_llama(), ids(16, 1), ids(14, 2), ids(16, 3)), [], []
    adapter.head_module.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape))
    for name in ("tolist", "item", "cpu", "__bool__"):
        own = getattr(torch.Tensor, name)
        spy = lambda self, *a, own=own, name=name: (transfers.append(name), own(self, *a))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, spy)
    wants = [[9, 3, 12], [], range(4, 8)]
    requests = [Request(i, Forward(range(14), want, ask=frozenset({"margin"})), [], []) for i, want in enumerate(wants)]
    predictions = adapter.forward(requests)
    assert rows == [(7, 32)] and transfers == ["tolist"]
    for prediction, want in zip(predictions, wants):
        assert list(prediction.positions) == list(want) == list(prediction.token) == list(prediction.confidence)
        assert prediction.finite and prediction.margin is not None and list(prediction.margin) == list(want)
    silent = [Request(i, Forward(range(14), store=range(14)), [], []) for i in range(3)]
    assert all(not prediction.token for prediction in adapter.forward(silent))
    context = [Request(i, Forward(range(14, 16), [14], context=range(14)), [], []) for i in (0, 2)]
    adapter.forward(context)
    assert len(rows) == 2 and transfers == ["tolist"] * 2
