"""The entry point: Hydra composes, errors become one sentence, exit codes tell what happened.

Exit codes: 0 all done, 1 a job failed, 2 bad input, 130 interrupted by Ctrl-C, 128 + n ended by signal n.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline import config
from pipeline.errors import UserError


def guarded(main: Callable[[], Any]) -> None:
    """Run a command; the user's mistakes end in one sentence on stderr and exit code 2.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead.
    """
    full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own samplers and datasets, also for the console script
    try:
        main()
    except (Exception, Carried) as caught:
        error = caught.__cause__ if isinstance(caught, Carried) else caught
        assert isinstance(error, Exception)
        if full:
            raise error from None
        if isinstance(error, (UserError, HydraException, OmegaConfBaseException)):
            print(f"error: {sentence(error)}", file=sys.stderr)
            sys.exit(2)
        print(f"error: {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where)", file=sys.stderr)
        sys.exit(1)


class Carried(BaseException):
    """Takes an error, its cause, through Hydra unseen: Hydra would announce it with a line of its own."""


def sentence(error: Exception) -> str:
    """An error of ours, of Hydra or of OmegaConf in one sentence that names key, value and what would be right."""
    text = str(error)
    cause = str(error.__cause__ or "")
    if found := re.search(r"Could not override '([\w.]+)'", text):
        return f"{found[1]} is no option{_did_you_mean(found[1])}"
    if found := re.search(r"Error merging override (.+)", text):
        reason = next((line for line in cause.splitlines() if line.strip()), "it does not fit")
        return f"{found[1].rstrip('.')} does not fit: {reason}"
    if found := re.search(r"Could not find '([\w/.-]+)'", text):
        group, _, option = found[1].rpartition("/")
        choices = ", ".join(re.findall(r"^\t([\w.-]+)$", text, re.MULTILINE))
        return f"{group}={option} does not exist; choose from {choices}" if choices else text.splitlines()[0]
    first = " ".join(line.strip() for line in text.splitlines()[:1])
    if "mismatched input" in text or "token recognition error" in text or "extraneous input" in text:
        return f"{first}: put values with spaces or commas in inner quotes, as in 'prompt=\"a, b\"'"
    return first or type(error).__name__


def _did_you_mean(key: str) -> str:
    """The closest option of the schema, as a question."""
    node: Any = config.Config
    path, _, last = key.rpartition(".")
    for part in path.split(".") if path else ():
        nodes = {f.name: f.default_factory for f in fields(node) if is_dataclass(f.default_factory)}
        node = nodes.get(part)
        if node is None:
            return ""
    names = [f.name for f in fields(node)]
    close = difflib.get_close_matches(last, names, n=1)
    prefix = f"{path}." if path else ""
    return f": did you mean {prefix}{close[0]}?" if close else f": the options are {', '.join(names)}"


def overridden_options(overrides: list[str]) -> list[str]:
    """Names of the sampler's options among command-line overrides."""
    keys = [override.lstrip("+~").split("=")[0] for override in overrides]
    return [key.removeprefix("sampler.") for key in keys if key.startswith("sampler.")]


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def _single(cfg: DictConfig) -> None:
    """One run; also one job of a sweep under a foreign launcher (submitit, joblib, …)."""
    composed = HydraConfig.get()
    in_sweep = composed.mode == RunMode.MULTIRUN
    try:
        _run(cfg, list(composed.overrides.task), in_sweep)
    except Exception as error:
        raise error if in_sweep else Carried() from error


def _run(cfg: DictConfig, overrides: list[str], in_sweep: bool) -> None:
    from pipeline.evaluation import Stopped
    from pipeline.job import prepare
    from pipeline.quiet import quiet_libraries
    from pipeline.ranks import agree, world
    from pipeline.run import folder_of, run_job
    from pipeline.sweep import sweep_name

    quiet_libraries()
    job = prepare(cfg, overridden_options(overrides), in_sweep)
    sweep = sweep_name(cfg) if in_sweep else None
    folder = agree(folder_of(job, sweep) if world()[0] == 0 else None)
    try:
        run_job(job, folder, ["python", "-m", "pipeline", *overrides], sweep)
    except Stopped as stopped:
        sys.exit(stopped.code)


def run() -> None:
    """``python -m pipeline``."""
    from pipeline.sweep import register_launchers

    config.register()
    register_launchers()
    guarded(_single)


def console() -> None:
    """``blockdiff``, ``blockdiff train``, ``blockdiff compare …``: as ``python -m pipeline`` and its tools."""
    import importlib

    tools = ("train", "list", "decode", "compare", "status", "bench")
    if len(sys.argv) > 1 and sys.argv[1] in tools:
        tool = sys.argv.pop(1)
        sys.argv[0] = f"blockdiff {tool}"
        importlib.import_module(f"pipeline.{tool}").main()
    else:
        run()
