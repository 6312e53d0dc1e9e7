"""Attacks of the first kind that come to mind: large, many, and slow. They show how the others are written."""

from __future__ import annotations

import asyncio
import gzip

import orjson

from tests.attack.conftest import Serve, Victim

_SHORT = orjson.dumps({"prompt": "a b", "max_tokens": 4, "temperature": 0})


async def test_a_prompt_of_a_million_words_is_refused_unread(fake: Victim) -> None:
    body = orjson.dumps({"prompt": "word " * 1_000_000})
    answer, content = await fake.calmly(lambda _: fake.front.post("/v1/completions", body), stall=0.05)
    assert answer.status == 400 and content["error"]["code"] == "context_length_exceeded"


async def test_a_bomb_of_gzip_is_unpacked_no_further_than_a_body_may_be(serve: Serve) -> None:
    victim = serve(max_body_mb=1)
    bomb = gzip.compress(bytes(64 << 20), 1)
    packed = {"Content-Encoding": "gzip"}
    # The whole of it would take ten times as much CPU time.
    sent = victim.calmly(lambda _: victim.front.post("/v1/completions", bomb, headers=packed), stall=0.2, cpu=0.2)
    answer, content = await sent
    assert answer.status == 413 and content["error"]["code"] == "request_too_large"


async def test_a_crowd_holds_the_loop_for_a_few_requests_at_a_time(real: Victim) -> None:
    async def crowd(_: int) -> set[int]:
        answers = await asyncio.gather(*(real.front.post("/v1/completions", _SHORT) for _ in range(200)))
        return {answer.status for answer, _ in answers}

    assert await real.calmly(crowd, stall=0.1, cpu=200 * 0.02) == {200}
