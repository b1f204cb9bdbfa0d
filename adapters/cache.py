"""Keys and values of all rows in flight, filed by row and slot.

Shapes: R rows, S slots, B rows of a group, H key heads, W slots of the window, D head size.
"""

from __future__ import annotations

import torch


class KeyValueStore:
    """One preallocated pair of tensors (R, H, S + 1, D) a layer, written in place; slot S takes what padding writes.

    transformers' attention layers see it through `update`; what it does there is set by `aim` before each forward.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def aim(self, rows: torch.Tensor, positions: torch.Tensor, written: bool, reach: int, leading: bool) -> None:
        """Say what the next forward does.

        Args:
            rows: (B,) rows of the group.
            positions: (B, W) slots to which the windows' keys go, S for padding.
            written: whether the window's keys are stored; if not they are appended behind the cached ones.
            reach: cached slots read, from slot 0.
            leading: whether ``rows`` are 0..B-1, so that reading is a view.
        """
        self._rows, self._positions, self._written = rows, positions, written
        self._reach, self._leading = reach, leading

    @torch.inference_mode()
    def forget(self, row: int) -> None:
        """Clear a row for a new sequence: hidden slots still enter the sums, times 0, and must be finite for that."""
        for held in self.layers.values():
            for tensor in held:
                tensor[row].zero_()

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, W, D) of the window in, those to attend to out (B, H, reach [+ W], D)."""
        store = self._layer(layer, keys)
        if self._written:
            for held, new in zip(store, (keys, values), strict=True):
                held[self._rows[:, None], :, self._positions] = new.transpose(1, 2)
        if self._reach == 0:  # nothing cached is visible: the window attends to itself
            return keys, values
        cached = tuple(self._read(held) for held in store)
        if self._written:
            return cached[0], cached[1]
        return torch.cat((cached[0], keys), 2), torch.cat((cached[1], values), 2)

    def _layer(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            shape = (self.rows, like.shape[1], self.slots + 1, like.shape[3])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    def _read(self, held: torch.Tensor) -> torch.Tensor:
        if self._leading:
            return held[: len(self._rows), :, : self._reach]
        return held[self._rows, :, : self._reach]
