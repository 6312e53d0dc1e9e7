"""What requests hold together: one account, and a refusal before it is passed."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from bequest.engine.audio.resample import Resampler
from bequest.engine.types import ChoiceDelta, Delta, Request
from bequest.server.access.in_flight import InFlight
from bequest.server.wire.errors import ApiError
from tests.attack.conftest import Serve, Victim
from tests.server.fakes import FakeEngine

_MIB = 1 << 20
_HEAD = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def _used(victim: Victim) -> int:
    return await victim.server.on_loop(lambda: victim.server.context.in_flight.used_bytes)


async def test_half_sent_bodies_are_counted_together(serve: Serve) -> None:
    victim = serve(max_in_flight_mb=8)
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", victim.server.port)
        writer.write(_HEAD % (b"/v1/completions", 4 * _MIB) + b" " * (3 * _MIB))
        writers.append(writer)
    await victim.front.until(lambda: victim.server.context.in_flight.used_bytes >= 6 * _MIB)
    answer, content = await victim.front.post("/v1/completions", b" " * (3 * _MIB))
    assert answer.status == 503 and content["error"]["code"] == "server_busy", content
    assert answer.headers["Retry-After"] == "1" and "--max-in-flight-mb" in content["error"]["message"]
    answer, _ = await victim.front.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer.status == 200, "a small one is let in"
    for writer in writers:
        writer.close()
    await victim.front.until(lambda: victim.server.context.in_flight.used_bytes == 0)


async def test_a_request_that_can_never_fit_is_not_told_to_come_back(serve: Serve) -> None:
    victim = serve(max_in_flight_mb=1)
    answer, content = await victim.front.post("/v1/completions", b" " * (3 * _MIB))
    assert answer.status in (413, 503), content
    answer, content = await victim.front.post("/tokenize", orjson.dumps({"prompt": "a " * 100_000}))
    assert answer.status == 413 and content["error"]["code"] == "request_too_large", content
    assert await _used(victim) == 0


async def test_a_text_is_charged_for_what_the_tokenizer_needs(serve: Serve) -> None:
    victim = serve(max_in_flight_mb=64)
    body = orjson.dumps({"prompt": "a " * 50_000})
    answers = await asyncio.gather(*(victim.front.post("/tokenize", body) for _ in range(4)))
    statuses = sorted(answer.status for answer, _ in answers)
    assert statuses[0] == 200 and set(statuses) <= {200, 503}
    assert await _used(victim) == 0


def _verbose(request: Request) -> Iterator[Delta]:
    for number in itertools.count():
        yield Delta(request.id, (ChoiceDelta(0, "word " * 20_000, (1,)),), first=number == 0)


async def test_a_stream_that_nobody_reads_is_counted_and_cut_off(serve: Serve) -> None:
    """Each stream would hold all of its text for its client."""
    victim = serve(max_in_flight_mb=1, engine=lambda: FakeEngine(_verbose))
    engine = victim.front.engine
    engine.held = True
    _, writer = await asyncio.open_connection("127.0.0.1", victim.server.port, limit=1 << 12)
    body = orjson.dumps({"prompt": "a", "stream": True, "max_tokens": 400})
    writer.write(_HEAD % (b"/v1/completions", len(body)) + body)
    await victim.front.until(lambda: len(engine.runs) == 1)
    most = 0
    for _ in range(1000):
        if not engine.runs:
            break
        await victim.server.on_loop(engine.advance)
        most = max(most, await _used(victim))
        await asyncio.sleep(0.001)
    assert 0 < most <= _MIB, "it is counted, and the limit holds"
    await victim.front.until(lambda: not engine.runs)
    assert await _used(victim) == 0
    writer.close()


def test_tenants_have_half_each() -> None:
    account = InFlight(100, lambda: 2)
    greedy, other = account.held_by("greedy"), account.held_by("other")
    greedy.grow(40)
    with pytest.raises(ApiError) as refused:
        greedy.grow(20)
    assert refused.value.status == 429 and greedy.num_bytes == 40
    other.grow(45)
    with pytest.raises(ApiError) as too_large:
        other.grow(51)
    assert too_large.value.status == 413
    greedy.grow(10)
    with pytest.raises(ApiError) as full:
        other.grow(10)
    assert full.value.status == 503
    greedy.release()
    other.release()
    assert account.used_bytes == 0


def test_the_filter_of_an_odd_rate_is_small() -> None:
    tracemalloc.start()
    resampler = Resampler(383_999, 16_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * _MIB, "it took 1.8 GB"
    time = np.arange(383_999) / 383_999
    signal: Any = np.sin(2 * np.pi * 3000 * time).astype(np.float32)
    out = np.concatenate([resampler.push(signal), resampler.finish()])
    expected = np.sin(2 * np.pi * 3000 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(out[500:-500], expected[500:-500], atol=2e-4)
