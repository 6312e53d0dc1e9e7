"""Mixed load, abandoned requests and faults of clients; at the end everything is accounted for.

    python -m benchmarks.soak [--minutes 10] [--clients 32] [--seed 0] [--json FILE] [--url URL]

Starts a server with a small random model and a small cache, or uses a running one. Clients chat, complete, continue
from leases and from warm records, branch, search with beams, follow grammars, extract hidden states, embed, tokenize,
upload catalogues, list and delete what is retained, hang up at random moments, send nonsense and grammars that never
end, and open connections that they never use. A refusal is fine where the API has one. Then every record is deleted,
and the server's blocks, leases, descriptors and memory are compared with those after the first minutes. Exits with 1 if
a request was not answered within a minute, was answered wrongly, or if anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.soaking import PATIENCE, Score, Server, code_of, forget_all, metrics_of

# Answers that say how things stand, and are no faults.
FINE = {
    400: {"retention_too_large", "grammar_too_large"},
    404: {"continuation_parent_not_found", "continuation_parent_expired"},
}
FINE |= {409: {"continuation_parent_failed", "request_id_in_use"}, 429: {"insufficient_retention", "queue_full"}}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
BOMB = "start: A\nA: /(.*a.{%d})/ & /(.*b.{17})/ & /(.*c.{16}.*)/ & ~/(.*d.{15})/"
GROWTH = 1.05  # of resident memory, which the allocator does not give back to the last page
SETTLE = 15.0  # seconds for connections to be gone


@dataclass(frozen=True)
class Standing:
    """The server at one moment."""

    used_blocks: float
    used_host_blocks: float
    charged_blocks: float
    leases: float
    running: float
    waiting: float
    descriptors: int
    resident_mb: float


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int, score: Score) -> None:
        self.session = session
        self.url = url
        self.draw = random.Random(seed)
        self.score = score
        self.known: list[str] = []  # ids to continue from

    async def run(self, end: float) -> None:
        acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (6, self.chat), (4, self.complete), (8, self.carry_on), (3, self.search), (4, self.hang_up),
            (3, self.extract), (1, self.embed), (2, self.nonsense), (2, self.tidy), (1, self.upload),
            (2, self.idle_connection), (1, self.count_tokens), (3, self.structured), (1, self.bomb),
        ]  # fmt: skip
        while time.monotonic() < end:
            act = self.draw.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
            try:
                await asyncio.wait_for(act(), PATIENCE)
                self.score.seen[act.__name__] += 1
            except TimeoutError:
                self.score.fault(f"{act.__name__}: no answer in {PATIENCE:g} s")
            except (aiohttp.ClientError, OSError) as error:
                self.score.fault(f"{act.__name__}: {error!r}")
                await asyncio.sleep(1)

    # --- what a client does --------------------------------------------------------------------------------------

    async def chat(self) -> None:
        body = {"messages": [{"role": "user", "content": self.words(20)}], "chat_template": TEMPLATE}
        await self.generate("/v1/chat/completions", body)

    async def complete(self) -> None:
        await self.generate("/v1/completions", {"prompt": self.words(60), "n": self.draw.choice([1, 1, 3])})

    async def carry_on(self) -> None:
        if not self.known:
            return
        body: dict[str, Any] = {"continuation_of": self.draw.choice(self.known[-20:]), "prompt": self.words(5)}
        if self.draw.random() < 0.4:
            body["continuation_at"] = self.draw.randint(1, 20)
        await self.generate("/v1/completions", body)

    async def search(self) -> None:
        body = {"prompt": self.words(10), "use_beam_search": True, "n": 2, "beam_width": self.draw.choice([2, 4])}
        body["max_tokens"] = self.draw.choice([2, 8])
        await self.generate("/v1/completions", body, streams=False)

    async def extract(self) -> None:
        """Hidden states, of a prompt or of something that was kept; now and then nobody waits for them."""
        body: dict[str, Any] = {"layers": self.draw.choice(["last", "all"]), "encoding_format": "base64"}
        body["positions"] = self.draw.choice(["last", "all", [0, -1]])
        if self.known and self.draw.random() < 0.5:
            body["continuation_of"] = self.draw.choice(self.known[-20:])
        else:
            body["input"] = self.words(60)
        asking = self.session.post(f"{self.url}/v1/hidden_states", json=body)
        if self.draw.random() < 0.8:
            await self.take(asking)
            return
        try:
            await asyncio.wait_for(self.take(asking), self.draw.choice([0.001, 0.02]))
        except TimeoutError:
            self.score.seen["aborted"] += 1

    async def embed(self) -> None:
        await self.take(self.session.post(f"{self.url}/v1/embeddings", json={"input": [self.words(20), self.words(9)]}))

    async def hang_up(self) -> None:
        """Leaves before the end: queued, in the prompt, or somewhere in the answer."""
        body = {"prompt": self.words(self.draw.choice([3, 60])), "max_tokens": 100, "ignore_eos": True}
        body |= {"stream": self.draw.random() < 0.7, **self.retain()}
        try:
            async with asyncio.timeout(self.draw.choice([0.001, 0.02, 0.1, 0.5])):
                async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
                    async for _ in answer.content:
                        pass
        except TimeoutError:
            self.score.seen["aborted"] += 1

    async def nonsense(self) -> None:
        path = self.draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/nowhere"])
        data = self.draw.choice(
            [b"{", b"[1]", b'{"prompt": 5}', b'{"messages": [{}]}', b'{"prompt": "a", "n": 0}', b""]
        )
        async with self.session.post(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        ) as answer:
            if not 400 <= answer.status < 500:
                self.score.fault(f"{data!r} at {path}: {answer.status}")

    async def tidy(self) -> None:
        """Looks at what is kept, makes a lease of something, deletes something."""
        async with self.session.get(f"{self.url}/v1/continuations", params={"limit": 20}) as answer:
            entries = (await answer.json())["data"]
        for entry in self.draw.sample(entries, min(2, len(entries))):
            url = f"{self.url}/v1/continuations/{entry['id']}"
            if self.draw.random() < 0.5:
                await self.take(self.session.delete(url))
            else:
                await self.take(self.session.patch(url, json={"ttl": self.draw.choice([1, 30, None])}), also={400})

    async def upload(self) -> None:
        name = f"set-{self.draw.randrange(5)}"
        items = [[self.draw.randrange(300, 2000) for _ in range(3)] for _ in range(50)]
        await self.take(
            self.session.post(f"{self.url}/v1/catalogues?replace=true", json={"name": name, "items": items})
        )
        await self.generate("/v1/completions", {"prompt": self.words(5), "catalogue": name, "max_tokens": None})

    async def structured(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}
        schema |= {"required": ["a", "b"], "additionalProperties": False}
        rule = self.draw.choice([{"json": schema}, {"regex": "[a-f]{1,30}"}, {"choice": ["yes", "no"]}])
        await self.generate("/v1/completions", {"prompt": self.words(5), "structured_outputs": rule})

    async def bomb(self) -> None:
        """A grammar that would take for ever to compile. Now and then: it takes seconds until it is given up."""
        if self.draw.random() < 0.03:
            rule = {"grammar": BOMB % self.draw.randrange(14, 18)}
            await self.take(
                self.session.post(f"{self.url}/v1/completions", json={"prompt": "a", "structured_outputs": rule})
            )

    async def idle_connection(self) -> None:
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            self.draw.choice([b"", b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
        )
        await asyncio.sleep(self.draw.random())
        writer.close()

    async def count_tokens(self) -> None:
        await self.take(self.session.post(f"{self.url}/tokenize", json={"prompt": self.words(50)}))

    # --- asking --------------------------------------------------------------------------------------------------

    def words(self, most: int) -> str:
        return " ".join(self.draw.choices(["one", "two", "night", "river", "blue"], k=self.draw.randint(1, most)))

    def retain(self) -> dict[str, Any]:
        return self.draw.choice([{}, {"retain": {"ttl": self.draw.choice([1, 20])}}])

    async def generate(self, path: str, fields: dict[str, Any], streams: bool = True) -> None:
        body = {"max_tokens": self.draw.choice([1, 8, 40]), "temperature": 0, **self.retain(), **fields}
        body["stream"] = streams and self.draw.random() < 0.5
        answer = await self.take(self.session.post(self.url + path, json=body))
        if answer is None:
            return
        if body["stream"]:
            if not answer.endswith(b"data: [DONE]\n\n") or b'"error"' in answer:
                self.score.fault(f"a stream ended with {answer[-200:]!r}")
            found = re.search(rb'"id":"([\w-]+)"', answer)
            self.known.append(found[1].decode() if found else "")
        else:
            self.known.append(json.loads(answer)["id"])

    async def take(self, asking: Any, also: set[int] = frozenset()) -> bytes | None:  # type: ignore[assignment]
        """The body of an answer; None if it was refused, as it may be."""
        async with asking as answer:
            body: bytes = await answer.read()
            if answer.status == 200:
                return body
        code = code_of(body.decode(errors="replace"))
        self.score.seen[f"{answer.status} {code}"] += 1
        beyond = code in ("continuation_index_out_of_range", "context_length_exceeded")
        if code not in FINE.get(answer.status, ()) and not beyond and answer.status not in also:
            self.score.fault(f"{answer.status} {body[:200]!r}")
        return None


# --- accounting --------------------------------------------------------------------------------------------------


async def standing(session: aiohttp.ClientSession, url: str) -> Standing:
    metrics = await metrics_of(session, url)
    return Standing(
        used_blocks=metrics["bequest:blocks_used"],
        used_host_blocks=metrics["bequest:host_blocks_used"],
        charged_blocks=metrics["bequest:retention_charged_blocks"],
        leases=metrics["bequest:leases"],
        running=metrics["vllm:num_requests_running"],
        waiting=metrics["vllm:num_requests_waiting"],
        descriptors=int(metrics["process_open_fds"]),
        resident_mb=metrics["process_resident_memory_bytes"] / 2**20,
    )


async def measured(url: str) -> Standing:
    """With one connection of its own; waits until the others are gone."""
    async with aiohttp.ClientSession() as session:
        await forget_all(session, url)
        seen = await standing(session, url)
        for _ in range(int(SETTLE)):
            await asyncio.sleep(1)
            now = await standing(session, url)
            if now.descriptors == seen.descriptors and now.used_blocks == seen.used_blocks:
                break
            seen = now
        return now


async def tick(session: aiohttp.ClientSession, url: str) -> None:
    """A line a minute: a leak is a line that rises."""
    while True:
        await asyncio.sleep(60)
        now = await standing(session, url)
        print(f"  {now.resident_mb:.1f} MB, {now.descriptors} descriptors, {now.leases:g} leases", flush=True)


async def soak(url: str, minutes: float, clients: int, seed: int, score: Score) -> tuple[Standing, Standing]:
    timeout = aiohttp.ClientTimeout(total=None)
    warm_up = min(2.0, minutes / 4)  # whatever is made once, or grows up to a limit, does so before the count begins
    before: Standing | None = None
    for part in (warm_up, minutes - warm_up):
        end = time.monotonic() + 60 * part
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            ticking = asyncio.ensure_future(tick(session, url))
            everybody = [Client(session, url, seed * 1000 + i, score) for i in range(clients)]
            await asyncio.gather(*(client.run(end) for client in everybody))
            ticking.cancel()
        after = await measured(url)
        before = before or after
    return before, after


def judge(score: Score, before: Standing, after: Standing) -> None:
    for name in ("used_blocks", "used_host_blocks", "charged_blocks", "leases", "running", "waiting"):
        if getattr(after, name) != 0:
            score.fault(f"at the end {name} is {getattr(after, name):g}")
    if after.descriptors > before.descriptors:
        score.fault(f"descriptors: {before.descriptors} before, {after.descriptors} after")
    if after.resident_mb > GROWTH * before.resident_mb:
        score.fault(f"memory: {before.resident_mb:.1f} MB before, {after.resident_mb:.1f} MB after")


def report(score: Score, before: Standing, after: Standing) -> None:
    acts = sum(count for name, count in score.seen.items() if name[0].islower() and name != "aborted")
    print(f"{acts} acts of clients, {score.seen['aborted']} aborted requests, {len(score.faults)} faults")
    print(f"{'':>20}{'before':>10}{'after':>10}")
    for name, value in asdict(before).items():
        print(f"{name:>20}{value:>10.1f}{getattr(after, name):>10.1f}")
    score.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a running server, whose model takes text and 512 tokens")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    score = Score()
    with tempfile.TemporaryDirectory() as folder:
        server = None if options.url else Server(Path(folder))
        url = options.url if server is None else server.url
        try:
            before, after = asyncio.run(soak(url, options.minutes, options.clients, options.seed, score))
        except aiohttp.ClientError as error:
            log = server.last_lines if server is not None else ""
            raise SystemExit(f"FAULT the server is gone: {error}\n{log}") from None
        finally:
            if server is not None:
                server.end(score)
    judge(score, before, after)
    report(score, before, after)
    if options.json:
        figures = {"seen": score.seen, "faults": score.faults, "before": asdict(before), "after": asdict(after)}
        Path(options.json).write_text(json.dumps(figures, indent=2))
    sys.exit(1 if score.faults else 0)


if __name__ == "__main__":
    main()
