"""A hub on this machine: an HTTP server with the few addresses that huggingface_hub and datasets ask for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

APART = (".safetensors", ".parquet")  # stored apart from git, with a sha256


class Hub:
    """Repositories by ``model/owner/name`` or ``dataset/owner/name``: one commit each, files by name.

    Attributes:
        corrupt: names of files that are sent with one byte changed.
        stall: name of a file of which only half is sent, until `released` is set.
        sent: how often each file was sent.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.corrupt: set[str] = set()
        self.stall: str | None = None
        self.stalled, self.released = threading.Event(), threading.Event()
        self.sent: Counter[str] = Counter()
        self.url = ""

    def add(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """Returns the commit."""
        self.repositories[f"{kind}/{name}"] = files
        return self.commit(f"{kind}/{name}")

    @staticmethod
    def commit(key: str) -> str:
        return hashlib.sha1(key.encode()).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(posted=self.rfile.read(length).decode())

    def _answer(self, body: bool = True, posted: str = "") -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if found := re.fullmatch(
            r"api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path
        ):
            return self._api(*found.groups(), posted)
        if found := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(f"{'dataset' if found[1] else 'model'}/{found[2]}", found[3], found[4], body)
        self._json({"error": "no such address"}, 404)

    def _api(
        self, kind: str, name: str, what: str | None, revision: str | None, below: str | None, posted: str
    ) -> None:
        key = f"{kind}/{name}"
        if key not in self.hub.repositories:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        commit = self.hub.commit(key)
        if revision not in (None, "main", commit):
            return self._json({"error": "Invalid rev"}, 404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.repositories[key]
        if what == "tree":
            inside = [file for file in files if not below or file.startswith(f"{below}/")]
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
            return self._json(_level(files, inside, below or "", recursive))
        if what == "paths-info":
            asked = json.loads(posted)["paths"] if posted.startswith("{") else parse_qs(posted).get("paths", [])
            known = [_entry(file, files[file]) for file in files if file in asked]
            folders = {file.rpartition("/")[0] for file in files} & set(asked)
            return self._json(
                [*known, *({"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in folders)]
            )
        siblings = [_sibling(file, content) for file, content in files.items()]
        self._json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings, "downloads": 0})

    def _file(self, key: str, revision: str, file: str, body: bool) -> None:
        content, commit = self.hub.repositories.get(key, {}).get(file), self.hub.commit(key)
        if content is None or revision not in ("main", commit):
            return self._json(
                {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            )
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_etag(file, content)}"')
        self.send_header("X-Repo-Commit", commit)
        if file.endswith(APART):
            self.send_header("X-Linked-Etag", f'"{_etag(file, content)}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.end_headers()
        if body:
            self.hub.sent[file] += 1
            self._send(file, content)

    def _send(self, file: str, content: bytes) -> None:
        if file in self.hub.corrupt:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if file == self.hub.stall:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.released.wait(60)
            content = content[len(content) // 2 :]
        with suppress(OSError):  # the other side has gone
            self.wfile.write(content)

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _etag(file: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if file.endswith(APART) else _blob(content)


def _lfs(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "pointerSize": 134}


def _sibling(file: str, content: bytes) -> dict[str, Any]:
    plain = {"rfilename": file, "size": len(content), "blobId": _blob(content)}
    return {**plain, "lfs": {**_lfs(content), "sha256": _etag(file, content)}} if file.endswith(APART) else plain


def _entry(file: str, content: bytes) -> dict[str, Any]:
    plain = {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}
    return {**plain, "lfs": {**_lfs(content), "oid": _etag(file, content)}} if file.endswith(APART) else plain


def _level(files: dict[str, bytes], inside: list[str], below: str, recursive: bool) -> list[dict[str, Any]]:
    """Entries of a folder, or of all below it."""
    if recursive:
        return [_entry(file, files[file]) for file in inside]
    skip = len(below) + 1 if below else 0
    here = [_entry(file, files[file]) for file in inside if "/" not in file[skip:]]
    folders = {file[: skip + file[skip:].index("/")] for file in inside if "/" in file[skip:]}
    return [*here, *({"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders))]
