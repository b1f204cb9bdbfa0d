"""The n-gram table of a sampler that drafts by one: read and counted here, because samplers read no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.files import parsed
from pipeline.metrics import count_visible
from pipeline.runs import settings_hash
from pipeline.settings import Settings
from samplers.ngram import NGram

if TYPE_CHECKING:
    from adapters.base import DeviceAdapter
    from adapters.description import Description

    Model = Description | DeviceAdapter

OPTION = "sampler.ngram_corpus"
RIGHT = "name a text, or the samples.jsonl of a finished run"
Corpus = Sequence[Sequence[int]]  # ids of each text by itself
Tables = Callable[[Sequence[int]], NGram]  # of a row, by its prompt


def corpus_of(settings: Settings, model: Model) -> Corpus | None:
    """What the file of ``sampler.ngram_corpus`` holds; None without one, or for a sampler that reads no table.

    Raises:
        UserError: for a file that cannot be read, holds nothing, or was written with another tokenizer.
    """
    named = settings.values["ngram_corpus"] if settings.sampler.reads_ngrams else None
    if named is None:
        return None
    path = Path(named).expanduser()
    corpus = _answers(path, model) if path.suffix == ".jsonl" else _text(path, model)
    if not any(corpus):
        raise UserError(f"{OPTION}={path} holds no token to count: {RIGHT}")
    return corpus


def tables_of(settings: Settings, corpus: Corpus | None) -> Tables | None:
    """The counted table of each row, by its prompt; None for a sampler that reads none.

    Without a corpus it is counted from the row's own prompt alone: no row may depend on its neighbours.
    """
    if not settings.sampler.reads_ngrams:
        return None
    order = settings.values["ngram_order"]
    if corpus is None:
        return lambda prompt: NGram([prompt], order)
    table = NGram(corpus, order)
    return lambda prompt: table


def corpus_hash(corpus: Corpus) -> str:
    """Of its ids: equal for equal tables, wherever the file lies."""
    return settings_hash([list(ids) for ids in corpus])


def _answers(path: Path, model: Model) -> list[list[int]]:
    """What the rows of a run answered, each up to its end token, and that too."""
    answers = []
    for row in _rows(path):
        ids = row.get("output_ids")
        if not isinstance(ids, list):
            raise UserError(f"{OPTION}={path} is no samples.jsonl: its row {row['id']} has no output_ids: {RIGHT}")
        if not _written_by(model, ids, row.get("raw_text")):
            raise UserError(
                f"{OPTION}={path} was written with another tokenizer than that of this model (row {row['id']}): use a "
                "run of the same model, or a text"
            )
        visible, ended = count_visible(ids, model.facts.end_ids)
        answers.append(ids[: visible + ended])
    return answers


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run; a torn last line is left out."""
    rows, lines = [], _read(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows += [parsed(line)] if line.strip() else []
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{OPTION}={path} is no samples.jsonl: its line {number} {error}: {RIGHT}") from error
    return rows


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        reason = "is not there"
    except IsADirectoryError:
        reason = "is a folder"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    raise UserError(f"{OPTION}={path} {reason}: {RIGHT}")


def _written_by(model: Model, ids: list[int], text: str | None) -> bool:
    """Whether a row's text is what this model's tokenizer makes of its ids."""
    known = all(isinstance(token, int) and 0 <= token < model.facts.vocab_size for token in ids)
    return known and (text is None or model.codec.decode(ids, raw=True) == text)


def _text(path: Path, model: Model) -> list[list[int]]:
    data = _read(path)
    try:
        return [model.codec.encode_raw([{"role": "user", "content": data.decode()}])] if data.strip() else []
    except ValueError as error:  # of no UTF-8, too
        raise UserError(f"{OPTION}={path} cannot be encoded: {error}") from error
