"""A Hub over loopback: folders of models and datasets, served as huggingface_hub and datasets ask for them.

Uploads of models are taken as the Hub takes them: a repository is made, modes of upload are said, large files come by
LFS, and a commit puts all of it in place.
"""

import base64
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

import yaml

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_UPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)")
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
        self.writers: set[str] = set()
        """Tokens that may write."""
        self.private: set[str] = set()
        """Repositories that were made private."""
        self.blobs: dict[str, bytes] = {}
        """SHA-256 → a large file that was uploaded."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """Serve `root` until the block ends."""
    with Hub(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
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


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"


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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            self.server.asked.append(path)
            self._validate(json.loads(body)["content"])
        elif path == "/api/repos/create" or _UPLOAD.fullmatch(path) or _LFS.fullmatch(path):
            self.server.asked.append(path)
            if self._may_write():
                self._take(path, body)
        else:
            self._answer()

    def do_PUT(self) -> None:
        """A large file, under the address that the batch gave for it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        oid = urlsplit(self.path).path.rpartition("/")[2]
        same = hashlib.sha256(body).hexdigest() == oid
        if same:
            self.server.blobs[oid] = body
        self._send(200 if same else 400, b"")

    def _may_write(self) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self.server.writers:
            self._send(401 if not token else 403, b'{"error": "no right to write"}')
        return token in self.server.writers

    def _take(self, path: str, body: bytes) -> None:
        """Answer the request of an upload, whose token may write."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            folder, url = self.server.root / "models" / name, json.dumps({"url": f"{self.server.url}/{name}"})
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if made and asked.get("visibility") == "private":
                self.server.private.add(name)
            self._send(200 if made else 409, url.encode())
        elif found := _LFS.fullmatch(path):
            self._lfs(found[1], found[2], json.loads(body))
        elif found := _UPLOAD.fullmatch(path):
            if found[2] == "preupload":
                files = [
                    {"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False, "oid": None}
                    for f in json.loads(body)["files"]
                ]
                self._send(200, json.dumps({"files": files}).encode())
            else:
                self._commit(found[1], [json.loads(line) for line in body.splitlines()])

    def _lfs(self, name: str, what: str, asked: dict[str, Any]) -> None:
        if what == "verify":
            return self._send(200 if asked["oid"] in self.server.blobs else 404, b"{}")
        place = f"{self.server.url}/{name}.git/info/lfs/objects"
        objects = []
        for o in asked["objects"]:
            actions = {"upload": {"href": f"{place}/{o['oid']}"}, "verify": {"href": f"{place}/verify"}}
            objects.append(o if o["oid"] in self.server.blobs else {**o, "actions": actions})
        self._send(200, json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        folder = self.server.root / "models" / name
        for line in lines:
            value = line["value"]
            if line["key"] in ("file", "lfsFile"):
                content = (
                    base64.b64decode(value["content"]) if line["key"] == "file" else self.server.blobs[value["oid"]]
                )
                (folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
                (folder / value["path"]).write_bytes(content)
            elif line["key"] == "deletedFile":
                (folder / value["path"]).unlink()
        oid = commit_of(folder)
        found = {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"}
        self._send(200, json.dumps({**found, "hookOutput": ""}).encode())

    def _validate(self, card: str) -> None:
        """What a card's front matter has to be: YAML between two lines, with names of the Hub as base and data."""
        parts = card.split("---\n")
        try:
            found = yaml.safe_load(parts[1]) if parts[0] == "" and len(parts) > 2 else None
        except yaml.YAMLError:
            found = None
        right = isinstance(found, dict) and all(
            re.fullmatch(r"[\w.-]+/[\w.-]+", str(name))
            for name in [*found.get("datasets", []), *([found["base_model"]] if "base_model" in found else [])]
        )
        errors = [] if right else [{"message": "front matter is not a model's"}]
        self._send(200 if right else 400, json.dumps({"errors": errors, "warnings": []}).encode())

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
