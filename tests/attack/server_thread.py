"""The real application in a thread with an event loop of its own, so that what it costs can be told from its client."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from bequest.engine.config import ServerConfig
from bequest.server.__main__ import _loop_factory
from bequest.server.access.keys import KeyRing
from bequest.server.app import AppRunner, make_app
from bequest.server.context import CONTEXT, Context
from bequest.server.operation.metrics import Metrics
from bequest.server.stores.leases import LeaseTimes
from tests.attack.probe import LoopProbe

Parts = tuple[Any, Any]  # an engine and its text side
_Result = TypeVar("_Result")
_LEASES = LeaseTimes(default=300.0, longest=86400.0)


class ServerThread:
    """`build` runs on the server's loop, as it does in the product."""

    def __init__(self, build: Callable[[Metrics], Awaitable[Parts]], config: ServerConfig) -> None:
        self._build, self._config = build, config
        self._ready: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self.metrics = Metrics()
        # As the server does: or the collector would look through the whole suite's objects. Nothing is unfrozen at the
        # end, or it would look through those of all tests before, too (tests/conftest.py).
        gc.freeze()
        self._thread = threading.Thread(target=self._run, name="attacked server")
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def probe(self) -> LoopProbe:
        return LoopProbe(self.loop)

    async def on_loop(self, do: Callable[[], _Result]) -> _Result:
        """Calls something on the server's loop, to which its engine and stores belong."""

        async def step() -> _Result:
            return do()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step(), self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self.engine, self.text = await self._build(self.metrics)
        keys = KeyRing(self._config.api_key, self._config.api_key_file)
        app = make_app(self.engine, self.text, self._config, _LEASES, keys, self.metrics)
        self.context: Context = app[CONTEXT]
        self.engine.expect_tenants(keys.num_tenants)
        runner = AppRunner(app, shutdown_timeout=0.1, client_timeout=self._config.client_timeout)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        self._ready.set()
        await self._stopping.wait()
        await self.engine.stop(0.1)
        await runner.cleanup()
