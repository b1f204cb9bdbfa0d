"""A checkpoint of torch.distributed.checkpoint, whose metadata may name nothing but the classes it is made of."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.checkpoints.fit import Shapes
from adapters.native import first_line

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

TRAINING = ("optim", "loops", "lr_schedulers", "callbacks")  # what a training keeps beside its network, by prefix


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
        if (module, name) == ("builtins", "getattr"):  # how some versions of Python write a member of an enumeration
            return _member
        dtype = module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype)
        if not dtype and (module, name) not in _HARMLESS:
            raise _StrangeError(f"{module}.{name}")
        return super().find_class(module, name)


def _member(owner: Any, name: str) -> Any:
    """In place of ``getattr``, which could reach anything."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise _StrangeError(f"getattr of {owner!r}")
    return owner[name]


def _reader(folder: Path) -> tuple[FileSystemReader, Metadata]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    try:
        with (folder / ".metadata").open("rb") as opened:
            metadata = _MetadataUnpickler(opened).load()
    except _StrangeError as error:
        raise ValueError(f"{folder}/.metadata names {error}, which is no part of a checkpoint's metadata") from error
    except Exception as error:  # bytes that are no pickle make the reader stumble anywhere
        raise ValueError(f"{folder}/.metadata cannot be read ({first_line(error)})") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{folder}/.metadata is no checkpoint's metadata: it holds a {type(metadata).__name__}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata  # torch's own would unpickle whatever the file names

    return Reader(folder), metadata
