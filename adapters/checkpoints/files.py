"""The files of a model's folder: which of them are weights, what their indices say, what all of them come to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]
LORA_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: one sentence, if it cannot be read, or holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    except (PermissionError, IsADirectoryError) as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def weight_map(index: Path) -> dict[str, str]:
    """The file that each tensor lies in, as an index says.

    Raises:
        ValueError: one sentence, if it is no index.
    """
    try:
        return {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of shards ({type(error).__name__}: {error})") from error


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights: those its index names, else all of their kind; ``.bin`` only if need be.

    Raises:
        ValueError: if there are none, or one that the index names is absent.
    """
    for single, pattern in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(folder, index)
        if (folder / single).is_file():
            return [folder / single]
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"{folder} holds no weights: neither .safetensors nor pytorch_model.bin")


def _indexed(folder: Path, index: Path) -> list[Path]:
    named = sorted(set(weight_map(index).values()))
    if missing := [name for name in named if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing[:3])}, which its {index.name} names")
    return [folder / name for name in named]


def lora_files(folder: Path) -> list[Path]:
    """The one file of a LoRA's weights.

    Raises:
        ValueError: if there is none.
    """
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"{folder} has {LORA_CONFIG} but no adapter_model.safetensors")


def content_hash(files: list[Path]) -> str:
    """sha256 over the files' contents, cached by path, size and time of change."""
    cache_file = Path.home() / ".cache" / "blockdiff" / "hashes.json"
    try:
        cache = json.loads(cache_file.read_text())
    except (OSError, json.JSONDecodeError):
        cache = {}
    digests = [f"{file.name} {_digest(file, cache)}" for file in files if file.is_file()]
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        cache_file.write_text(json.dumps(cache))
    except OSError:
        pass  # a read-only home costs time, nothing else
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _digest(file: Path, cache: dict[str, str]) -> str:
    stat = file.stat()
    key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    if key not in cache:
        with file.open("rb") as opened:
            cache[key] = hashlib.file_digest(opened, "sha256").hexdigest()
    return cache[key]
