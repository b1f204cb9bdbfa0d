"""Names and shapes out of the headers of ``.safetensors`` files; torch is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.checkpoints.files import INDEX, weight_files, weight_map
from adapters.checkpoints.fit import Shapes, Stored


def stored(folder: Path) -> Stored | None:
    """What a folder's files hold, or the names alone from its index if a file is absent.

    None if the folder has neither.

    Raises:
        ValueError: one sentence, if a file is broken.
    """
    index = folder / INDEX
    if index.is_file():
        homes = weight_map(index)
        if not all((folder / file).is_file() for file in homes.values()):
            return dict.fromkeys(homes)
    elif not any(folder.glob("*.safetensors")):
        return None
    return dict(shapes(weight_files(folder)))


def shapes(files: list[Path]) -> Shapes:
    """Of all tensors in the files.

    Raises:
        ValueError: one sentence, if a file is not whole, or a name occurs twice.
    """
    found: Shapes = {}
    homes: dict[str, Path] = {}
    for file in files:
        with opened(file, "numpy") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                refuse_twin(name, file, homes)
                found[name] = tuple(shard.get_slice(name).get_shape())
    return found


def integers(files: list[Path]) -> dict[str, str]:
    """Tensors of whole numbers and of truth values, and what the header calls their dtype.

    Raises:
        ValueError: one sentence, if a file is not whole.
    """
    found: dict[str, str] = {}
    for file in files:
        with opened(file, "numpy") as shard:
            dtypes = {name: str(shard.get_slice(name).get_dtype()) for name in shard.keys()}  # noqa: SIM118
        found |= {name: dtype for name, dtype in dtypes.items() if dtype[0] in "IU" or dtype == "BOOL"}
    return found


def whole_numbers(dtype: str) -> str:
    """What to tell of a weight that is one of `integers`."""
    return f"is {dtype}, no floating-point weight: of a quantised model, config.json states the quantization_config"


def refuse_twin(name: str, file: Path, homes: dict[str, Path]) -> None:
    """Note in ``homes`` where a tensor lies.

    Raises:
        ValueError: if it lies in another file as well.
    """
    if name in homes:
        raise ValueError(f"{file.parent}: {name} lies in {homes[name].name} and in {file.name}")
    homes[name] = file


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """A ``.safetensors`` file whose tensors come as ``pt`` or ``numpy``.

    Raises:
        ValueError: one sentence, if it is not whole.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework=framework) as shard:
            yield shard
    except PermissionError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror or error}): let this user read it") from error
    except (SafetensorError, OSError) as error:
        with file.open("rb") as start:
            if start.read(40).startswith(b"version https://git-lfs"):
                raise ValueError(f"{file} is a pointer of Git LFS, not the weights: run git lfs pull") from error
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} is no whole .safetensors file ({type(error).__name__}: {reason})") from error
