"""The probe sees what holds a loop up, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.attack.conftest import Victim

_BUSY = 0.06  # seconds


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _keep_the_lock(seconds: float) -> None:
    """One call into C at a time that no other thread can interrupt, until one has taken that long."""
    size = 1 << 20
    while True:
        began = time.thread_time()
        sum(range(size))
        if time.thread_time() - began >= seconds:
            return
        size *= 2


async def test_a_callback_that_computes_is_a_stall(fake: Victim) -> None:
    async with fake.probe() as probe:
        await fake.server.on_loop(lambda: _compute(_BUSY))
    assert probe.longest_stall_s >= _BUSY and probe.loop_cpu_s >= _BUSY, probe
    with pytest.raises(AssertionError, match="three times"):
        await fake.calmly(lambda _: fake.server.on_loop(lambda: _compute(_BUSY)), stall=_BUSY)


async def test_an_idle_loop_has_none(fake: Victim) -> None:
    await fake.calmly(lambda _: asyncio.sleep(0.05), stall=_BUSY / 2, hold=_BUSY / 2)


async def test_what_the_attacker_computes_is_not_the_servers(fake: Victim) -> None:
    async def attack(_: int) -> None:
        _compute(_BUSY)
        _keep_the_lock(_BUSY)

    await fake.calmly(attack, stall=_BUSY / 2, hold=_BUSY / 2, cpu=_BUSY)


async def test_a_thread_that_keeps_the_interpreter_holds_the_loop_without_a_stall(fake: Victim) -> None:
    async with fake.probe() as probe:
        await asyncio.to_thread(_keep_the_lock, _BUSY)
    assert probe.longest_hold_s >= _BUSY / 2, probe
    await fake.calmly(lambda _: asyncio.to_thread(_keep_the_lock, _BUSY), stall=_BUSY / 2)


async def test_a_thread_that_lets_others_in_holds_nothing(fake: Victim) -> None:
    async with fake.probe() as probe:
        await asyncio.to_thread(_compute, _BUSY)
    assert probe.server_cpu_s >= _BUSY, probe
    await fake.calmly(lambda _: asyncio.to_thread(_compute, _BUSY), stall=_BUSY / 2)
