"""A server to talk to: one that runs already, or one of our own for as long as the command takes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from bequest.cli.fetching import fetched
from bequest.engine.errors import ModelError
from bequest.engine.orphans import end_with_parent

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_SECONDS = 10.0
_LAST_LINES = 15


class Failure(Exception):
    """The command cannot go on; the message says what to change."""


class Barred(Failure):
    """A server of OpenAI's API is there, and wants a key, or is not ready."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Calls of one server; each opens a connection of its own, whose end stops the answer."""

    url: str  # without /v1
    api_key: str | None

    def models(self) -> list[str]:
        response = self._send("GET", "/v1/models", None)
        try:
            return [str(model["id"]) for model in json.loads(response.read())["data"]]
        except (ValueError, KeyError, TypeError):
            raise self._foreign() from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Closing the iterator stops the server's work."""
        response = self._send("POST", path, body | {"stream": True, "stream_options": {"include_usage": True}})
        try:
            for line in self._lines(response):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield self._event(line[6:])
            raise Failure("the server closed the connection before the answer was whole")
        finally:
            response.close()

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise Failure(f"the connection broke before the answer was whole ({_reason(error)})") from None

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(data)
            if (error := event.get("error")) is not None:
                raise Failure(f"the server stopped: {error['message'] if isinstance(error, dict) else error}")
        except (ValueError, KeyError, AttributeError):
            raise self._foreign() from None
        return event

    def _foreign(self) -> Failure:
        return Failure(f"what answers at {self.url} does not speak OpenAI's API")

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        parts, data = urlsplit(self.url), None if body is None else _encoded(body)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )
        try:
            connection = kind(parts.netloc, timeout=_CONNECT_SECONDS)
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take its time
            connection.request(method, parts.path + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise Failure(
                f"no server answers at {self.url} ({_reason(error)}); start one with `bequest serve`"
            ) from None
        if response.status >= 400:
            raise _refusal(response.status, b"".join(self._lines(response)))
        return response


def _encoded(body: dict[str, Any]) -> bytes:
    """What is not UTF-8, of a file or of the command line, is half a surrogate pair by now."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Failure("the text is not in UTF-8; `iconv -t UTF-8` makes it so") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(status: int, data: bytes) -> Failure:
    try:
        message = str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return Failure(f"{status}: {data[:300].decode(errors='replace') or 'no reason was given'}")
    match status:
        case 401:
            return Barred(f"401: {message} Here it is --api-key, or the variable BEQUEST_API_KEY.")
        case 503:
            return Barred(f"503: {message}")
    return Failure(f"{status}: {message}")


@contextmanager
def connected(model: str | None, api_key: str | None) -> Iterator[Connection]:
    """`model` is a URL, or what `bequest serve` takes; None is a server that runs here, else the embedded model."""
    api_key = api_key or os.environ.get("BEQUEST_API_KEY")
    if model is not None and re.match(r"https?://", model):
        yield Connection(model.rstrip("/").removesuffix("/v1"), api_key)
        return
    running = Connection(DEFAULT_URL, api_key)
    if model is None and _answers(running):
        print(f"talking to {DEFAULT_URL}", file=sys.stderr)
        yield running
        return
    try:
        fetched(model)
    except ModelError as error:
        raise Failure(str(error)) from None
    server = _OwnServer(model)
    try:
        yield Connection(server.wait_ready(), None)
    finally:
        server.stop()


def _answers(connection: Connection) -> bool:
    """Raises Failure where a server runs that wants a key, or is not ready: it is the one that is meant."""
    try:
        return bool(connection.models())
    except Barred as error:
        raise Failure(f"the server at {connection.url} says {error} To use another model, name it.") from None
    except (Failure, ValueError):
        return False


class _OwnServer:
    """`bequest serve` on a free port. Its log is shown if it fails."""

    def __init__(self, model: str | None) -> None:
        command = [sys.executable, "-m", "bequest", "serve", *([model] if model else []), "--port", "0"]
        # Its own group: a Ctrl-C stops an answer, not the server. So nobody else ends it when the terminal is closed.
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
            env={name: value for name, value in os.environ.items() if name != "BEQUEST_API_KEY"},
        )  # fmt: skip
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._url = ""
        self._known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if match := re.search(r"ready on (http://\S+) in", line):
                self._url = match[1]
                self._known.set()
        self._known.set()

    def wait_ready(self) -> str:
        if sys.stderr.isatty():
            print("loading the model …", end="\r", file=sys.stderr, flush=True)
        self._known.wait()
        if sys.stderr.isatty():
            print(" " * 20, end="\r", file=sys.stderr, flush=True)
        if not self._url:
            errors = [line.partition(" E ")[2].strip() for line in self._lines if " E " in line]
            raise Failure(errors[-1] if errors else "the server did not start:\n" + "".join(self._lines))
        return self._url

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
