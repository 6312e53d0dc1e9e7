"""A running server in the tests, and ways to call it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import orjson

from bequest.server.context import Context
from bequest.server.operation.metrics import Metrics
from bequest.server.stores.batches import Disk
from tests.server.fakes import FakeEngine, FakeText


@dataclass
class Front:
    """A running server, and ways to call it."""

    engine: FakeEngine
    text: FakeText
    port: int
    http: aiohttp.ClientSession
    metrics: Metrics
    context: Context
    closers: list[Any] = field(default_factory=list)
    stop: Callable[[], Any] = field(default=lambda: None)  # ends the server before the test ends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def app_disk(self) -> Disk:
        assert self.context.disk is not None
        return self.context.disk

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        # Without verification no certificates are loaded, which would take longer than the test.
        transport = openai.DefaultAsyncHttpxClient(verify=False)
        defaults = {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "http_client": transport}
        client = openai.AsyncOpenAI(**{**defaults, **options})
        self.closers.append(client.close)
        return client

    def strict(self, **options: Any) -> openai.AsyncOpenAI:
        """The SDK as a conformance test: it raises for every missing or foreign value."""
        return self.client(_strict_response_validation=True, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        """Status, headers, and the JSON of the answer."""
        data = io.BytesIO(body) if isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.http.post(self.url + path, data=data, headers=headers, **options) as answer:
            content = await answer.read()
            return answer, orjson.loads(content) if answer.content_type == "application/json" else content

    async def get(self, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        async with self.http.get(self.url + path, **options) as answer:
            return answer, orjson.loads(await answer.read())

    async def connect(self, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> RawConnection:
        """A request over a bare socket, for tests that look at bytes or leave early."""
        raw = RawConnection(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        await raw.request(body, path)
        return raw

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what must happen, for ten seconds at most."""
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it did not happen")

    async def settle(self) -> None:
        """Lets whatever a disconnect sets off happen."""
        for _ in range(20):
            await asyncio.sleep(0.001)


@dataclass
class RawConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self, body: dict[str, Any], path: str, version: str = "1.1") -> None:
        data = orjson.dumps(body)
        head = f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await self.writer.drain()

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def chunk(self) -> bytes:
        """One chunk of the body; empty at its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
