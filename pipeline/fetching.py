"""Fetching one repository of the hub: what is announced, what must fit on the disk, and in which order it comes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import UserError

if TYPE_CHECKING:
    from adapters.checkpoints.hub import Repository

ROOM = 2**28  # bytes left free beside what is fetched: locks, links, and what else is written meanwhile


@dataclass(frozen=True)
class Wanted:
    """One thing to fetch: what the command line calls it, where it lies, and the option that pins it."""

    label: str
    repository: Repository
    option: str

    @property
    def pins(self) -> list[str]:
        """The override that fixes the commit, unless it is fixed already."""
        fixed = self.repository.revision == self.repository.commit
        return [] if fixed else [f"{self.label}: {self.option}={self.repository.commit}"]


def fetch_and_check(wanted: Wanted) -> None:
    """Fetch what is not here; the small files first: they tell whether the weights are worth it.

    Raises:
        UserError: if the disk is too small.
        ValueError: one sentence, if something does not come, is not what the hub states, or cannot be served.
    """
    from adapters.checkpoints.arrival import check_plan
    from adapters.checkpoints.hub import check_content, fetch

    repository = wanted.repository
    _announce(wanted)
    for file in repository.files:  # what an earlier call left is checked too, before anything is added to it
        if path := repository.cached(file):
            check_content(path, file)
    for file in [file for file in repository.absent if not file.is_weights]:
        fetch(repository, file)
    if repository.kind == "model":
        check_plan(repository)
    for file in repository.absent:
        fetch(repository, file)
    print(f"{wanted.label}: {len(repository.files)} files are what the hub states")


def _announce(wanted: Wanted) -> None:
    """Print what is to be fetched; refuse what does not fit on the disk."""
    from adapters.checkpoints.hub import cache_folder

    repository, cache = wanted.repository, cache_folder()
    absent = repository.absent
    print(f"{wanted.label}: {repository.hub} at {repository.revision} (commit {repository.commit})")
    for file in sorted(repository.files, key=lambda file: file.name):
        print(f"  {file.name:<44} {on_disk(file.size):>10}{'' if file in absent else '  here already'}")
    place = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    needed, free = sum(file.size for file in absent), shutil.disk_usage(place).free
    print(f"  to fetch: {len(absent)} files, {on_disk(needed)}, to {cache}, where {on_disk(free)} are free", flush=True)
    if needed and needed + ROOM > free:
        raise UserError(
            f"{wanted.label} needs {on_disk(needed + ROOM)} in {cache}, where {on_disk(free)} are free: "
            "make room, or set HF_HOME to a folder on a larger disk"
        )


def on_disk(count: int) -> str:
    """Bytes as a person reads them, in powers of 1000 as disks are sold."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
