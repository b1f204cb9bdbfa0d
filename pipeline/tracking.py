"""Weights & Biases, and the only module that imports it: one run a job, closed whatever happens, nothing asked.

W&B mirrors the run folder and is never the only copy, so a run is not continued there: a repeated job makes a new one.
"""

from __future__ import annotations

import math
import netrc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pipeline.errors import UserError

KINDS = ("wandb", "none")
MODES = ("online", "offline", "disabled", "shared")
OLD_MODES = {"dryrun": "offline", "run": "online"}
HOST = "api.wandb.ai"
TABLE_ROWS = 2000
TEXT_LIMIT = 500
START_SECONDS = 10.0  # patience with a server that does not answer
NAMES = {  # what W&B takes, and how to say it
    "project": (re.compile(r"[^/\\#?%:]{1,128}"), "at most 128 signs, none of them / \\ # ? % :"),
    "entity": (re.compile(r"[\w.-]+"), "letters, digits, -, _ and . only"),
}
COLUMNS = (
    *("id", "sample", "correct", "failure", "extracted", "gold", "text", "tokens", "nfe", "nfe_post_eos"),
    *("token_forwards", "accepted_draft_tokens", "revised_tokens", "order_kendall_tau", "seconds", "error"),
)
HISTOGRAM = "accepted_by_position"
SECRET = re.compile(r"(^|[_.-])(api_?key|key|token|password|passwd|secret|credentials?|auth)s?$", re.IGNORECASE)
HARMLESS = re.compile(r"(mask|end|eos|eot|bos|pad|stop|unk|hardware|row|sort)_(token|key)s?$", re.IGNORECASE)
TWIN = re.compile(r"_as_[a-z0-9]+$")  # other projects' bookkeeping stays in the files


class Tracker:
    """Takes what a job has to show and keeps none of it (``logger=none``); the parent of the one that does."""

    location: str | None = None  # where the run can be looked at: a web address, or the folder that `wandb sync` takes

    def summary(self, figures: Mapping[str, Any]) -> None:
        """The run's flat figures."""

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The run's samples."""

    def files(self, paths: Sequence[Path | str]) -> None:
        """Files of the run folder, as one artifact; those that don't exist are passed over."""


class WandbTracker(Tracker):
    """Writes to one open W&B run."""

    def __init__(self, run: Any, table_rows: int) -> None:
        self.run, self.table_rows = run, table_rows
        self.location = str(Path(run.dir).parent) if run.offline else run.url

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Numbers, words and truth values by their own names; what does not exist is left out, never 0."""
        shown = {k: v for k, v in figures.items() if isinstance(v, (bool, int, float, str)) and not TWIN.search(k)}
        self.run.summary.update({k: v for k, v in shown.items() if not isinstance(v, float) or math.isfinite(v)})
        if accepted := figures.get(HISTOGRAM):
            self._histogram(accepted)

    def _histogram(self, accepted: Sequence[int]) -> None:
        """A small table: for a number of drafts, the verifying forwards that accepted at least so many."""
        import wandb

        data = [list(pair) for pair in enumerate(accepted, start=1)]
        self.run.log({HISTOGRAM: wandb.Table(columns=["drafts", "forwards"], data=data)})

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The first ``table_rows`` rows in dataset order under ``sample_table``, long texts clipped."""
        import wandb

        first = sorted(rows, key=lambda row: (row.get("index", 0), row.get("sample", 0)))[: self.table_rows]
        data = [[_clipped(row.get(column)) for column in COLUMNS] for row in first]
        self.run.log({"sample_table": wandb.Table(columns=list(COLUMNS), data=data, allow_mixed_types=True)})

    def files(self, paths: Sequence[Path | str]) -> None:
        """One artifact ``results-<run name>``; offline it refers to the files where they lie."""
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "_", f"results-{self.run.name}")[:128], type="results")
        for path in (Path(path).resolve() for path in paths):
            if path.is_file():
                artifact.add_file(str(path), policy="immutable")
        self.run.log_artifact(artifact)


@contextmanager
def track(
    cfg_logger: Mapping[str, Any],
    *,
    name: str,
    group: str | None = None,
    job_type: str | None = None,
    tags: Sequence[str] = (),
    config: Mapping[str, Any],
    folder: Path | str,
) -> Iterator[Tracker]:
    """One W&B run around a job; an exception inside ends it as failed and goes on.

    ``cfg_logger`` is conf/logger/<option>.yaml as a plain mapping, ``config`` the resolved config as plain data;
    secrets and absolute paths are taken out of it here. On other ranks than the first, and for ``kind: none`` or mode
    ``disabled``, nothing happens. Raises ``UserError`` as `check_options` does.
    """
    mode = check_options(cfg_logger)
    if mode == "disabled" or _rank() > 0:
        yield Tracker()
        return
    what = {"name": name, "group": cfg_logger.get("group") or group, "job_type": job_type, "tags": _tags(tags)}
    where = {"project": cfg_logger.get("project") or "blockdiff", "entity": cfg_logger.get("entity")}
    home = Path(folder).resolve()
    home.mkdir(parents=True, exist_ok=True)
    run = _start(mode, config=public(config), dir=str(home), **what, **where)
    try:
        yield WandbTracker(run, cfg_logger.get("table_rows") or TABLE_ROWS)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=0)


def check_options(cfg_logger: Mapping[str, Any], in_sweep: bool = False) -> str:
    """The mode that a logger's options ask for; ``disabled`` for ``kind: none``, whose options are checked no less.

    A ``WANDB_RUN_ID`` would make one run of all jobs of a sweep: there it is forgotten, with a warning.

    Raises:
        UserError: for a kind or mode that does not exist, or a project or entity that W&B would refuse.
    """
    if cfg_logger["kind"] not in KINDS:
        raise UserError(f"logger.kind={cfg_logger['kind']} is not known: use one of {', '.join(KINDS)}")
    for option, (form, rule) in NAMES.items():
        name = cfg_logger.get(option)
        if name and not form.fullmatch(str(name)):
            raise UserError(f"logger.{option}={name} is refused by W&B: use {rule}")
    mode = cfg_logger.get("mode")
    if mode:
        _known_mode(mode, "logger.mode")
    mode = choose_mode(mode) if cfg_logger["kind"] == "wandb" else "disabled"
    if in_sweep and mode != "disabled" and (run := os.environ.pop("WANDB_RUN_ID", None)):
        _warn(f"WANDB_RUN_ID={run} names one W&B run and is not used in a sweep, whose jobs have a run each")
    return mode


def choose_mode(option: str | None) -> str:
    """The option, else ``WANDB_MODE``, else online with a key and offline without one. Never a question.

    Online without a key cannot work and would ask, so it becomes offline with a warning.
    """
    asked = option or os.environ.get("WANDB_MODE")
    if not asked:
        return "online" if has_key() else "offline"
    mode = _known_mode(asked, "logger.mode" if option else "WANDB_MODE")
    if mode in ("online", "shared") and not has_key():
        _warn(f"W&B mode {mode} needs a key (`wandb login`, or WANDB_API_KEY): logging offline")
        return "offline"
    return mode


def _known_mode(asked: str, source: str) -> str:
    mode = OLD_MODES.get(asked, asked)
    if mode not in MODES:
        raise UserError(f"{source}={asked} is not known: use one of {', '.join(MODES)}, or leave it out")
    return mode


@cache
def _warn(message: str) -> None:
    """One line on stderr, once a process: the options of a job are looked at more than once."""
    if _rank() == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _forget_empty_variables() -> None:
    """W&B takes a variable that is set but empty for a value, and refuses it."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]


def has_key() -> bool:
    """Whether W&B would find a key by itself: in the environment, or in the netrc file where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    _forget_empty_variables()
    import wandb

    hosts = {HOST, urlsplit(os.environ.get("WANDB_BASE_URL") or wandb.setup().settings.base_url).hostname}
    for path in (os.environ.get("NETRC") or "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if hosts & netrc.netrc(os.path.expanduser(path)).hosts.keys():
                return True
    return False


def public(config: Any) -> Any:
    """Plain config fit to be shown: without keys, tokens and passwords, absolute paths cut to what tells them apart."""
    if isinstance(config, Mapping):
        return {str(key): public(value) for key, value in config.items() if not _is_secret(str(key), value)}
    if isinstance(config, (list, tuple)):
        return [public(item) for item in config if not (isinstance(item, str) and _is_secret_override(item))]
    return _public_text(str(config)) if isinstance(config, (str, Path)) else config


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(SECRET.search(key)) and not HARMLESS.search(key)


def _is_secret_override(text: str) -> bool:
    key, equals, value = text.partition("=")
    return bool(equals) and _is_secret(key, value)


def _public_text(text: str) -> str:
    """A path below the current folder relative to it, any other as ``.../name``; ``option=path`` likewise."""
    option, equals, value = text.partition("=")
    if equals and re.fullmatch(r"[\w.+~@/-]+", option) and not option.startswith("/"):
        return f"{option}={_public_text(value)}"
    plain = text.removeprefix("file://").strip("'\"")
    path = Path(plain)
    short = len(path.parts) < 2 or (len(path.parts) == 2 and not path.exists())  # rather a stop string such as "/"
    if not path.is_absolute() or "\n" in text or short:
        return text
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else f".../{path.name}"


def _start(mode: str, **arguments: Any) -> Any:
    """Open a run of its own; when the server can't be reached or refuses, offline."""
    _forget_empty_variables()
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(silent=True, console="off", init_timeout=START_SECONDS)
    chosen: Literal["online", "offline", "shared"] = mode  # type: ignore[assignment]
    try:
        return wandb.init(mode=chosen, reinit="create_new", settings=settings, **arguments)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        _warn(f"W&B could not start {mode} ({reason}): logging offline")
        return wandb.init(mode="offline", reinit="create_new", settings=settings, **arguments)


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _tags(tags: Sequence[str]) -> list[str]:
    return [tag[:64] for tag in tags if tag]  # W&B refuses a run for a tag of more than 64 signs or none


def _clipped(value: Any) -> Any:
    return value[: TEXT_LIMIT - 1] + "…" if isinstance(value, str) and len(value) > TEXT_LIMIT else value
