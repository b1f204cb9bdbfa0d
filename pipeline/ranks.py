"""Several processes started from outside (torchrun): who is who, and agreeing on one folder.

Without such a launcher there is one process, rank 0; the processes that Lightning spawns never get here.
"""

from __future__ import annotations

import os
from pathlib import Path


def world() -> tuple[int, int]:
    """(rank, number of processes) as torchrun set them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def nodes() -> int:
    """Machines taking part."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) if world()[1] > 1 else 1


def agree(folder: Path | None) -> Path:
    """The first rank's folder, on every rank; the others give None."""
    if world()[1] == 1:
        assert folder is not None
        return folder
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    box = [folder]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def barrier() -> None:
    """Wait for all ranks."""
    if world()[1] > 1:
        import torch.distributed as dist

        dist.barrier()
