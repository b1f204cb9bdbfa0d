"""What a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pipeline.devices import device_line
from pipeline.job import Job
from pipeline.overrides import short

Summary = dict[str, Any]
WORD = 40  # longest name or setting that a sweep's table does not break
LOG = 200  # widest table that a log gets

# (label, figure, its interval's stem or None, digits); a figure that is null is left out
FIGURES = (
    ("accuracy", "accuracy", "accuracy", 3),
    ("tokens per forward", "tokens_per_forward", "tokens_per_forward", 2),
    ("forwards a sample (nfe)", "nfe_mean", None, 1),
    ("… after the end token", "nfe_post_eos_mean", None, 1),
    ("slots run a sample (token forwards)", "token_forwards_mean", None, 0),
    ("answer tokens a sample", "tokens_mean", None, 1),
    ("tokens a verify (acceptance length)", "acceptance_length", None, 2),
    ("drafts accepted a sample", "accepted_draft_tokens_mean", None, 1),
    ("drafts accepted of those proposed", "draft_acceptance_rate", None, 3),
    ("draft model's forwards a sample", "nfe_draft_mean", None, 1),
    ("revised tokens a sample", "revised_tokens_mean", None, 2),
    ("no answer found", "no_answer_rate", None, 3),
    ("truncated", "truncated_rate", None, 3),
    ("too long for the model", "too_long_rate", None, 3),
    ("failed", "failed_rate", None, 3),
    ("left to right (Kendall τ)", "order_kendall_tau", None, 2),
    ("tokens per second", "tokens_per_second", None, 0),
    ("tokens per second, one row", "tokens_per_second_batch1", None, 0),
    ("latency, median (s)", "latency_p50_seconds", None, 3),
    ("decoding time / time in the model", "overhead", None, 2),
    ("peak memory (GiB)", "memory_peak_gib", None, 2),
)
SHOWN_IF_POSITIVE = ("revised_tokens_mean", "too_long_rate", "failed_rate", "nfe_post_eos_mean", "nfe_draft_mean")


def console() -> Console:
    """Plain and wide enough for a log when the output is no terminal."""
    made = Console(markup=False, highlight=False)
    return made if made.is_terminal else Console(width=120, markup=False, highlight=False)


def print_notices(job: Job, folder: Path, kept: int) -> None:
    """What the user should know before decoding starts."""
    out = console()
    model, sampler, dataset = job.names
    where = device_line(job.description, job.config["trainer"])
    out.print(f"{sampler} on {model}, {len(job.samples)} samples of {dataset}, {where} → {folder}", soft_wrap=True)
    if job.description.notice:
        out.print(f"note: {job.description.notice}")
    if kept:
        out.print(f"continuing: {kept} of {len(job.samples)} samples are there already")
    if job.training_note:
        out.print(f"note: {job.training_note}", soft_wrap=True)
    if job.settings.dropped:
        out.print(f"not used by sampler={sampler}, dropped: {_pairs(job.settings.dropped)}")


def print_summary(summary: Summary, job: Job, folder: Path | None = None, tracked: str | None = None) -> None:
    """The closing table: figures with 95 % intervals, and the effective settings with where each came from."""
    out = console()
    out.print(f"\n{_title(summary)}", highlight=False, markup=False, soft_wrap=True)
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval")
    for label, name, interval, digits in FIGURES:
        value = summary.get(name)
        if value is not None and not (name in SHOWN_IF_POSITIVE and value == 0):
            table.add_row(label, f"{value:.{digits}f}", _interval(summary, interval, digits))
    out.print(table)
    if summary.get("failures"):
        out.print(summary["failures"], soft_wrap=True)
    if summary.get("accuracy") is None:
        out.print("accuracy: not scored, the samples carry no reference answer")
    out.print(f"settings: {settings_line(summary)}")
    if job.training_note:
        out.print(f"note: {job.training_note}", soft_wrap=True)
    if summary.get("mixed_hardware"):
        out.print("mixed hardware: rows differ in device, dtype, versions or max_rows; no tokens per second")
    if not summary["complete"]:
        out.print(f"incomplete: {summary['samples']} of {summary['samples_expected']} samples")
    for what, place in (("rows", folder and folder / "samples.jsonl"), ("W&B", tracked)):
        if place:
            out.print(f"{what}: {short(str(place))}", soft_wrap=True)


def settings_line(summary: Summary) -> str:
    """``gen_length=32 (protocol), prompt.template=chat (tokenizer), threshold=0.9 (preset), …``"""
    canvas = {"value": summary["gen_length"], "source": summary["gen_length_source"]}
    shown = {"gen_length": canvas}
    if "prompt_template" in summary:  # a run of an earlier version has none
        prompt = {"value": summary["prompt_template"], "source": summary["prompt_template_source"]}
        shown["prompt.template"] = prompt
    shown |= summary["settings"]
    parts = [f"{name}={entry['value']} ({entry['source']})" for name, entry in shown.items()]
    return ", ".join(part for part in parts if "=None " not in part)


def _title(summary: Summary) -> str:
    names = f"{summary['method']} on {summary['model']}, {summary['dataset']}"
    return f"{names}, {summary['samples']} samples, {summary['hardware_key']}, {summary['max_rows']} rows in flight"


def _interval(summary: Summary, stem: str | None, digits: int) -> str:
    low, high = (summary.get(f"{stem}_low"), summary.get(f"{stem}_high")) if stem else (None, None)
    return "" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def print_sweep(entries: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    """One line a job of a sweep, then what was dropped and merged."""
    out = console()
    table = Table(title=f"{len(entries)} jobs", title_justify="left")
    for name, key in (("model", "model"), ("sampler", "sampler"), ("dataset", "dataset"), ("settings", "varied")):
        whole = max((len(word) for entry in entries for word in entry[key].split()), default=0)
        least = None if out.is_terminal else min(whole, WORD)  # in a log lines are broken between words only
        table.add_column(name, overflow="fold", min_width=least)
    drafting = any((entry["summary"] or {}).get("acceptance_length") is not None for entry in entries)
    lengths = ["acceptance length"] if drafting else []
    for name in ("accuracy", "95 % interval", "tokens per forward", "nfe", *lengths, "state"):
        table.add_column(name, justify="right")
    for entry in entries:
        summary = entry["summary"] or {}
        table.add_row(
            entry["model"],
            entry["sampler"],
            entry["dataset"],
            entry["varied"],
            _number(summary.get("accuracy"), 3),
            _interval(summary, "accuracy", 3),
            _number(summary.get("tokens_per_forward"), 2),
            _number(summary.get("nfe_mean"), 1),
            *([_number(summary.get("acceptance_length"), 2)] if drafting else []),
            entry["state"],
        )
    if not out.is_terminal:
        out.width = max(out.width, min(Measurement.get(out, out.options.update(max_width=1000), table).maximum, LOG))
    out.print(table)
    for note in notes:
        out.print(note, soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
