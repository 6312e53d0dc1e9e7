"""The real application over a real socket, with a fake engine behind it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bequest.engine.config import ServerConfig
from bequest.server.access.keys import KeyRing
from bequest.server.app import AppRunner, make_app
from bequest.server.context import CONTEXT
from bequest.server.operation.metrics import Metrics
from bequest.server.stores.leases import LeaseTimes
from tests.server.fakes import FakeEngine, FakeText
from tests.server.front import Front

Starter = Callable[..., Any]
LEASES = LeaseTimes(default=300.0, longest=86400.0)


@asynccontextmanager
async def starting() -> AsyncIterator[Starter]:
    """Starts a server: `await start(**ServerConfig fields)`."""
    cleanups: list[Callable[[], Any]] = []

    async def starter(
        engine: FakeEngine | None = None, text: FakeText | None = None, leases: LeaseTimes = LEASES, **config: Any
    ) -> Front:
        engine, text, metrics = engine or FakeEngine(), text or FakeText(), Metrics()
        settings = ServerConfig(**config)
        keys = KeyRing(settings.api_key, settings.api_key_file)
        app = make_app(engine, text, settings, leases, keys, metrics)
        runner = AppRunner(app, shutdown_timeout=0.1, client_timeout=settings.client_timeout)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        session = aiohttp.ClientSession()
        front = Front(engine, text, listener.getsockname()[1], session, metrics, app[CONTEXT])

        async def stop() -> None:
            for close in front.closers:
                await close()
            front.closers.clear()
            await session.close()
            await runner.cleanup()

        front.stop = stop
        cleanups.append(stop)
        return front

    yield starter
    for cleanup in cleanups:
        await cleanup()


@pytest.fixture
async def start() -> AsyncIterator[Starter]:
    async with starting() as starter:
        yield starter


@pytest.fixture
async def front(start: Starter) -> Front:
    return await start()
