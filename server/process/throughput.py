"""While the server is busy, a line of the log every ten seconds says how fast it is and how full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from bequest.engine.watching.observation import EngineLoad
from bequest.server.operation.metrics import Metrics

_log = logging.getLogger("bequest")
_SECONDS = 10.0


async def keep_reporting(metrics: Metrics, load: Callable[[], EngineLoad], seconds: float = _SECONDS) -> None:
    """Until cancelled. Silent where nothing was computed."""
    loop = asyncio.get_running_loop()
    before, then = metrics.computed(), loop.time()
    while True:
        await asyncio.sleep(seconds)
        after, now = metrics.computed(), loop.time()
        if after != before:
            prompt, output = ((b - a) / (now - then) for a, b in zip(before, after, strict=True))
            _log.info("%s", throughput(prompt, output, load()))
        before, then = after, now


def throughput(prompt: float, output: float, load: EngineLoad) -> str:
    used = 100 * load.used_blocks / max(load.usable_blocks, 1)
    return (
        f"{prompt:,.0f} prompt and {output:,.0f} output tokens/s; "
        f"{load.running} sequences run, {load.waiting} wait, {used:.0f}% of the cache is in use"
    )
