"""A hub on this machine: repositories of files behind the routes that the hub's own client library asks."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """`async`-free: the client library blocks. Faults are set from outside."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {name: dict(files) for name, files in repositories.items()}
        self.revisions = {"main"}
        self.gated: set[str] = set()
        self.broken = False  # answers 503 to everything
        self.rejects_token = False
        self.breaks = 0  # so many downloads end after half of what was asked for
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.repositories[repo].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.broken:
            return self._send(503, b"", {})
        if hub.rejects_token and self.headers.get("Authorization"):
            return self._json({"error": "Invalid username or password."}, 401)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._repository(match[1], match[2] or "main")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            return self._tree(match[1])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(match[1], match[3])
        return self._send(404, b"", {})

    def _known(self, repo: str) -> bool:
        if repo not in self.server.repositories:
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return False
        return True

    def _repository(self, repo: str, revision: str) -> None:
        hub = self.server
        if not self._known(repo):
            return None
        if revision not in hub.revisions and revision != hub.commit(repo):
            return self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        files = [{"rfilename": name, "size": len(data)} for name, data in hub.repositories[repo].items()]
        return self._json({"id": repo, "modelId": repo, "sha": hub.commit(repo), "private": False, "siblings": files})

    def _tree(self, repo: str) -> None:
        files = self.server.repositories[repo].items()
        entries = [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files]
        self._json(entries)

    def _file(self, repo: str, name: str) -> None:
        hub = self.server
        if not self._known(repo):
            return None
        if repo in hub.gated and "/resolve/" in self.path:
            return self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        if name not in hub.repositories[repo]:
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = hub.repositories[repo][name]
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": hub.commit(repo),
            "Accept-Ranges": "bytes",
        }
        status, first = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            status, first = 206, int(match[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = data[first:]
        if self.command == "GET" and hub.breaks > 0 and len(body) > 1000:
            hub.breaks -= 1
            self._send(status, body, headers, cut=len(body) // 2)
            self.close_connection = True
            return None
        return self._send(status, body, headers)

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])


def files_of(directory: Path) -> dict[str, bytes]:
    """A repository of the files of a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }
