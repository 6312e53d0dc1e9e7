"""Freed memory goes back to the system from time to time."""

from __future__ import annotations

import asyncio

import pytest

from bequest.server.process import memory


async def test_memory_is_trimmed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def trim(pad: int) -> int:
        kept.append(pad)
        if len(kept) == 3:
            loop.call_soon_threadsafe(enough.set)
        return 1

    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.001)
    monkeypatch.setattr(memory, "trimmer", lambda: trim)
    task = asyncio.ensure_future(memory.keep_trimmed())
    await asyncio.wait_for(enough.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kept[:3] == [0, 0, 0]


async def test_without_such_a_function_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "trimmer", lambda: None)
    await asyncio.wait_for(memory.keep_trimmed(), 1)


def test_the_function_of_this_system() -> None:
    trim = memory.trimmer()
    assert trim is None or trim(0) in (0, 1)
