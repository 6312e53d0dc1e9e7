"""Runs one level of load: requests that start so many at once, or at random moments at a rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from bequest.bench.client import BenchError, Client, ServerError, Streamed
from bequest.bench.load_options import LoadOptions


@dataclass(frozen=True, slots=True)
class Level:
    """`rate` is None where `concurrency` requests run at once."""

    concurrency: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class LevelResult:
    level: Level
    seconds: float
    answers: tuple[Streamed, ...]
    errors: tuple[str, ...]


def all_levels(options: LoadOptions) -> list[Level]:
    if options.rate:
        return [Level(options.requests, rate) for rate in options.rate]
    return [Level(concurrency) for concurrency in options.concurrency]


class Load:
    def __init__(self, client: Client, model: str, prompts: list[str], options: LoadOptions) -> None:
        self._client = client
        self._model = model
        self._prompts = prompts
        self._options = options
        self._ignores_eos = True  # until the server refuses to

    async def warm_up(self) -> None:
        """Also finds out whether the server knows `ignore_eos`, which OpenAI's does not."""
        try:
            await self._send(0)
        except ServerError as error:
            if error.status not in (400, 422):
                raise
            self._ignores_eos = False
            await self._send(0)

    async def run(self, level: Level, advance: Callable[[Streamed | None], object]) -> LevelResult:
        """`advance` is called after each request, with None for one that failed."""
        count = max(self._options.requests, level.concurrency)
        answers: list[Streamed] = []
        errors: list[str] = []

        async def one(number: int) -> None:
            try:
                answers.append(await self._send(number))
                advance(answers[-1])
            except BenchError as error:
                errors.append(str(error))
                advance(None)

        began = time.perf_counter()
        slots = asyncio.Semaphore(level.concurrency)
        async with asyncio.TaskGroup() as group:

            async def held(number: int) -> None:
                async with slots:
                    await one(number)

            async for number in _starts(level, count, self._options.seed):
                group.create_task(held(number))
        return LevelResult(level, time.perf_counter() - began, tuple(answers), tuple(errors))

    async def _send(self, number: int) -> Streamed:
        prompt = self._prompts[number % len(self._prompts)]
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self._options.tokens,
            "temperature": 0.7,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignores_eos:
            body["ignore_eos"] = True
        if self._options.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
            return await self._client.stream("/v1/chat/completions", body)
        return await self._client.stream("/v1/completions", body | {"prompt": prompt})


async def _starts(level: Level, count: int, seed: int) -> AsyncIterator[int]:
    """The numbers of requests, each when it should start: at once, or after random pauses of the rate's average."""
    draw = random.Random(f"{seed}/{level.rate}")
    moment = time.perf_counter()
    for number in range(count):
        yield number
        if level.rate is not None:
            moment += draw.expovariate(level.rate)
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
