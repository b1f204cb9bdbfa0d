"""The evaluation of a job as a Lightning module: each rank decodes its own shard and writes its own rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.utils.data import DataLoader

from adapters.base import DeviceAdapter
from adapters.description import Description
from adapters.loading import load
from pipeline.devices import device_type
from pipeline.engine import Engine, Outcome, Task
from pipeline.errors import UserError
from pipeline.files import encoded, replace_file
from pipeline.job import Job
from pipeline.metrics import Timing
from pipeline.progress import Progress
from pipeline.quiet import quiet_libraries
from pipeline.ranks import barrier, nodes, world
from pipeline.rows import Place, decided, make_row, visible
from pipeline.runs import RunFolder
from pipeline.stopping import Stopped, stopping_on_signals
from pipeline.traces import make_header

# options of a model that are spent at loading
BUILT_IN = ("base", "base_revision", "quantization", "device_map", "attention_kernel", "compile")
_loaded: dict[str, DeviceAdapter] = {}  # the last model: jobs of a sweep that share it read it once


def load_model(description: Description, device: torch.device, logits_mib: int) -> DeviceAdapter:
    """The model's adapter; the last one loaded is kept."""
    built = {option: vars(description.options)[option] for option in BUILT_IN}
    key = f"{description.identity()} {description.dtype} {device} {json.dumps(built, sort_keys=True)}"
    if key not in _loaded:
        _loaded.clear()
        try:
            _loaded[key] = load(description, device, logits_mib)
        except ValueError as error:
            raise UserError(str(error)) from error
    adapter = _loaded[key]
    adapter.facts, adapter.codec = description.facts, description.codec
    adapter.read_out.mask_id, adapter.read_out.bytes = description.facts.mask_id, logits_mib * 2**20
    adapter.read_out.confidence_dtype = description.options.confidence_dtype
    return adapter


class Evaluation(lightning.LightningModule):
    """Decodes, scores and writes the samples named by ``indices``; the language model is not a submodule of it."""

    def __init__(self, job: Job, indices: list[int], folder: Path, versions: str, commit: str | None) -> None:
        super().__init__()
        self.job, self.indices, self.folder = job, indices, folder
        self.versions, self.commit = versions, commit

        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer samples missing than processes

    def __setstate__(self, state: dict[str, Any]) -> None:
        quiet_libraries()  # the first of our code that a spawned process runs
        super().__setstate__(state)

    def teardown(self, stage: str) -> None:
        """Close what Lightning opened between spawned ranks: its threads can abort a process that exits with them."""
        if world()[1] == 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def predict_dataloader(self) -> DataLoader:
        """This rank's shard: sharded here, because a distributed sampler may repeat samples."""
        shard = self.indices[self.global_rank :: self.trainer.world_size]
        return DataLoader(shard, batch_size=None)  # type: ignore[arg-type]

    def predict_step(self, dataloader_iter: Iterator) -> None:
        """The whole shard in one step, so that rows are refilled across what would be batches."""
        shard = [int(index) for index, _, _ in dataloader_iter]
        engine_options, settings = self.job.config["engine"], self.job.settings
        device = self.trainer.strategy.root_device
        adapter = load_model(self.job.description, device, engine_options["logits_mib"])
        folder = RunFolder(self.folder)
        traced = len(self.job.samples) if engine_options["trace"] else engine_options["trace_samples"]
        tasks = [make_task(self.job, index, index < traced) for index in shard]
        engine = Engine(adapter, settings.sampler, min(engine_options["max_rows"], max(1, len(tasks))), folder.beat)
        engine.ngrams = self.job.ngrams
        began = time.perf_counter()
        with self._own_signals(), Progress(len(tasks), shown=self.global_rank == 0) as progress:
            timing = self._decode(engine, tasks, folder, progress)
        timing["end_to_end_seconds"] = time.perf_counter() - began
        timing["memory_peak_gib"] = memory_peak_gib(device)
        folder.write_json(f"timing.rank{self.global_rank}.json", timing)

    def _own_signals(self) -> AbstractContextManager[None]:
        """Lightning answers SIGTERM with a broadcast that may never end; what it spawned, its parent ends."""
        return stopping_on_signals() if self.trainer.strategy.launcher is None else nullcontext()

    def _place(self, device: torch.device) -> Place:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        max_rows = self.job.config["engine"]["max_rows"]
        return Place(name, self.job.description.dtype, max_rows, self.versions, self.commit)

    def _decode(self, engine: Engine, tasks: list[Task], folder: RunFolder, progress: Progress) -> dict[str, Any]:
        """Write a row as each sample finishes; the clock of decoding stands still meanwhile."""
        place = self._place(self.trainer.strategy.root_device)
        engine.warm_up(tasks, self.job.slots)
        tokens, seconds, outcomes = 0, 0.0, engine.decode(tasks, self.job.slots)
        while True:
            began = time.perf_counter()
            outcome = next(outcomes, None)
            seconds += time.perf_counter() - began
            if outcome is None:
                break
            row = make_row(self.job, outcome, place)
            folder.append(row, self.global_rank)
            self._write_trace(outcome)
            progress.add(row)
            tokens += row["tokens"] or 0
        return {"decode_seconds": seconds, "forward_seconds": engine.forward_seconds, "decoded_tokens": tokens}

    def _write_trace(self, outcome: Outcome) -> None:
        """``trace/<index>.jsonl``: an id may hold what a file name may not."""
        if outcome.trace:
            lines = [encoded(line) for line in (make_header(self.job, outcome), *outcome.trace)]
            replace_file(self.folder / "trace" / f"{outcome.task.index}.jsonl", b"".join(lines))


def make_task(job: Job, index: int, traced: bool = False) -> Task:
    """A sample as the engine takes it."""
    return Task(index, job.prompts[index], job.settings.gen_length, job.stream(index), traced)


def measure_latency(job: Job) -> tuple[list[float], int]:
    """The timed pass: seconds of each of the first samples, one row in flight and nothing written, and their tokens."""
    engine_options = job.config["engine"]
    device = torch.device(device_type(job.config["trainer"]["accelerator"]))
    adapter = load_model(job.description, device, engine_options["logits_mib"])
    engine = Engine(adapter, job.settings.sampler, max_rows=1, ngrams=job.ngrams)
    tasks = [make_task(job, index) for index in range(min(engine_options["timing_samples"], len(job.samples)))]
    engine.warm_up(tasks, job.slots)
    outcomes = [outcome for outcome in engine.decode(tasks, job.slots) if outcome.failure is None]
    tokens = sum(len(visible(job, decided(outcome.state)).ids) for outcome in outcomes if outcome.state)
    return [outcome.seconds for outcome in outcomes], tokens


def evaluate(job: Job, indices: list[int], folder: Path, versions: str, commit: str | None) -> Timing:
    """Decode the given samples of a job into its folder, on as many devices as the trainer says.

    Raises:
        Stopped: on a signal; rows so far are in the folder.
    """
    quiet_libraries()  # again: Lightning has been imported since
    options, outside = job.config["trainer"], world()[1] > 1
    devices = int(os.environ["LOCAL_WORLD_SIZE"]) if outside else options["devices"]
    trainer = lightning.Trainer(
        accelerator=device_type(options["accelerator"]) if options["accelerator"] == "auto" else options["accelerator"],
        devices=devices,
        num_nodes=nodes(),
        strategy="ddp" if outside else "ddp_spawn" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Evaluation(job, indices, folder, versions, commit)
    try:
        trainer.predict(module, return_predictions=False)
    except torch.multiprocessing.ProcessExitedException as error:
        if not set(indices) <= {row["index"] for row in RunFolder(folder).rows()}:
            raise
        print(f"note: a process ended badly, but after its last row was written ({error})", flush=True)
    except Stopped:
        _end_processes(trainer)
        raise
    barrier()
    return _gather_timing(folder, trainer.world_size) if world()[0] == 0 else Timing()


def _end_processes(trainer: lightning.Trainer) -> None:
    """End what Lightning spawned: at once, for it takes SIGTERM as a wish; no row may follow the run's last status."""
    launcher = trainer.strategy.launcher
    for process in launcher.procs if isinstance(launcher, _MultiProcessingLauncher) else ():
        process.kill()
        process.join()


def _gather_timing(folder: Path, devices: int) -> Timing:
    """Ranks decode side by side: the slowest sets the time, tokens add up, and so do seconds in the model, by share."""
    ranks = []
    for file in sorted(folder.glob("timing.rank*.json")):
        ranks.append(json.loads(file.read_text()))
        file.unlink()
    if not ranks:
        return Timing(devices=devices)
    slowest = max(ranks, key=lambda rank: rank["decode_seconds"])
    memory = [rank["memory_peak_gib"] for rank in ranks if rank["memory_peak_gib"] is not None]
    return Timing(
        decode_seconds=slowest["decode_seconds"],
        forward_seconds=slowest["forward_seconds"],
        end_to_end_seconds=max(rank["end_to_end_seconds"] for rank in ranks),
        decoded_tokens=sum(rank["decoded_tokens"] for rank in ranks),
        devices=devices,
        memory_peak_gib=max(memory) if memory else None,
    )


def memory_peak_gib(device: torch.device) -> float | None:
    """Peak memory of the device; on a CPU that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type != "cpu":
        return None
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB
