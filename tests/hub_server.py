"""A small server of the Hugging Face Hub's protocol on 127.0.0.1, as far as huggingface_hub asks it for a model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMITS = ["a" * 40, "b" * 40]  # the last one is `main`
LARGE_BYTES = 64 * 1024  # files from here on have a SHA-256, as those of git LFS


class HubServer(ThreadingHTTPServer):
    """Serves `folder` as the model `repo`, at each of COMMITS. What goes wrong is set before the request."""

    daemon_threads = True

    def __init__(self, repo: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo = repo
        self.folder = folder
        self.token: str | None = None  # without it nobody sees the model
        self.gated = False
        self.break_off: dict[str, int] = {}  # file -> bytes after which the first answer with it ends
        self.spoiled: set[str] = set()  # files that come with other bytes
        self.requests: list[str] = []  # "GET /path", with the range that was asked for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self, file: str) -> list[str]:
        """The ranges that were asked for: `` for the whole file."""
        mine = [request.split(" ") for request in self.requests if request.startswith("GET")]
        return [span for _, path, span in mine if path.endswith(f"/{file}")]


@contextmanager
def hub_server(repo: str, folder: Path) -> Iterator[HubServer]:
    server = HubServer(repo, folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class names it so)
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.token is not None and token != self.server.token:
            return self._refuse(403 if token else 401, "GatedRepo" if self.server.gated else "RepoNotFound")
        api, files = f"/api/models/{self.server.repo}/", f"/{self.server.repo}/resolve/"
        if path.startswith(api):
            kind, _, revision = path.removeprefix(api).partition("/")
            return self._tell(kind, revision)
        if path.startswith(files):
            return self._send_file(*path.removeprefix(files).split("/", 1))
        return self._refuse(404, "RepoNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _tell(self, kind: str, revision: str) -> None:
        commit = COMMITS[-1] if revision == "main" else revision
        if commit not in COMMITS:
            return self._refuse(404, "RevisionNotFound")
        data: Any = {"id": self.server.repo, "sha": commit, "siblings": []}
        if kind == "tree":
            data = [self._entry(path) for path in sorted(self.server.folder.rglob("*")) if path.is_file()]
        return self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _entry(self, path: Path) -> dict[str, Any]:
        size, name = path.stat().st_size, path.relative_to(self.server.folder).as_posix()
        entry = {"type": "file", "path": name, "size": size, "oid": _etag(path)[:40]}
        return entry | ({"lfs": {"oid": _etag(path), "size": size, "pointerSize": 100}} if size >= LARGE_BYTES else {})

    def _send_file(self, commit: str, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        etag = _etag(path)
        body = path.read_bytes()
        total, start = len(body), 0
        if name in self.server.spoiled:
            body = bytes(len(body))
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        return self._send(206 if start else 200, body[start:], headers, name)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.server.break_off.pop(name, None)
        self.wfile.write(body[:end])
        self.close_connection = self.close_connection or end is not None


def _etag(path: Path) -> str:
    """Large files: SHA-256; others: 40 hex digits, as git names a blob."""
    content = path.read_bytes()
    return (hashlib.sha256 if len(content) >= LARGE_BYTES else hashlib.sha1)(content).hexdigest()
