"""Two polite clients beside the fuzzer, in a process of their own: what they wait is what an attack costs others."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from benchmarks.stalls import Stalls

_PAUSE = 0.02  # seconds between two questions
_BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "stream": True, "temperature": 0, "store": False})
_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Wait:
    canary: str
    began: float  # on time.monotonic
    seconds: float
    status: int  # 0: no answer


def _ask(where: http.client.HTTPConnection, canary: str, key: str | None) -> Wait:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    began, status = time.monotonic(), 0
    try:
        if canary == "health":
            where.request("GET", "/health")
        else:
            where.request("POST", "/v1/completions", _BODY, headers)
        answer = where.getresponse()
        answer.read()
        status = answer.status
    except (OSError, http.client.HTTPException):
        where.close()
    return Wait(canary, began, time.monotonic() - began, status)


def _sing(url: str, key: str | None, stop: Event, seen: Queue[list[Wait]]) -> None:
    parts = urlsplit(url)
    where = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=_TIMEOUT)
    waits: list[Wait] = []
    while not stop.is_set():
        waits += [_ask(where, canary, key) for canary in ("health", "one-token stream")]
        time.sleep(_PAUSE)
    where.close()
    seen.put(waits)


class Canaries:
    """Ask while their `with` block runs; `waits` has the answers afterwards, less those while the machine stood still.

    REQUIRES: a key of a tenant of their own, where the server has keys.
    """

    def __init__(self, url: str, key: str | None) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._stop = spawning.Event()
        self._seen: Queue[list[Wait]] = spawning.Queue()
        self._process = spawning.Process(target=_sing, args=(url, key, self._stop, self._seen))
        self._stalls = Stalls()
        self.waits: list[Wait] = []
        self.num_left_out = 0

    def __enter__(self) -> Self:
        self._stalls.__enter__()
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        heard = self._seen.get()
        self._process.join()
        self._stalls.__exit__(kind, error, trace)
        self.waits = [wait for wait in heard if not self._stalls.hit(wait.began, wait.began + wait.seconds)]
        self.num_left_out = len(heard) - len(self.waits)
