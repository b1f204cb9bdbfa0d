"""Where the shared test data lies: ``BLOCKDIFF_SHARED``, else the folder ``shared`` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("BLOCKDIFF_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def shared(*parts: str) -> Path:
    """A path inside the shared data; without it the calling test is skipped, or fails where the variable is set."""
    path = Path(SHARED, *parts)
    if not path.exists() and "BLOCKDIFF_SHARED" in os.environ:
        pytest.fail(f"BLOCKDIFF_SHARED is set, but {'/'.join(parts)} is not there")
    if not path.exists():
        pytest.skip(f"shared data {'/'.join(parts)} is absent: set BLOCKDIFF_SHARED")
    return path
