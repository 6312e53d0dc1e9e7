"""Memory that was let go goes back to the system. The allocator keeps the pages of what threads freed, each thread its
own, and a server that was busy once would look busy for ever."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_SECONDS = 30.0


def trimmer() -> Callable[[int], int] | None:
    """glibc's malloc_trim; other C libraries have none."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


async def keep_trimmed() -> None:
    """Until cancelled. In a worker thread: it takes milliseconds, and leaves the interpreter alone."""
    trim = trimmer()
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)
