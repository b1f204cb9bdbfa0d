"""Keeping other libraries off the user's screen."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Keep other libraries' chatter off the user's screen; their warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it names the processes it ends
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*treespec.*")
    warnings.filterwarnings("ignore", message=".*predict returned None.*")
    warnings.filterwarnings("ignore", message=".*dataloader_iter.*")
    warnings.filterwarnings("ignore", message=".*across ranks is zero.*")
