"""A server process with a fake engine that says a word every 20 ms, for tests that signal it: prints its address.

With `--drain-timeout S` it drains for so long, and connections that have nothing to say get no more than that; with
`--stuck` a long text never ends in the tokenizer's threads; with `--files-dir DIR` it runs batches, four lines at once.
`--replica-tag`, `--port` and `--api-key-file` are the server's own."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bequest.engine.config import ServerConfig
from bequest.engine.types import ChoiceDelta, Delta, Request, Usage
from bequest.server.app import AppRunner
from bequest.server.operation.logs import configure_logging
from bequest.server.operation.metrics import Metrics
from bequest.server.process import serve as process
from bequest.server.stores.leases import LeaseTimes
from tests.server.fakes import ByteTokenizer, FakeEngine, FakeText


def words(request: Request) -> Iterator[Delta]:
    for number in itertools.count(1):
        last = number == request.params.max_tokens
        choice = ChoiceDelta(0, f"word{number} ", (number % 250,), finish_reason="length" if last else None)
        yield Delta(request.id, (choice,), first=number == 1, usage=Usage(1, number, 0) if last else None)


async def talk(engine: FakeEngine) -> None:
    while True:
        await asyncio.sleep(0.02)
        engine.advance()


class StuckTokenizer(ByteTokenizer):
    """Long texts are encoded in a worker thread, which never comes back."""

    def encode(self, text: str, *args: Any, **options: Any) -> Any:
        if len(text) > 100_000:
            print("stuck", file=sys.stderr, flush=True)
            time.sleep(300)
        return super().encode(text, *args, **options)


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drain-timeout", type=float, default=20.0)
    parser.add_argument("--stuck", action="store_true")
    parser.add_argument("--files-dir")
    parser.add_argument("--replica-tag")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--api-key-file")
    options = parser.parse_args()
    talking: list[asyncio.Task[None]] = []

    async def load(metrics: Metrics) -> Any:
        engine = FakeEngine(words)
        engine.held = True
        talking.append(asyncio.create_task(talk(engine)))
        return engine, FakeText(StuckTokenizer() if options.stuck else ByteTokenizer())

    process.AppRunner = partial(AppRunner, shutdown_timeout=min(1.0, options.drain_timeout))  # type: ignore[misc]
    config = ServerConfig(
        host=options.host,
        port=options.port,
        drain_timeout=options.drain_timeout,
        files_dir=options.files_dir,
        batch_concurrency=4,
        replica_tag=options.replica_tag,
        api_key_file=options.api_key_file,
    )
    return await process.serve(config, LeaseTimes(300, 600), load)


if __name__ == "__main__":
    configure_logging("info")
    sys.exit(asyncio.run(main()))
