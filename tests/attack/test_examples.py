"""Attacks of the first kind that come to mind: large, many, and slow. They show how the others are written."""

from __future__ import annotations

import asyncio
import gzip

import orjson

from tests.attack.conftest import Serve, Victim

_SHORT = orjson.dumps({"prompt": "a b", "max_tokens": 4, "temperature": 0})


async def test_a_prompt_of_a_million_words_is_refused_unread(fake: Victim) -> None:
    body = orjson.dumps({"prompt": "word " * 1_000_000})
    async with fake.probe() as probe:
        answer, content = await fake.front.post("/v1/completions", body)
    assert answer.status == 400 and content["error"]["code"] == "context_length_exceeded"
    assert probe.longest_stall_s < 0.05, probe


async def test_a_bomb_of_gzip_is_unpacked_no_further_than_a_body_may_be(serve: Serve) -> None:
    victim = serve(max_body_mb=1)
    bomb = gzip.compress(bytes(64 << 20), 1)
    async with victim.probe() as probe:
        answer, content = await victim.front.post("/v1/completions", bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status == 413 and content["error"]["code"] == "request_too_large"
    assert probe.server_cpu_s < 0.2, probe  # the whole of it would take ten times that


async def test_a_crowd_holds_the_loop_for_a_few_requests_at_a_time(real: Victim) -> None:
    async with real.probe() as probe:
        answers = await asyncio.gather(*(real.front.post("/v1/completions", _SHORT) for _ in range(200)))
    assert {answer.status for answer, _ in answers} == {200}
    assert probe.longest_stall_s < 0.1, probe
    assert probe.loop_cpu_s / len(answers) < 0.02, probe
