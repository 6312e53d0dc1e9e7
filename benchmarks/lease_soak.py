"""Random load with leases that always fill their budget: is every request answered, and every answer right?

    python -m benchmarks.lease_soak [--minutes 10] [--clients 24] [--seed 0]

Starts a server with a small model and a cache that one longest request and the leases fill. Clients ask, continue from
what they leased (from its end, from any token of it), prolong, delete, and hang up in the middle of a stream. A refusal
is fine where the API has one: a full budget, a lease that has ended. Answers are compared with those of the same tokens
sent whole under a salt of their own, where nothing can be inherited. Exits with 1 if a request was not answered within
a minute, was answered wrongly, or if blocks were lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.soaking import MAX_LEN, PATIENCE, Score, Server, code_of, forget_all, metrics_of

# A refusal that says how things stand, and is not a fault.
FULL = {"insufficient_retention", "retention_too_large", "queue_full"}
GONE = {"continuation_parent_not_found", "continuation_parent_expired"}


@dataclass
class Lease:
    """What a client believes that the server keeps for it."""

    id: str
    tokens: list[int]
    computed: int
    until: float  # on time.monotonic: an answer that comes before it must find the lease good


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int, score: Score) -> None:
        self.session = session
        self.url = url
        self.draw = random.Random(seed)
        self.score = score
        self.leases: list[Lease] = []

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            what = self.draw.choices(
                [self.ask, self.carry_on, self.hang_up, self.prolong, self.delete], [4, 10, 2, 1, 2]
            )[0]
            try:
                await asyncio.wait_for(what(), PATIENCE)
            except TimeoutError:
                self.score.fault(f"{what.__name__}: no answer in {PATIENCE:g} s")
            except aiohttp.ClientError as error:
                self.score.fault(f"{what.__name__}: {error!r}")
                return

    # --- what a client does --------------------------------------------------------------------------------------

    async def ask(self) -> None:
        prompt = self.tokens(self.draw.choice([1, 15, 16, 17, 40, 100, 200]))
        await self.complete({"prompt": prompt}, prompt, None, 0)

    async def carry_on(self) -> None:
        if not self.leases:
            return
        parent = self.draw.choice(self.leases)
        at = self.draw.choice([len(parent.tokens), len(parent.tokens), self.draw.randint(1, len(parent.tokens))])
        suffix = self.tokens(self.draw.choice([0, 1, 5, 20]))
        prompt = [*parent.tokens[:at], *suffix]
        if len(prompt) > MAX_LEN - 100:
            await self.delete()
            return
        place = "last" if at == len(parent.tokens) else at
        body = {"continuation_of": parent.id, "continuation_at": place, "continuation_token_ids": suffix}
        await self.complete(body, prompt, parent, at)

    async def hang_up(self) -> None:
        prompt = self.tokens(self.draw.choice([3, 60, 200]))
        body = self.body({"prompt": prompt, "stream": True, "retain": {"ttl": 30}}, 100)
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                await self.refused(response, None)
                return
            for _ in range(self.draw.randint(0, 40)):
                await response.content.readline()
        self.score.seen["hung up"] += 1

    async def prolong(self) -> None:
        if self.leases:
            lease = self.draw.choice(self.leases)
            ttl = self.draw.choice([2, 60, None])
            began = time.monotonic()
            async with self.session.patch(f"{self.url}/v1/continuations/{lease.id}", json={"ttl": ttl}) as response:
                if response.status != 200:
                    await self.refused(response, lease)
                    return
                lease.until = began + (ttl or 0)
                self.score.seen["prolonged"] += 1

    async def delete(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.draw.randrange(len(self.leases)))
            async with self.session.delete(f"{self.url}/v1/continuations/{lease.id}") as response:
                if response.status != 200:
                    await self.refused(response, lease)
                    return
                self.score.seen["deleted"] += 1

    # --- asking and judging --------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(300, 2000) for _ in range(count)]

    def body(self, fields: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        usual = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**usual, **fields}

    async def complete(self, fields: dict[str, Any], prompt: list[int], parent: Lease | None, at: int) -> None:
        count = self.draw.choice([1, 2, 16, 60])
        ttl = self.draw.choice([None, 2, 60, 60])
        retain = {} if ttl is None else {"retain": {"ttl": ttl}}
        began = time.monotonic()
        async with self.session.post(
            f"{self.url}/v1/completions", json=self.body({**fields, **retain}, count)
        ) as response:
            if response.status != 200:
                await self.refused(response, parent)
                return
            answer = await response.json()
        tokens = answer["choices"][0]["token_ids"]
        self.score.seen["answered"] += 1
        if parent is not None:
            self.judge_report(answer, prompt, parent, at)
        if len(tokens) != count:
            self.score.fault(f"{len(tokens)} tokens instead of {count}")
        if self.draw.random() < 0.3:
            await self.judge_tokens(prompt, tokens)
        if ttl is not None:
            if not answer.get("retained"):
                self.score.fault(f"a lease was asked for and not granted: {answer.get('retained')}")
                return
            whole = [*prompt, *tokens]
            self.leases.append(Lease(answer["id"], whole, len(whole) - 1, began + ttl))

    def judge_report(self, answer: dict[str, Any], prompt: list[int], parent: Lease, at: int) -> None:
        told = answer["continuation"]
        self.score.seen[told["source"]] += 1
        if told["inherited_tokens"] + told["computed_tokens"] != len(prompt):
            self.score.fault(f"{told} does not add up to {len(prompt)}")
        if time.monotonic() < parent.until:
            expected = min(at, parent.computed, len(prompt) - 1)
            if told["inherited_tokens"] != expected or told["source"] not in ("blocks", "host"):
                self.score.fault(f"a lease of {len(parent.tokens)} tokens gave {told}, not {expected}")

    async def judge_tokens(self, prompt: list[int], tokens: list[int]) -> None:
        fields = {"prompt": prompt, "cache_salt": f"{self.draw.random()}"}
        async with self.session.post(f"{self.url}/v1/completions", json=self.body(fields, len(tokens))) as response:
            if response.status != 200:
                await self.refused(response, None)
                return
            fresh = (await response.json())["choices"][0]["token_ids"]
        self.score.seen["compared"] += 1
        if fresh != tokens:
            self.score.fault(f"{len(prompt)} tokens of prompt: {tokens} inherited, {fresh} fresh")

    async def refused(self, response: aiohttp.ClientResponse, parent: Lease | None) -> None:
        text = await response.text()
        name = code_of(text)
        self.score.seen[f"{response.status} {name}"] += 1
        if name in FULL:
            if self.draw.random() < 0.3:
                await self.delete()
        elif name in GONE and parent is not None and time.monotonic() > parent.until:
            self.leases = [lease for lease in self.leases if lease is not parent]
        else:
            self.score.fault(f"{response.status} {text[:200]}")


async def soak(url: str, minutes: float, clients: int, seed: int, score: Score) -> None:
    end = time.monotonic() + 60 * minutes
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        everybody = [Client(session, url, seed * 1000 + i, score) for i in range(clients)]
        ticking = asyncio.ensure_future(tick(score, end))
        await asyncio.gather(*(client.run(end) for client in everybody))
        ticking.cancel()
        if not score.faults:
            await check_nothing_is_lost(session, url, score)


async def tick(score: Score, end: float) -> None:
    while True:
        await asyncio.sleep(15)
        print(f"  {max(0.0, end - time.monotonic()):5.0f} s left  {dict(score.seen)}", flush=True)


async def check_nothing_is_lost(session: aiohttp.ClientSession, url: str, score: Score) -> None:
    await forget_all(session, url)
    metrics = await metrics_of(session, url)
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"):
        if metrics[name] != 0:
            score.fault(f"at the end {name} is {metrics[name]:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        score = Score()
        try:
            asyncio.run(soak(server.url, options.minutes, options.clients, options.seed, score))
        finally:
            server.end(score)
    score.show()
    sys.exit(1 if score.faults else 0)


if __name__ == "__main__":
    main()
