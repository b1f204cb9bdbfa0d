"""What ran and where: versions, checkout, machine and the command that runs it again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("blockdiff", "torch", "transformers", "lightning", "hydra-core", "omegaconf", "numpy", "wandb")


def environment(command: list[str]) -> dict[str, Any]:
    """What environment.json holds: versions, the checkout's commit and changes, the machine, the command to rerun.

    ``command`` is an argument list (``["python", "-m", "pipeline", *overrides]``); it is stored quoted for a shell.
    Nothing heavy is imported: the GPU's name is known only where torch already is.
    """
    root = Path(__file__).resolve().parents[1]
    checkout = _git(root, "rev-parse", "--show-toplevel") == str(root)  # an installed copy may lie in a foreign one
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {
        "command": shlex.join(command),
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
        "git_commit": _git(root, "rev-parse", "--verify", "HEAD") if checkout else None,
        "git_diff": _git(root, "diff", "HEAD") if checkout else None,
        "git_untracked": _git(root, "ls-files", "--others", "--exclude-standard") if checkout else None,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "gpu": gpu,
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode("utf-8", "replace").strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
