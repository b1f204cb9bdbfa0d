"""The command line as it was given: overrides, the user's folder of options, and the command that reruns a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf


def config_dirs(words: list[str]) -> Iterator[str]:
    """The user's folder of options as the command line names it."""
    for word, following in zip(words, [*words[1:], ""]):
        if word in ("--config-dir", "-cd"):
            yield following
        elif word.startswith("--config-dir="):
            yield word.partition("=")[2]


def config_dir() -> str | None:
    """``--config-dir`` of the running command, relative to the current folder where it lies below it."""
    return next((short(source.path) for source in _sources() if source.provider == "command-line"), None)


def command_of(overrides: list[str], multirun: bool = False) -> list[str]:
    """The command that reruns a job: with the user's ``--config-dir``, as Hydra read it."""
    folder = config_dir()
    extra = [*(["--config-dir", folder] if folder else []), *(["-m"] if multirun else [])]
    return ["python", "-m", "pipeline", *extra, *overrides]


def _sources() -> list[Any]:
    return list(HydraConfig.get().runtime.config_sources)


def short(path: str) -> str:
    """A path relative to the current folder, if it lies below it."""
    below = Path(path).is_relative_to(Path.cwd())
    return str(Path(path).relative_to(Path.cwd())) if below else path


def keys(overrides: list[str]) -> list[str]:
    """What a command line sets: ``sampler.threshold`` of ``sampler.threshold=0.5``."""
    return [override.lstrip("+~").split("=")[0] for override in overrides]


def raw(overrides: Any) -> list[str]:
    """Overrides as they were given: Hydra keeps them in a list that would resolve their interpolations."""
    return OmegaConf.to_container(overrides, resolve=False)  # type: ignore[return-value]
