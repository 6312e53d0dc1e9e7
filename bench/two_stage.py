"""The jobs of the two-stage benchmark: what is sent in which mode, and how many jobs at once."""

from __future__ import annotations

import asyncio
import enum
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bequest.bench.client import Answer, BenchError, Client, Prompt, ServerError
from bequest.bench.options import TwoStageOptions
from bequest.bench.workload import Workload

_LEASE_SECONDS = 900  # longer than the slowest level takes


class Mode(enum.Enum):
    """How stage 2 gets at what stage 1 computed."""

    RESEND = "re-send"
    RESEND_CACHED = "re-send, prefix hit"
    CONTINUATION = "continuation"
    LEASE = "lease under pressure"

    @property
    def continues(self) -> bool:
        return self in (Mode.CONTINUATION, Mode.LEASE)


@dataclass(frozen=True, slots=True)
class JobResult:
    number: int
    stage1: Answer
    stage2: Answer
    whole: Prompt  # prompt, what stage 1 sampled, suffix: what stage 2 continued, as token ids where they are known


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this server can do, and what to tell about what it cannot."""

    beams: bool
    continuation: bool
    notes: tuple[str, ...]


async def probe(client: Client, model: str, workload: Workload, options: TwoStageOptions) -> Abilities:
    """Tries what other servers may not have; also warms the server up."""
    notes = []
    if workload.as_text:
        notes.append("no /tokenize or no token ids in answers: all is sent as text, and compared as far as is told")
    plain = {"model": model, "prompt": workload.prompts[0], "max_tokens": 1}
    parent = await client.complete(plain)
    beams = options.width > 1
    if beams:
        try:
            await client.complete({**plain, "temperature": 0, "use_beam_search": True, "n": options.width})
        except ServerError as error:
            if error.status != 400:
                raise
            beams = False
            notes.append(f"no beams ({error}): stage 2 is {options.tokens} greedy tokens")
    missing = None
    try:
        child = await client.complete({**plain, "prompt": workload.suffix, "continuation_of": parent.id})
        missing = None if child.continuation is not None else "`continuation_of` is ignored"
    except ServerError as error:
        if error.status not in (400, 422):
            raise
        missing = str(error)
    if missing:
        notes.append(f"no continuation ({missing}): only re-sending is measured")
    return Abilities(beams, missing is None, tuple(notes))


class TwoStage:
    """Runs jobs. Every job of every mode and level has a cache salt of its own, so that none helps another."""

    def __init__(
        self, client: Client, model: str, workload: Workload, options: TwoStageOptions, abilities: Abilities
    ) -> None:
        self._client = client
        self._model = model
        self.workload = workload
        self.options = options
        self._beams = abilities.beams
        self._salts = _unique(secrets.token_hex(4))
        self._pressing = 0  # jobs whose other requests are under way
        self._quiet = asyncio.Event()

    async def run(self, mode: Mode, concurrency: int, jobs: int, advance: Callable[[], object]) -> list[JobResult]:
        """All jobs of one mode, `concurrency` at once; `advance` is called after each."""
        numbers = iter(range(jobs))
        results: list[JobResult] = []

        async def worker() -> None:
            for number in numbers:
                results.append(await self.job(mode, number))
                advance()

        workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, jobs))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return results

    async def job(self, mode: Mode, number: int) -> JobResult:
        salt = self._salts()
        stage1 = await self._client.complete(self._stage1(number, salt, retain=mode is Mode.LEASE))
        try:
            whole = self.workload.whole(number, stage1)
            if mode is Mode.LEASE:
                await self._press(number)
            if mode.continues:
                # "last": an end token at the end was sampled like any other, since stage 1 ignores them.
                source = {"prompt": self.workload.suffix, "continuation_of": stage1.id, "continuation_at": "last"}
            else:
                source = {"prompt": whole, "cache_salt": salt if mode is Mode.RESEND_CACHED else self._salts()}
            stage2 = await self._client.complete(self._stage2(source))
        finally:
            if stage1.retained is not None:
                await self._client.call("DELETE", f"/v1/continuations/{stage1.id}")
        if mode.continues and stage2.continuation is None:
            raise BenchError("an answer to `continuation_of` has no `continuation`")
        return JobResult(number, stage1, stage2, whole)

    async def resend(self, whole: Prompt) -> Answer:
        """What a fresh request gives: the reference where there is no other."""
        return await self._client.complete(self._stage2({"prompt": whole, "cache_salt": self._salts()}))

    async def _press(self, number: int) -> None:
        """Other people's requests, one after the other; none finds a prefix, and all of them want blocks.

        Then waits for those of the other jobs: stage 2 is to meet a used cache, not a busier server than elsewhere.
        """
        self._pressing += 1
        self._quiet.clear()
        try:
            for _ in range(self.options.pressure):
                salt = self._salts()
                prompt = self.workload.fresh_prompt(number, random.Random(salt))
                body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
                await self._client.complete(body)
        finally:
            self._pressing -= 1
            if not self._pressing:
                self._quiet.set()
        await self._quiet.wait()

    def _stage1(self, number: int, salt: str, retain: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self.workload.prompts[number],
            "max_tokens": self.options.stage1_tokens,
            "temperature": 1,
            "seed": self.options.seed + number,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        if retain:
            body["retain"] = {"ttl": _LEASE_SECONDS}
        return body

    def _stage2(self, source: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            **source,
            "max_tokens": self.options.tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if self._beams:
            body |= {"use_beam_search": True, "n": self.options.width}
        else:
            body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            if self.options.tolerance:
                body["logprobs"] = 0
        return body


def _unique(run: str) -> Callable[[], str]:
    """Names that no other run and no other call of this one gives."""
    numbers = iter(range(1 << 62))
    return lambda: f"two-stage-{run}-{next(numbers)}"
