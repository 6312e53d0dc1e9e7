"""All replicas at one address: GET /metrics with the samples of each, and GET /cluster/state with how each stands.

The router sends both paths here. Who may see them is the replicas' own decision: the caller's key goes along.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from bequest.cluster.haproxy import Backend
from bequest.server.wire.errors import ApiError

_PATIENCE = aiohttp.ClientTimeout(total=5.0)
_KEY_HEADERS = ("Authorization", "x-api-key")
_UP = "bequest:replica_up"
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")


class Overview:
    """`backends`: those that there are now; `status`: how they stand."""

    def __init__(self, backends: Callable[[], Sequence[Backend]], status: Callable[[], Mapping[str, Any]]) -> None:
        self._backends, self._status = backends, status
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listens for the router on this machine. Raises OSError."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/cluster/state", self._state)
        self._session = aiohttp.ClientSession(timeout=_PATIENCE)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _metrics(self, request: web.Request) -> web.Response:
        backends = self._backends()
        answers = await asyncio.gather(*(self._ask(backend, "/metrics", request) for backend in backends))
        for answer in answers:
            if answer is not None and answer[0] in (401, 403):
                return web.Response(status=answer[0], body=answer[1], content_type="application/json")
        texts = {
            backend.tag: None if answer is None or answer[0] != 200 else answer[1].decode()
            for backend, answer in zip(backends, answers, strict=True)
        }
        return web.Response(text=labelled(texts), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _state(self, request: web.Request) -> web.Response:
        """For operators: the first replica that answers knows who is one."""
        for backend in self._backends():
            answer = await self._ask(backend, "/console/state", request)
            if answer is None or answer[0] >= 500:
                continue
            if answer[0] != 200:
                return web.Response(status=answer[0], body=answer[1], content_type="application/json")
            if orjson.loads(answer[1])["scope"] == "all":
                return web.json_response(self._status())
            return ApiError(
                403, "permission_denied", "The state of all replicas is shown to an operator's key alone."
            ).response()
        return ApiError(503, "loading", "No replica answers yet.").response()

    async def _ask(self, backend: Backend, path: str, request: web.Request) -> tuple[int, bytes] | None:
        """Status and body; None: it does not answer."""
        assert self._session is not None
        host = f"[{backend.host}]" if ":" in backend.host else backend.host
        headers = {name: request.headers[name] for name in _KEY_HEADERS if name in request.headers}
        try:
            async with self._session.get(f"http://{host}:{backend.port}{path}", headers=headers) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return None


def labelled(texts: Mapping[str, str | None]) -> str:
    """The expositions of replicas as one, each sample with its replica as a label. None: it did not answer."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # what is said of each, and its samples
    for tag, text in texts.items():
        comments: list[str] = []
        samples: list[str] = []
        for line in (text or "").splitlines():
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in comments:
                    comments.append(line)
            elif line:
                samples.append(_with_label(line, tag))
    up = [f'{_UP}{{replica="{tag}"}} {int(text is not None)}' for tag, text in texts.items()]
    families[_UP] = ([f"# HELP {_UP} Whether the replica answers.", f"# TYPE {_UP} gauge"], up)
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


def _with_label(sample: str, tag: str) -> str:
    match = _SAMPLE.match(sample)
    assert match is not None, sample
    label, rest = f'replica="{tag}"', sample[match.end() :]
    return f"{match[1]}{{{label},{rest}" if match[2] else f"{match[1]}{{{label}}}{rest}"
