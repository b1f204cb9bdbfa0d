"""A repository of the hub, file by file: what there is, what is here, and whether what came is what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.native import first_line

CHUNK = 2**22  # bytes hashed at a time


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub states it.

    Attributes:
        size: bytes.
        sha256: of the content, where the hub stores the file apart from git, as all weights.
        blob: git's own id of the content, where it lies in git.
    """

    name: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def is_weights(self) -> bool:
        return self.name.endswith((".safetensors", ".bin"))


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, with those of its files that a run needs.

    Attributes:
        hub: its id.
        kind: ``model`` or ``dataset``.
        revision: what was asked for, a branch, a tag or a commit.
        commit: what that is now.
    """

    hub: str
    kind: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]

    def matching(self, patterns: list[str]) -> Repository:
        """With only the files whose names match."""
        from huggingface_hub.utils import filter_repo_objects

        names = set(filter_repo_objects([file.name for file in self.files], allow_patterns=patterns))
        return replace(self, files=tuple(file for file in self.files if file.name in names))

    def cached(self, file: RemoteFile) -> Path | None:
        """Where the file lies in the cache, if it does."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.hub, file.name, revision=self.commit, repo_type=self.kind)
        return Path(found) if isinstance(found, str) else None

    @property
    def folder(self) -> Path:
        """Of the files in the cache."""
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=self.hub, repo_type=self.kind)
        return cache_folder() / name / "snapshots" / self.commit

    @property
    def absent(self) -> list[RemoteFile]:
        """Files not in the cache, the small ones first."""
        return sorted((file for file in self.files if not self.cached(file)), key=lambda file: (file.size, file.name))


def cache_folder() -> Path:
    """Where the hub's library keeps what it fetched."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def look_up(hub: str, revision: str | None, kind: str = "model") -> Repository:
    """Ask the hub what a repository holds.

    Raises:
        ValueError: one sentence, if it is out of reach, closed to us, or holds no such revision.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _in_words(hub, revision):
        ask = api.dataset_info if kind == "dataset" else api.model_info
        info = ask(hub, revision=revision, files_metadata=True)
    assert info.sha is not None
    files = tuple(
        RemoteFile(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in info.siblings or []
    )
    return Repository(hub, kind, revision or "main", info.sha, files)


def fetch(repository: Repository, file: RemoteFile) -> Path:
    """Put a file into the cache, unless it is there, and check what came.

    Raises:
        ValueError: one sentence, if it does not come, or is not what the hub states; then it is removed again.
    """
    from huggingface_hub import hf_hub_download

    with _in_words(repository.hub, repository.revision):
        path = hf_hub_download(repository.hub, file.name, revision=repository.commit, repo_type=repository.kind)
    check_content(Path(path), file)
    return Path(path)


def check_content(path: Path, file: RemoteFile) -> None:
    """Compare a cached file with what the hub states of it; one that differs is removed from the cache.

    Raises:
        ValueError: one sentence, if it differs.
    """
    size = path.stat().st_size
    if size == file.size and _hash(path, file, size) in (file.sha256 or file.blob, None):
        return
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    kind = "sha256" if file.sha256 else "blob"
    said = f"{file.size} bytes" if size != file.size else f"{kind} {file.sha256 or file.blob}"
    raise ValueError(
        f"{file.name} is not what the hub states ({said}): it was removed from the cache, run the same command again; "
        "if that does not help, the file is broken on the hub or on its mirror"
    )


def _hash(path: Path, file: RemoteFile, size: int) -> str | None:
    """The content's hash, of the kind that the hub states; None if it states none."""
    if not file.sha256 and not file.blob:
        return None
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as opened:
        while part := opened.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def _in_words(hub: str, revision: str | None) -> Iterator[None]:
    """Tell the faults of hub, network and disk in one sentence."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ValueError(f"HF_HUB_OFFLINE=1 forbids to fetch {hub}: unset it where there is a network") from error
    except GatedRepoError as error:
        raise ValueError(f"{hub} is gated: accept its terms on its page and log in with hf auth login") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{hub} is not on the hub, or is private: check the id, or log in with hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{hub} has no revision {revision}: use a branch, a tag or a commit of it") from error
    except HFValidationError as error:
        raise ValueError(f"{hub} is no id of a repository: {first_line(error)}") from error
    except HfHubHTTPError as error:
        raise ValueError(f"{hub} could not be fetched: the hub answered {error.response.status_code}") from error
    except Exception as error:  # faults of the network have no common class
        raise ValueError(
            f"{hub} could not be fetched ({first_line(error)}): run this where the hub is in reach; "
            "what was fetched so far is kept"
        ) from error
