"""The command line as it was given: overrides, the user's folder of options, and the command that reruns a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
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


def open_options(words: list[str]) -> list[str]:
    """A sweep's words, with options of one sampler's own let in for the others, which then drop them.

    ``-m sampler=mine,threshold sampler.least=1,2`` becomes ``… ++sampler.least=1,2`` if ``mine`` has that option.
    """
    from pipeline.config import SamplerOptions

    if not {"-m", "--multirun"} & set(words):
        return words
    common = {f"sampler.{entry.name}" for entry in fields(SamplerOptions)}
    foreign = {word.partition("=")[0] for word in words if word.startswith("sampler.")} - common
    own = {key for key in foreign if _some_sampler_has(key.removeprefix("sampler."), words)}
    return [f"++{word}" if word.partition("=")[0] in own else word for word in words]


def _some_sampler_has(option: str, words: list[str]) -> bool:
    from pipeline.compose import compose

    chosen = next((word.partition("=")[2] for word in words if word.startswith("sampler=")), "")
    for name in filter(None, chosen.split(",")):
        try:
            if option in compose([f"sampler={name}"], next(config_dirs(words), None)).sampler:
                return True
        except Exception:  # what is wrong with it is told when the sweep is composed
            return False
    return False


def keys(overrides: list[str]) -> list[str]:
    """What a command line sets: ``sampler.threshold`` of ``sampler.threshold=0.5``."""
    return [override.lstrip("+~").split("=")[0] for override in overrides]


def raw(overrides: Any) -> list[str]:
    """Overrides as they were given: Hydra keeps them in a list that would resolve their interpolations."""
    return OmegaConf.to_container(overrides, resolve=False)  # type: ignore[return-value]
