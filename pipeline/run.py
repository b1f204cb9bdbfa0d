"""One job from claim to summary: decode what is missing, score, write, log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.environment import environment
from pipeline.errors import NothingDecodedError, UserError
from pipeline.job import Job, facts_of
from pipeline.metrics import UNDECODED, Timing, summarise
from pipeline.ranks import barrier, world
from pipeline.runs import RunFolder, folder_name, unique_folder
from pipeline.stopping import Stopped, stopping_on_signals
from pipeline.table import print_notices, print_summary
from pipeline.tracking import Tracker, track

SPEED = ("tokens_per_second", "tokens_per_second_per_device", "tokens_per_second_e2e", "overhead")


def folder_of(job: Job, sweep: str | None) -> Path:
    """Where a job's rows belong: under its sweep, under its name, or in a new folder."""
    root = Path(job.config["output_root"])
    if sweep is not None:
        return root / sweep / folder_name(*job.names, job.hash)
    if job.config["run"] is not None:
        return root / job.config["run"]
    return unique_folder(root, *job.names, job.hash)


def run_job(job: Job, folder: Path, command: Sequence[str], group: str | None = None) -> dict[str, Any]:
    """Decode a job into its folder and return its summary; a finished job is not decoded again.

    Raises:
        UserError: if the folder belongs to other settings, or another process writes in it.
        Stopped: on a signal; the folder says ``interrupted`` or ``preempted`` and keeps its rows.
        NothingDecodedError: if every sample failed; the folder says ``failed`` and keeps its rows.
    """
    home = RunFolder(folder)
    if world()[0] > 0:
        return _take_part(job, home)
    there = _kept_rows(home, job)  # before the claim: a folder of other settings must stay as it is
    summary = _finished(home, job, there)
    if summary is not None and world()[1] == 1:
        print(f"{folder} is finished already; delete it, or give another run=, to decode again")
        engine_options = job.config["engine"]
        if (engine_options["trace"] or engine_options["trace_samples"]) and not (folder / "trace").exists():
            print("engine.trace: a trace is only written while a sample is decoded")
        print_summary(summary, job)
        return summary
    with stopping_on_signals():
        home.claim(expected=len(job.samples))
        try:
            return _run_claimed(job, home, command, group)
        except Stopped as stopped:
            kept = len(home.rows())
            home.write_status(stopped.state, expected=len(job.samples), rows=kept, error=str(stopped))
            print(f"\n{stopped.state}: {kept} of {len(job.samples)} samples are kept in {folder}", flush=True)
            raise
        except NothingDecodedError as error:
            home.write_status("failed", expected=len(job.samples), rows=len(home.rows()), error=str(error))
            error.add_note(f"rows: {folder / 'samples.jsonl'}")
            raise
        except BaseException as error:
            home.write_failure(error, expected=len(job.samples), rows=len(home.rows()))
            error.add_note(f"traceback: {folder / 'status.json'}")
            raise


def _take_part(job: Job, home: RunFolder) -> dict[str, Any]:
    """What a further rank of torchrun does: decode its share; the first rank keeps the books."""
    with stopping_on_signals():
        barrier()  # until the first rank has claimed the folder
        _decode(job, home, _kept_rows(home, job))
        barrier()
    return {}


def _run_claimed(job: Job, home: RunFolder, command: Sequence[str], group: str | None) -> dict[str, Any]:
    done = _kept_rows(home, job)
    home.write_json("environment.json", environment(list(command)))
    _write_config(home, job)
    print_notices(job, home.path, len(done))
    barrier()
    with ExitStack() as stack:
        tracker = stack.enter_context(_tracking(job, home, group))
        timing = _timed(job, _decode(job, home, done))
        home.merge_ranks()
        barrier()
        rows = home.rows()
        summary = {**summarise(rows, len(job.samples), timing), **_labels(job, rows)}
        if not timing.decoded_tokens:
            summary |= _speed_before(home)
        home.write_json("summary.json", summary)
        _mirror(tracker, summary, rows, home)
        if rows and all(row["failure"] in UNDECODED for row in rows):
            raise NothingDecodedError(failures_line(rows))  # in here: the tracker's run has failed, too
    home.write_status("done", expected=len(job.samples), rows=len(rows), wandb=tracker.location)
    print_summary(summary, job, home.path, tracker.location)
    return summary


def failures_line(rows: Sequence[dict[str, Any]]) -> str | None:
    """One sentence on the samples that could not be decoded: how many of which kind, and why the first."""
    lost = [row for row in rows if row["failure"] in UNDECODED]
    if not lost:
        return None
    kinds = {"failed": "failed", "too_long": "were too long for the model"}
    counts = {said: sum(row["failure"] == kind for row in lost) for kind, said in kinds.items()}
    told = " and ".join(f"{count} {said}" for said, count in counts.items() if count)
    how_many = f"none of {len(rows)} samples was decoded" if len(lost) == len(rows) else f"of {len(rows)} samples"
    why = str(lost[0].get("error") or "no reason is known").splitlines()[0]
    separator = ": " if len(lost) == len(rows) else " "
    return f"{how_many}{separator}{told}; the first ({lost[0]['id']}): {why}"


def _speed_before(home: RunFolder) -> dict[str, Any]:
    """The speed that an earlier try measured, where this one had nothing left to decode."""
    before = home.read_json("summary.json") or {}
    return {name: before[name] for name in SPEED if name in before}


def _finished(home: RunFolder, job: Job, there: set[str]) -> dict[str, Any] | None:
    """The summary of a folder whose rows are all there, under this job's keys."""
    status = home.status()
    if status is None or status["state"] != "done":
        return None
    summary = home.read_json("summary.json")
    untimed = job.config["engine"]["timing_samples"] and summary and summary["latency_p50_seconds"] is None
    return None if untimed or len(there) < len(job.samples) else summary


def _kept_rows(home: RunFolder, job: Job) -> set[str]:
    """Ids of the samples that need no decoding.

    Raises:
        UserError: if a row was decoded under other settings, or judged by another reference: rows of two keys never
            share a folder.
    """
    index = {sample.id: i for i, sample in enumerate(job.samples)}
    rows = home.rows()
    for row in rows:
        if fault := _alien(row, job, index.get(row["id"])):
            raise UserError(f"{home.path} holds {fault}: give this run another name, or delete the folder")
    return {row["id"] for row in rows}


def _alien(row: dict[str, Any], job: Job, index: int | None) -> str | None:
    """Why a row is none of this job's."""
    if index is None:
        return f"rows of samples that this command does not ask for (such as {row['id']}; a larger dataset.limit?)"
    if row.get("key") != job.key(index):
        return f"rows of other settings, prompts, weights or sampler code (such as {row['id']})"
    if row.get("scorer") != job.dataset.scorer:
        return f"rows scored by {row['scorer']}, this command asks for {job.dataset.scorer}"
    if row.get("gold") != job.samples[index].gold:
        return f"rows judged by another reference answer ({row['id']}: {row['gold']}, not {job.samples[index].gold})"
    return None


def _decode(job: Job, home: RunFolder, done: set[str]) -> Timing:
    """Decode all samples but those ``done``: to every rank the same, as no row is written before all have looked."""
    barrier()
    missing = [i for i, sample in enumerate(job.samples) if sample.id not in done]
    if not missing:
        return Timing(devices=job.config["trainer"]["devices"])
    from pipeline.evaluation import evaluate

    record = home.read_json("environment.json")
    versions = f"torch {record['torch']}, transformers {record['transformers']}"
    return evaluate(job, missing, home.path, versions, record["git_commit"])


def _timed(job: Job, timing: Timing) -> Timing:
    """With the latencies of a pass of their own, if they are asked for."""
    if not job.config["engine"]["timing_samples"]:
        return timing
    from pipeline.evaluation import measure_latency

    seconds, tokens = measure_latency(job)
    return replace(timing, latencies=seconds, latency_tokens=tokens)


def _tracking(job: Job, home: RunFolder, group: str | None) -> Any:
    model, sampler, dataset = job.names
    config = {
        **job.effective,
        "model_name": model,
        "sampler_name": sampler,
        "dataset_name": dataset,
        "protocol_hash": job.protocol_hash,
        "settings_hash": job.hash,
        "facts": facts_of(job),
    }
    name = folder_name(model, sampler, dataset, job.hash)
    return track(
        job.config["logger"],
        name=name,
        group=group,
        job_type=dataset,
        tags=[model, sampler],
        config=config,
        folder=home.path,
    )


def _mirror(tracker: Tracker, summary: dict[str, Any], rows: list[dict[str, Any]], home: RunFolder) -> None:
    tracker.summary(summary)
    tracker.table(rows)
    names = ("samples.jsonl", "summary.json", "config.yaml", "environment.json")
    tracker.files([home.path / name for name in names])


def _labels(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a summary says besides its figures."""
    model, sampler, dataset = job.names
    devices = sorted({f"{row['device']} {row['dtype']}" for row in rows})
    return {
        "model": model,
        "sampler": sampler,
        "dataset": dataset,
        "method": job.config["sampler"]["method"] or sampler,
        "trained_for": job.trained_for,
        "training_note": job.training_note,
        "failures": failures_line(rows),
        "protocol_hash": job.protocol_hash,
        "scorer": job.dataset.scorer,
        "gen_length": job.settings.gen_length,
        "gen_length_source": job.settings.sources["gen_length"],
        "prompt_template": job.prompt.template,
        "prompt_template_source": job.prompt.source,
        "max_rows": job.config["engine"]["max_rows"],
        "hardware_key": " + ".join(devices),
        "settings_hash": job.hash,
        "settings": {
            name: {"value": value, "source": job.settings.sources[name]} for name, value in job.settings.values.items()
        },
        "dropped": job.settings.dropped,
    }


def _write_config(home: RunFolder, job: Job) -> None:
    """config.yaml (effective) and the sampler's source as run."""
    import inspect

    from omegaconf import OmegaConf

    (home.path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(job.effective)))
    (home.path / "sampler.py").write_text(inspect.getsource(sys.modules[type(job.settings.sampler).__module__]))
