"""The command line as it was given: overrides, the user's folder of options, and the command that reruns a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import UserError, in_words


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


def flags_first(words: list[str]) -> list[str]:
    """A command line with its flags before its overrides: Hydra takes no override behind a flag that follows one.

    Raises:
        UserError: for a flag that there is not, or one without its value.
    """
    actions = get_args_parser()._option_string_actions  # there is no public way to ask for them
    flags: list[str] = []
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, equals, _ = word.partition("=")
        if not re.match(r"--?[a-z]", word):
            rest.append(word)
            continue
        full = name if name in actions else next((flag for flag in sorted(actions) if flag.startswith(name)), None)
        if full is None or (full != name and not name.startswith("--")):
            raise UserError(f"{word} is no flag: the flags are {', '.join(f for f in actions if f.startswith('--'))}")
        flags.append(word)
        if actions[full].nargs is None and not equals:
            if (value := next(waiting, None)) is None:
                raise UserError(f"{word} lacks its value: write {word} and what it shall be")
            flags.append(value)
    return [*flags, *rest]


def refuse_wrong_types(words: Sequence[str]) -> None:
    """Refuse values of a wrong type, all of them at once: in a sweep Hydra names the first and runs nothing.

    Raises:
        UserError: naming each.
    """
    from pipeline.config import SamplerOptions, typed

    nodes = typed(SamplerOptions)
    wrong = []
    for key, value in _given(words):
        node = nodes.get(key.removeprefix("sampler.")) if key.startswith("sampler.") else None
        if node is None or (isinstance(value, str) and "${" in value):
            continue
        try:
            DictConfig({"value": node})["value"] = value
        except OmegaConfBaseException as error:
            wrong.append(f"{key}={value} does not fit: {in_words(str(error).splitlines()[0])}")
    if wrong:
        raise UserError("; ".join(dict.fromkeys(wrong)))


def _given(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a command line, those of a sweep one by one; what cannot be read is left to Hydra."""
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
            if not override.is_sweep_override():
                yield override.key_or_group, override.value()
                continue
            for choice in override.sweep_string_iterator():
                yield override.key_or_group, parser.parse_override(f"{override.key_or_group}={choice}").value()
        except HydraException:
            continue


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
