"""A Hub over loopback: folders of models and datasets, served as huggingface_hub and datasets ask for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """The Hub: `root`/models/owner/name and `root`/datasets/owner/name, each with a commit per revision."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.gated: set[str] = set()
        self.asked: list[str] = []
        """Paths of all requests, in their order."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """Serve `root` until the block ends."""
    with Hub(root) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def commit_of(folder: Path) -> str:
    """A commit: 40 hexadecimal digits of what the folder holds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = (str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
    return hashlib.sha1(b"\0".join(parts)).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: `asked` has it."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if found := _FILE.fullmatch(path):
            kind, name, revision, file = found.groups()
            self._file(kind or "models", name, revision, file)
        elif found := _API.fullmatch(path):
            self._api(*found.groups())
        else:
            self._send(404, b"{}")

    def _folder(self, kind: str, name: str, revision: str | None) -> Path | None:
        """The repository's folder; an answer has been sent for None."""
        folder = self.server.root / kind / name
        if name in self.server.gated and not self.headers.get("Authorization"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not folder.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", "v1", commit_of(folder)):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return folder
        return None

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        folder = self._folder(kind, name, revision)
        if folder is None:
            return
        head = {"X-Repo-Commit": commit_of(folder)}
        if not (folder / file).is_file():
            return self._send(404, b"", head | {"X-Error-Code": "EntryNotFound"})
        body = (folder / file).read_bytes()
        self._send(200, body, head | {"ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

    def _api(self, kind: str, name: str, what: str | None, revision: str | None, below: str | None) -> None:
        folder = self._folder(kind, name, revision)
        if folder is None:
            return
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if what in ("tree", "paths-info"):
            listed: Any = [
                {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": "0" * 40}
                for file in files
                if not below or file.startswith(f"{below}/")
            ]
        else:
            sha = commit_of(folder)
            listed = {"_id": sha[:24], "id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]}
            listed |= {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
            listed |= {"lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z"}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
