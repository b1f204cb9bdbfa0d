"""The tensors of a checkpoint, whatever its layout: first all names and shapes, then one tensor at a time.

Nothing here runs code that a file brings along, unless the user says that the file is trusted.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from adapters.native import first_line
from adapters.places import Place, weight_files

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

Shapes = dict[str, tuple[int, ...]]
TRAINING = ("optim", "loops", "lr_schedulers", "callbacks")  # what a training keeps beside its network, by prefix


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
        found: Shapes = {}
        homes: dict[str, Path] = {}
        for file in self.files:
            with _opened(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                    _refuse_twin(name, file, homes)
                    found[name] = tuple(shard.get_slice(name).get_shape())
        return found

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            with _opened(file) as shard:
                for name in shard.keys():  # noqa: SIM118
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
                _refuse_twin(name, file, homes)
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
            return torch.load(file, map_location="cpu", weights_only=not self.trusted, mmap=mapped)
        except pickle.UnpicklingError as error:
            kinds = re.findall(r"GLOBAL ([\w.]+) was not", str(error)) or ["something that is no tensor"]
            raise ValueError(self._distrust(file, kinds[0])) from error
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"{file} is no whole file of torch.save ({first_line(error)})") from error

    def _distrust(self, file: Path, kind: str) -> str:
        return f"{file} holds {kind}, which could run code when read: convert it to .safetensors"


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


class DistributedCheckpoint:
    """A folder of torch.distributed.checkpoint (FSDP, FSDP2); its shards are put together without process groups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader, self.metadata = _reader(folder)

    def shapes(self) -> Shapes:
        for part in (self.metadata.storage_data or {}).values():
            file = self.folder / part.relative_path
            if not file.is_file():
                raise ValueError(f"{self.folder} lacks {file.name}, which its .metadata names")
            if (size := file.stat().st_size) < part.offset + part.length:
                raise ValueError(
                    f"{file} is cut short: its .metadata says {part.offset + part.length} bytes, not {size}"
                )
        sized = self.metadata.state_dict_metadata.items()
        return {n: tuple(m.size) for n, m in sized if hasattr(m, "size") and not n.startswith(TRAINING)}

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self.shapes().items():
            if names is None or name in names:
                described: Any = self.metadata.state_dict_metadata[name]
                tensor = torch.empty(shape, dtype=described.properties.dtype)
                self._read(name, tensor)
                yield name, tensor

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        from torch.distributed.checkpoint import CheckpointException, load

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group
                load({name: tensor}, storage_reader=self.reader, no_dist=True)
        except CheckpointException as error:  # of one rank, ours
            cause, _ = next(iter(error.failures.values()))
            raise ValueError(f"{self.folder}: {name} cannot be read ({type(cause).__name__}: {cause})") from error


def _refuse_twin(name: str, file: Path, homes: dict[str, Path]) -> None:
    if name in homes:
        raise ValueError(f"{file.parent}: {name} lies in {homes[name].name} and in {file.name}")
    homes[name] = file


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            if opened.read(40).startswith(b"version https://git-lfs"):
                raise ValueError(f"{file} is a pointer of Git LFS, not the weights: run git lfs pull") from error
        raise ValueError(f"{file} is no whole .safetensors file ({first_line(error)})") from error


# ---- the metadata of a distributed checkpoint is a pickle: it may name only the classes it is made of -----------

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_HARMLESS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("_MEM_FORMAT_ENCODING",)),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    *{("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")},
}


class _StrangeError(Exception):
    """Names what a metadata file must not."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype)
        if not dtype and (module, name) not in _HARMLESS:
            raise _StrangeError(f"{module}.{name}")
        return super().find_class(module, name)


def _reader(folder: Path) -> tuple[FileSystemReader, Metadata]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    try:
        with (folder / ".metadata").open("rb") as opened:
            metadata: Metadata = _MetadataUnpickler(opened).load()
    except _StrangeError as error:
        raise ValueError(f"{folder}/.metadata names {error}, which is no part of a checkpoint's metadata") from error
    except (pickle.UnpicklingError, EOFError, OSError, AttributeError) as error:
        raise ValueError(f"{folder}/.metadata cannot be read ({first_line(error)})") from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata  # torch's own would unpickle whatever the file names

    return Reader(folder), metadata
