"""The entry point: Hydra composes, errors become one sentence, exit codes tell what happened.

Exit codes: 0 all done, 1 a job failed, 2 bad input, 130 interrupted by Ctrl-C, 128 + n ended by signal n.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline import config
from pipeline.errors import UserError, in_words, in_yaml, one_line
from pipeline.overrides import command_of, config_dirs, flags_first, keys, open_options, raw, refuse_wrong_types
from pipeline.own import own_first
from pipeline.stopping import Stopped, stopping_on_signals

GROUPS = ("model", "sampler", "dataset", "logger", "trainer", "experiment")


def guarded(main: Callable[[], Any]) -> None:
    """Run a command; the user's mistakes end in one sentence on stderr and exit code 2.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead.
    """
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own samplers and datasets, also for the console script
    try:
        with stopping_on_signals(), own_first(next(config_dirs(sys.argv[1:]), None), told=True):
            main()
    except (Exception, Carried) as caught:
        error = caught.__cause__ if isinstance(caught, Carried) else caught
        assert isinstance(error, Exception)
        if full == "1":
            raise error from None
        if isinstance(error, (UserError, HydraException, OmegaConfBaseException, YAMLError)):
            print(f"error: {sentence(error)}", file=sys.stderr)
            sys.exit(2)
        hint = "; ".join([*getattr(error, "__notes__", ()), "HYDRA_FULL_ERROR=1 shows where"])
        print(f"error: {one_line(error)} ({hint})", file=sys.stderr)
        sys.exit(1)
    except Stopped as stopped:
        print(f"{stopped.state} ({stopped})", file=sys.stderr)
        sys.exit(stopped.code)
    finally:
        os.environ["HYDRA_FULL_ERROR"] = full or "0"


class Carried(BaseException):
    """Takes an error, its cause, through Hydra unseen: Hydra would announce it with a line of its own."""


def sentence(error: Exception) -> str:
    """An error of ours, of Hydra or of OmegaConf in one sentence that names key, value and what would be right."""
    text = str(error)
    cause = str(error.__cause__ or "")
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if found := re.search(r"Ambiguous value for argument '(.+)'", text):
        return f"{_unreadable(found[1])}; or add -m for a sweep over values"
    if found := re.search(r"Could not override '([\w.]+)'", text):
        return f"{found[1]} is no option{_did_you_mean(found[1])}"
    if found := re.search(r"Error merging override (.+)", text):
        reason = next((line for line in cause.splitlines() if line.strip()), "it does not fit")
        return f"{found[1].rstrip('.')} does not fit: {in_words(reason)}"
    if found := re.search(r"Could not find '([\w/.-]+)'", text):
        group, _, option = found[1].rpartition("/")
        choices = ", ".join(re.findall(r"^\t([\w.-]+)$", text, re.MULTILINE))
        return f"{group}={option} does not exist; choose from {choices}" if choices else text.splitlines()[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if told := in_yaml(error, next(config_dirs(sys.argv[1:]), None)):
        return told
    return lines[0] if lines else type(error).__name__


def _unreadable(override: str) -> str:
    """What is wrong with a word of the command line that Hydra cannot read, and how it is written."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is no override: write key=value, such as sampler=threshold"
    quoted = value.replace("'", "\\'")
    return f"{override!r} cannot be read: a value with spaces or signs is quoted once more, as \"{key}='{quoted}'\""


def _did_you_mean(key: str) -> str:
    """The closest option, or all there are, of what the command line chose (a user's own sampler or dataset too)."""
    from pipeline.compose import compose

    words = list(sys.argv[1:])
    chosen = [word.split(",")[0] for word in words if word.partition("=")[0] in GROUPS]
    path, _, last = key.rpartition(".")
    try:
        whole = compose(chosen, next(config_dirs(words), None))
        names = [str(name) for name in (OmegaConf.select(whole, path) if path else whole)]
    except Exception:  # the choice itself is wrong: that is told another time
        return ""
    names = [name for name in names if not name.startswith("_")]
    close = difflib.get_close_matches(last, names, n=1)
    prefix = f"{path}." if path else ""
    return f": did you mean {prefix}{close[0]}?" if close else f": the options are {', '.join(names)}"


def looking(look: Callable[[DictConfig, list[str]], None]) -> None:
    """Run a tool that shows something of a configuration, given that and the overrides; it never asks the network."""
    from pipeline.sweep import register_launchers

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config.register()
    register_launchers()

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def composed(cfg: DictConfig) -> None:
        try:
            look(cfg, raw(HydraConfig.get().overrides.task))
        except Exception as error:
            raise Carried from error

    def one() -> None:
        for_one()
        composed()

    guarded(one)


def for_one() -> None:
    """Make the command line that of one configuration, whatever an experiment says that is a sweep.

    Raises:
        UserError: for flags that ask for a sweep, or that there are not.
    """
    refuse_sweep(sys.argv[1:])
    sys.argv[1:] = [*flags_first(sys.argv[1:]), "hydra.mode=RUN"]


def refuse_sweep(words: Sequence[str]) -> None:
    """Refuse what makes a sweep of a tool that looks at, decodes or fetches for one configuration.

    Raises:
        UserError: one sentence.
    """
    for word in words:
        flag = word == "-m" or (len(word) > 2 and "--multirun".startswith(word))  # Hydra takes it abbreviated
        if flag or re.fullmatch(r"\+*hydra\.mode=.*multirun.*", word, re.IGNORECASE):
            raise UserError(f"{word} makes a sweep, which only python -m pipeline decodes: leave it out")


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def _single(cfg: DictConfig) -> None:
    """One run; also one job of a sweep under a foreign launcher (submitit, joblib, …)."""
    composed = HydraConfig.get()
    in_sweep = composed.mode == RunMode.MULTIRUN
    try:
        _run(cfg, raw(composed.overrides.task), in_sweep)
    except Exception as error:
        raise error if in_sweep else Carried() from error


def _run(cfg: DictConfig, overrides: list[str], in_sweep: bool) -> None:
    from pipeline.job import prepare
    from pipeline.quiet import quiet_libraries
    from pipeline.ranks import agree, world
    from pipeline.run import folder_of, run_job
    from pipeline.sweep import sweep_name

    quiet_libraries()
    job = prepare(cfg, keys(overrides), in_sweep)
    sweep = sweep_name(cfg) if in_sweep else None
    folder = agree(folder_of(job, sweep) if world()[0] == 0 else None)
    try:
        run_job(job, folder, command_of(overrides, in_sweep), sweep)
    except Stopped as stopped:
        sys.exit(stopped.code)


def run() -> None:
    """``python -m pipeline``."""
    from pipeline.sweep import register_launchers

    config.register()
    register_launchers()

    def composed() -> None:
        sys.argv[1:] = open_options(flags_first(sys.argv[1:]))
        refuse_wrong_types(sys.argv[1:])
        _single()

    guarded(composed)


def console() -> None:
    """``blockdiff``, ``blockdiff train``, ``blockdiff compare …``: as ``python -m pipeline`` and its tools."""
    import importlib

    tools = ("train", "list", "inspect", "check", "decode", "compare", "status", "bench", "download", "verify", "trace")
    if len(sys.argv) > 1 and sys.argv[1] in tools:
        tool = sys.argv.pop(1)
        sys.argv[0] = f"blockdiff {tool}"
        sys.exit(importlib.import_module(f"pipeline.{tool}").main())
    else:
        run()
