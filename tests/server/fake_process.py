"""A server process with a fake engine that says a word every 20 ms, for tests that signal it: prints its address."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from bequest.engine.config import ServerConfig
from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.operation.logs import configure_logging
from bequest.server.operation.metrics import Metrics
from bequest.server.process.serve import serve
from bequest.server.stores.leases import LeaseTimes
from tests.server.fakes import FakeEngine, FakeText


def words(request: Request) -> Iterator[Delta]:
    for number in itertools.count(1):
        last = number == request.params.max_tokens
        choice = ChoiceDelta(0, f"word{number} ", (number % 250,), finish_reason="length" if last else None)
        yield Delta(request.id, (choice,), first=number == 1, usage=Usage(1, number, 0) if last else None)


async def talk(engine: FakeEngine) -> None:
    while True:
        await asyncio.sleep(0.02)
        engine.advance()


async def main() -> int:
    talking: list[asyncio.Task[None]] = []

    async def load(metrics: Metrics) -> Any:
        engine = FakeEngine(words)
        engine.held = True
        talking.append(asyncio.create_task(talk(engine)))
        return engine, FakeText()

    return await serve(ServerConfig(port=0, drain_timeout=20), LeaseTimes(300, 600), load)


if __name__ == "__main__":
    configure_logging("info")
    sys.exit(asyncio.run(main()))
