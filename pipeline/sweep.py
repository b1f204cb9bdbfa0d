"""Sweeps: every job of ``-m`` checked, merged where the effective settings are equal, run, and compared at the end."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import UserError, one_line
from pipeline.stopping import SIGNALS, Stopped, stopping_on_signals

DEFAULT_SWEEP = "sweep"
GRACE_SECONDS = 10  # for a worker whose parent is gone to close its job
_stopped: list[int] = []  # signals that a worker received


@dataclass
class Planned:
    """A job of a sweep before it runs.

    Attributes:
        cfg: its composed configuration.
        overrides: the command line it stands for.
        labels: names of model, sampler and dataset.
        folder: where its rows go; None if it was refused.
        error: why it was refused.
        merged: further command lines with the same effective settings.
        dropped: options given that its sampler does not use.
    """

    cfg: DictConfig
    overrides: list[str]
    labels: tuple[str, str, str]
    folder: Path
    error: Exception | None = None
    merged: list[list[str]] = field(default_factory=list)
    dropped: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    summary: dict[str, Any] | None = None

    @property
    def command(self) -> list[str]:
        """That runs this job alone, into its place in the sweep."""
        from pipeline.overrides import command_of

        return command_of(self.overrides, multirun=True)


def sweep_name(cfg: DictConfig) -> str:
    """Folder of a sweep below the outputs: as given, or one for all that have no name."""
    return cfg.sweep or DEFAULT_SWEEP


def plan(configs: Sequence[tuple[DictConfig, list[str]]]) -> list[Planned]:
    """Check every job and merge those that would give the same rows; refused ones stay, with their reason."""
    from pipeline.job import prepare
    from pipeline.overrides import keys
    from pipeline.run import folder_of
    from pipeline.runs import folder_name, settings_hash

    planned: dict[Path, Planned] = {}
    for cfg, overrides in configs:
        labels = (_model_name(cfg, keys(overrides)), str(cfg.sampler.name), str(cfg.dataset.name))
        sweep, dropped = sweep_name(cfg), {}
        refused_at = Path(cfg.output_root) / sweep / folder_name(*labels, f"refused-{settings_hash(overrides)}")
        error: Exception | None = None
        try:
            job = prepare(cfg, keys(overrides), in_sweep=True)
            folder, dropped = folder_of(job, sweep), job.settings.dropped
            shutil.rmtree(refused_at, ignore_errors=True)  # what an earlier try left
        except Exception as refused:  # a user's own dataset or sampler may raise anything
            error = refused
            folder = refused_at
        if folder in planned:
            planned[folder].merged.append(overrides)
            planned[folder].dropped |= dropped
        else:
            planned[folder] = Planned(cfg, overrides, labels, folder, error, dropped=dropped)
    return list(planned.values())


def _model_name(cfg: DictConfig, overridden: Sequence[str]) -> str:
    from pipeline.config import named

    try:
        return str(named(cfg, overridden).model.name)
    except OmegaConfBaseException:  # a path still to be given, or not to be resolved: its job will be refused
        return str(cfg.model.name)


def run_planned(cfg: DictConfig, overrides: list[str], folder: Path, command: list[str]) -> tuple[str, dict | None]:
    """Run one job of a sweep; a failure is written into its folder and told as a state, never raised."""
    from pipeline.job import prepare
    from pipeline.overrides import keys
    from pipeline.run import run_job
    from pipeline.runs import RunFolder

    before = RunFolder(folder).status()
    try:
        job = prepare(cfg, keys(overrides), in_sweep=True)
        summary = run_job(job, folder, command, sweep_name(cfg))
    except Exception as error:
        if not (folder / "status.json").exists():
            RunFolder(folder).write_failure(error)
        return f"failed: {one_line(error)}", None
    return ("kept" if before and before["state"] == "done" else "done"), summary


class SerialLauncher(Launcher):
    """Jobs one after the other, in this process; the model stays loaded while it is the same."""

    __module__ = "hydra_plugins.blockdiff"  # see `register_launchers`

    config: DictConfig
    hydra_context: HydraContext
    task_function: TaskFunction

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function
        HydraConfig.instance().set_config(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from pipeline.job import refuse_bad_name
        from pipeline.quiet import quiet_libraries

        quiet_libraries()
        composed = [(self._compose(list(given)), list(given)) for given in job_overrides]
        for cfg, _ in composed:
            refuse_bad_name("sweep", cfg.sweep, cfg.output_root)
        jobs = plan(composed)
        runnable = [job for job in jobs if not job.error]
        print(f"{len(job_overrides)} combinations, {len(jobs)} jobs after merging", flush=True)
        for job in jobs:
            if job.error:
                _record_refusal(job)
        try:
            with stopping_on_signals():
                self.run_all(runnable)
        except Stopped as stopped:
            _close(jobs, job_overrides)
            sys.exit(stopped.code)
        failed = _close(jobs, job_overrides)
        if failed:
            sys.exit(1)
        return [JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED) for job in jobs]

    def _compose(self, overrides: list[str]) -> DictConfig:
        """A job's configuration without Hydra's own part."""
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])

    def run_all(self, jobs: Sequence[Planned]) -> None:
        for number, job in enumerate(jobs, start=1):
            print(f"\n[{number}/{len(jobs)}] {' '.join(job.overrides)}", flush=True)
            job.state, job.summary = run_planned(job.cfg, job.overrides, job.folder, job.command)
            if job.summary is None:
                print(f"{job.state}\ntraceback: {job.folder / 'status.json'}", flush=True)


class LocalLauncher(SerialLauncher):
    """Jobs side by side on this machine: one process a visible GPU, else ``workers`` processes on the CPU."""

    __module__ = "hydra_plugins.blockdiff"

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers
        if workers is not None and workers < 1:
            raise UserError(f"hydra.launcher.workers={workers} is out of range: use a whole number from 1 up, or null")

    def run_all(self, jobs: Sequence[Planned]) -> None:
        import multiprocessing

        import torch

        gpus = torch.cuda.device_count()
        workers = min(self.workers or gpus or max(1, (os.cpu_count() or 2) // 2), max(1, len(jobs)))
        context = multiprocessing.get_context("spawn")
        devices = context.Queue()
        for number in range(workers):
            devices.put(str(number % gpus) if gpus else "")
        threads = max(1, (os.cpu_count() or 1) // workers)
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(devices, threads, sys.path))
        print(f"{len(jobs)} jobs on {workers} workers", flush=True)
        futures = {pool.submit(_in_worker, j.cfg, j.overrides, j.folder, j.command): j for j in jobs}
        workers_of_pool = pool._processes  # before Python 3.14 there is no public way to reach them
        try:
            self._collect(futures)
        except Stopped as stopped:
            for pid in [process.pid for process in workers_of_pool.values() if process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, stopped.signum)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _collect(self, futures: dict[Future, Planned]) -> None:
        for future in as_completed(futures):
            job = futures[future]
            try:
                job.state, job.summary = future.result()
            except Exception as error:  # the worker died: out of memory, killed
                job.state = f"failed: the worker ended ({one_line(error)})"
            print(f"{job.state} [{' '.join(job.overrides)}] → {job.folder}", flush=True)


def _start_worker(devices: Any, threads: int, path: list[str]) -> None:
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    device = devices.get()
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    sys.path[:] = path
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: _stopped.append(signum))  # between two jobs
    import torch

    from pipeline.quiet import quiet_libraries

    torch.set_num_threads(threads)
    quiet_libraries()


def _follow(parent: int) -> None:
    """End this worker when its parent is gone: stop the job as a signal would, then leave."""
    while os.getppid() == parent:
        time.sleep(1)
    _stopped.append(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _in_worker(cfg: DictConfig, overrides: list[str], folder: Path, command: list[str]) -> tuple[str, dict | None]:
    """Run a job with its print in ``log.txt`` of its folder; after a signal no further job starts."""
    if _stopped:
        return "", None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with stopping_on_signals(), (folder / "log.txt").open("a") as log, redirect_stdout(log):
            return run_planned(cfg, overrides, folder, command)
    except Stopped as stopped:
        _stopped.append(stopped.signum)
        return stopped.state, None


def _record_refusal(job: Planned) -> None:
    from pipeline.runs import RunFolder

    assert job.error is not None
    job.state = f"refused: {one_line(job.error)}"
    RunFolder(job.folder).write_failure(job.error)


def _close(jobs: Sequence[Planned], job_overrides: Sequence[Sequence[str]]) -> int:
    """Write points.csv, print the comparison and what was dropped and merged; returns how many jobs failed."""
    from pipeline.points import write_points
    from pipeline.table import print_sweep

    home = jobs[0].folder.parent
    varied = _varied([list(given) for given in job_overrides])
    called = _models_apart(jobs)
    entries = [_entry(job, varied) | {"model": called[_place(job)]} for job in jobs]
    failed = [job for job in jobs if job.state.startswith(("failed", "refused"))]
    points = write_points(home)
    print()
    print_sweep(entries, [*_notes(jobs), *_failures(failed), f"points: {points}"])
    return len(failed)


def _entry(job: Planned, varied: set[str]) -> dict[str, Any]:
    model, sampler, dataset = job.labels
    unused = {f"sampler.{name}" for name in job.dropped}
    plain = [override.lstrip("+") for override in job.overrides]
    shown = [override for override in plain if override.split("=")[0] in varied - unused]
    return {
        "model": model,
        "sampler": sampler,
        "dataset": dataset,
        "varied": " ".join(o.removeprefix("sampler.") for o in shown),
        "state": job.state.split(":")[0] or _state_on_disk(job),
        "summary": job.summary,
    }


def _place(job: Planned) -> tuple[str, str]:
    """A model's name and where it lies, as the configuration has it."""
    found = OmegaConf.to_container(job.cfg.model, resolve=False)
    assert isinstance(found, dict)
    return job.labels[0], str(found["path"] or found["hub"] or "").rstrip("/")


def _models_apart(jobs: Sequence[Planned]) -> dict[tuple[str, str], str]:
    """What each model is called in the table: of several places under one name the shortest ends that differ."""
    called = {}
    for name, place in dict.fromkeys(_place(job) for job in jobs):
        others = {p for n, p in dict.fromkeys(_place(job) for job in jobs) if n == name} - {place}
        called[name, place] = f"{name} ({_end(place, others)})" if others else name
    return called


def _end(place: str, others: set[str]) -> str:
    """The fewest last parts of a path that are those of no other."""
    parts = Path(place).parts
    for count in range(1, len(parts) + 1):
        if all(Path(other).parts[-count:] != parts[-count:] for other in others):
            return "/".join(parts[-count:])
    return place


def _state_on_disk(job: Planned) -> str:
    """Of a job that a signal cut off, or kept from starting."""
    from pipeline.runs import RunFolder

    status = RunFolder(job.folder).status()
    return status["state"] if status else "not run"


def _varied(commands: Sequence[Sequence[str]]) -> set[str]:
    """Keys that differ between jobs, besides the three names that have columns of their own."""
    values: dict[str, set[str]] = {}
    for command in commands:
        for override in command:
            key, _, value = override.lstrip("+").partition("=")
            values.setdefault(key, set()).add(value)
    return {key for key, seen in values.items() if len(seen) > 1} - {"model", "sampler", "dataset"}


def _notes(jobs: Sequence[Planned]) -> list[str]:
    """What was dropped, by sampler, what was merged, which trainings were presumed in vain, what failed in part."""
    notes = []
    for sampler in dict.fromkeys(job.labels[1] for job in jobs):
        dropped = sorted({name for job in jobs if job.labels[1] == sampler for name in job.dropped})
        if dropped:
            names = ", ".join(f"sampler.{name}" for name in dropped)
            notes.append(f"dropped: {names} (sampler={sampler} does not use {'it' if len(dropped) == 1 else 'them'})")
    for job in jobs:
        others = [command for command in job.merged if command != job.overrides]
        if others:
            own = _apart(job.overrides, job)
            also = ", ".join(_apart(command, job) for command in others)
            notes.append(f"merged: {' '.join(job.labels[:2])} with {own} stands for {also} too")
        if times := len(job.merged) - len(others):
            notes.append(f"merged: {' '.join(job.overrides)} was given {times + 1} times")
    untrained = [job.summary.get("training_note") for job in jobs if job.summary]
    notes += [f"note: {note}" for note in dict.fromkeys(untrained) if note]
    failures = [(job, job.summary.get("failures")) for job in jobs if job.summary]
    return [*notes, *(f"{' '.join(job.overrides)}: {line}" for job, line in failures if line)]


def _apart(command: Sequence[str], job: Planned) -> str:
    """What a command line says beyond what all merged into a job say."""
    return " ".join(override.lstrip("+") for override in command if override not in _common(job))


def _common(job: Planned) -> set[str]:
    """Overrides that a job and all that were merged into it share."""
    return set(job.overrides).intersection(*job.merged)


def _failures(failed: Sequence[Planned]) -> list[str]:
    return [f"{job.state} [{' '.join(job.overrides)}] → {job.folder / 'status.json'}" for job in failed]


def register_launchers() -> None:
    """Make the launchers of ``conf/hydra/launcher`` known to Hydra.

    Hydra takes launchers from the package ``hydra_plugins`` only, so a module of that name is made to hold them.
    """
    module = types.ModuleType("hydra_plugins.blockdiff")
    try:
        parent = importlib.import_module("hydra_plugins")
    except ImportError:
        parent = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        parent.__path__ = []
    sys.modules[module.__name__] = parent.blockdiff = module  # type: ignore[attr-defined]
    for launcher in (SerialLauncher, LocalLauncher):
        setattr(module, launcher.__name__, launcher)
        Plugins.instance().register(launcher)
