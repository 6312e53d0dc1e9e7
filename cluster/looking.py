"""How a replica stands, asked over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from bequest.cluster import figures
from bequest.cluster.controller import State
from bequest.cluster.figures import Figures
from bequest.cluster.haproxy import Backend

_PATIENCE = aiohttp.ClientTimeout(total=2.0)
_STATES: dict[str, State] = {"loading": "loading", "draining": "draining"}


class Looking:
    """`key`: one that may read metrics, where they are guarded."""

    def __init__(self, key: str | None = None) -> None:
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, backend: Backend) -> tuple[State, Figures] | None:
        if self._session is None:  # in the loop that it is used in
            self._session = aiohttp.ClientSession(timeout=_PATIENCE)
        host = f"[{backend.host}]" if ":" in backend.host else backend.host
        url = f"http://{host}:{backend.port}"
        try:
            async with self._session.get(f"{url}/health") as answer:
                state: State = "ready" if answer.status == 200 else _state(await answer.json())
            if state == "loading":
                return state, Figures()
            async with self._session.get(f"{url}/metrics", headers=self._headers) as answer:
                return state, figures.read(await answer.text()) if answer.status == 200 else Figures()
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _state(refusal: Any) -> State:
    """Of an answer of /health that is none of a server that takes work."""
    error = refusal.get("error") if isinstance(refusal, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return _STATES.get(str(code), "down")
