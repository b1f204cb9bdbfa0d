"""The tensors of a checkpoint, whatever its layout: first all names and shapes, then one tensor at a time.

Nothing here runs code that a file brings along, unless the user says that the file is trusted.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from adapters.checkpoints import headers
from adapters.checkpoints.distributed import DistributedCheckpoint
from adapters.checkpoints.files import weight_files
from adapters.checkpoints.fit import Shapes
from adapters.native import first_line
from adapters.places import Place


class Checkpoint(Protocol):
    """What the loader needs of a layout. Both methods raise ValueError, one sentence, if a file is not whole."""

    def shapes(self) -> Shapes:
        """Names and shapes of all tensors, read from the headers.

        Raises:
            ValueError: also if a name occurs twice.
        """

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors or those ``names``, each read when it is reached; they are gone when the next one is."""


def checkpoint(place: Place, trusted: bool) -> Checkpoint:
    """The checkpoint that lies at a place."""
    if place.file is not None and place.file.is_dir():
        return DistributedCheckpoint(place.file)
    if place.file is not None:
        return LightningCheckpoint([place.file], trusted)
    return stored_tensors(place.folder)


def stored_tensors(folder: Path) -> Checkpoint:
    """The tensors of a model folder.

    Raises:
        ValueError: if it has none.
    """
    files = weight_files(folder)
    return PickledShards(files) if files[0].suffix == ".bin" else SafetensorsShards(files)


class SafetensorsShards:
    """Files of the safetensors format. One is open at a time, so that no more than its pages count as memory."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def shapes(self) -> Shapes:
        return headers.shapes(self.files)

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            with headers.opened(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                    if names is None or name in names:
                        yield name, shard.get_tensor(name)


class PickledShards:
    """Files of ``torch.save`` that hold tensors by name; mapped, so that a tensor is read when it is used."""

    trusted = False

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def shapes(self) -> Shapes:
        found: Shapes = {}
        homes: dict[str, Path] = {}
        for file in self.files:
            for name, tensor in self._content(file).items():
                headers.refuse_twin(name, file, homes)
                found[name] = tuple(tensor.shape)
        return found

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            for name, tensor in self._content(file).items():
                if names is None or name in names:
                    yield name, tensor

    def _content(self, file: Path) -> dict[str, torch.Tensor]:
        content = self._tensors(file, self._unpickled(file))
        if strange := [name for name, value in content.items() if not isinstance(value, torch.Tensor)]:
            raise ValueError(f"{file} holds {strange[0]}, which is a {type(content[strange[0]]).__name__}, no tensor")
        return content

    def _tensors(self, file: Path, content: Any) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise ValueError(f"{file} holds a {type(content).__name__}, no tensors by name")
        return content

    def _unpickled(self, file: Path) -> Any:
        mapped = zipfile.is_zipfile(file)  # older files can't be
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # of no matter to tensors
                return torch.load(file, map_location="cpu", weights_only=not self.trusted, mmap=mapped)
        except Exception as error:  # a file that is no pickle makes the reader stumble anywhere
            if isinstance(error, pickle.UnpicklingError) and (kind := _foreign(str(error))):
                raise ValueError(self._distrust(file, kind)) from error
            if not self.trusted and (protocol := _protocol(file)) > 2:  # torch's restricted reader knows no later one
                raise ValueError(self._distrust(file, f"a pickle of protocol {protocol}")) from error
            if isinstance(error, ImportError) or "Can't get attribute" in str(error):
                raise ValueError(f"{file} holds what this environment has no code for ({first_line(error)})") from error
            raise ValueError(f"{file} is no whole file of torch.save ({_reason(error)})") from error

    def _distrust(self, file: Path, kind: str) -> str:
        return f"{file} holds {kind}, which could run code when read: convert it to .safetensors"


def _foreign(message: str) -> str | None:
    """What torch's restricted reader found that is no tensor; None if it just could not read on."""
    for pattern in _FOREIGN:
        if found := re.search(pattern, message):
            return found[1]
    return None


def _protocol(file: Path) -> int:
    """Of the pickle in a file of ``torch.save``, or of a plain one; 0 if it says none."""
    try:
        with zipfile.ZipFile(file) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            start = archive.open(inner).read(2)
    except (zipfile.BadZipFile, StopIteration):
        with file.open("rb") as opened:
            start = opened.read(2)
    return start[1] if len(start) == 2 and start[0] == 0x80 and start[1] <= pickle.HIGHEST_PROTOCOL else 0


def _reason(error: Exception) -> str:
    """Why a file could not be read, without torch's advice to read it by other means."""
    told = re.search(r"WeightsUnpickler error:\s*([^\n]+)", str(error))
    return told[1].strip() if told else first_line(error)


# sentences of torch's restricted reader that name what a file would have run
_FOREIGN = (
    r"GLOBAL ([\w.]+) was not",
    r"unsupported GLOBAL ([\w.]+)",
    r"unrecognized function (<.+?>)",
    r"allowlisted\s+via `add_safe_globals`,? but got (<class .+?>)",
    r"to instantiate class ([\w.]+)",
    r"``(torch\.[\w.]+)``.* must be imported",
)


class LightningCheckpoint(PickledShards):
    """A Lightning ``.ckpt``: the tensors under ``state_dict``, among other content."""

    def __init__(self, files: list[Path], trusted: bool) -> None:
        super().__init__(files)
        self.trusted = trusted

    def _tensors(self, file: Path, content: Any) -> dict[str, Any]:
        state = content.get("state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            raise ValueError(f"model.path={file} is no Lightning checkpoint: it holds no state_dict")
        return state

    def _distrust(self, file: Path, kind: str) -> str:
        return (
            f"model.path={file} holds {kind}, which could run code when read: "
            "set model.trust_checkpoint=true only if you know where the file is from"
        )
