"""Three replicas behind a router, killed and restarted under load: is every token right, and no lease lost silently?

    python -m benchmarks.cluster_soak [--minutes 10] [--clients 6] [--seed 0] [--json FILE]

Needs ray and haproxy (make test-cluster installs them). Starts `bequest cluster up` with a small model and a shared
directory of estates. Clients run two-stage requests by id and by name, searches behind leases, conversations by
`previous_response_id`, and hang up. Every minute a replica is killed with SIGKILL; halfway the replicas are restarted
one after the other, and later the router is reloaded, and killed. What is checked:

- the tokens of each child are those of the same tokens sent whole under a salt of their own;
- a lease that was promised to be durable is found, whatever became of its server, for suffix + 1 computed tokens;
- a lease in memory is found as long as its server lives, and refused with a reason afterwards;
- where the owner lives, its children reach it without a detour.

What a killed process cuts off is counted and is no fault. Exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.model_shapes import write_model
from benchmarks.soak import TEMPLATE
from benchmarks.soaking import FLAGS, SHAPE, Score

TAGS = ("r1", "r2", "r3")
PATIENCE = 150.0  # seconds for a lease to be reached again after a kill
SERVE = [*FLAGS[: FLAGS.index("--port")], "--load-format", "dummy", "--estate-gb", "1", "--durable-wait", "20"]
LEASE_SECONDS = 600


@dataclass
class World:
    url: str
    folder: Path
    port: int
    score: Score = field(default_factory=Score)
    lives: Counter[str] = field(default_factory=Counter)  # how often each replica was ended
    router_ended: float = field(default_factory=time.monotonic)
    restarting: bool = False  # one after the other: nobody knows here which of them lives

    def pid_of(self, tag: str) -> int | None:
        return next(iter(_processes("--replica-tag", tag, str(self.port + 100 + int(tag[1:])))), None)


@dataclass
class Lease:
    reference: str
    tokens: list[int]
    durable: bool
    owner: str
    life: int


class CutOff(Exception):
    """The process that answered, or the router, was ended meanwhile."""


class Client:
    def __init__(self, session: aiohttp.ClientSession, world: World, seed: int) -> None:
        self.session, self.world, self.draw = session, world, random.Random(seed)
        self.number = seed
        self.score = world.score

    async def run(self, end: float) -> None:
        acts = [self.two_stage, self.two_stage, self.search, self.converse, self.hang_up]
        while time.monotonic() < end:
            act = self.draw.choice(acts)
            try:
                await act()
                self.score.seen[act.__name__] += 1
            except CutOff:
                self.score.seen["cut off"] += 1
                await asyncio.sleep(0.3)
            except TimeoutError:
                self.score.fault(f"{act.__name__}: no answer in time")

    # --- what a client does --------------------------------------------------------------------------------------

    async def two_stage(self) -> None:
        lease = await self.lease()
        if lease is not None:
            for _ in range(self.draw.randint(1, 3)):
                await asyncio.sleep(self.draw.choice([0.0, 0.5, 3.0]))
                await self.child(lease, {})

    async def search(self) -> None:
        lease = await self.lease()
        if lease is not None:
            await self.child(lease, {"use_beam_search": True, "beam_width": 4, "n": 2})

    async def converse(self) -> None:
        """The same words said twice get the same answers, whoever gives them."""
        words = [" ".join(f"w{self.draw.randrange(999)}" for _ in range(8)) for _ in range(3)]
        texts = [await self.conversation(words), await self.conversation(words)]
        if None not in texts and texts[0] != texts[1]:
            self.score.fault(f"a conversation was answered {texts[0]!r} and {texts[1]!r}")

    async def conversation(self, words: list[str]) -> str | None:
        previous: str | None = None
        body: Any = {}
        for text in words:
            asked = {"input": text, "max_output_tokens": 6, "temperature": 0, "previous_response_id": previous}
            status, body, _ = await self.persist("/v1/responses", asked)
            if status != 200:
                code = body["error"]["code"]
                self.score.seen[f"conversation refused: {code}"] += 1
                if code != "previous_response_not_found" or not self.world.lives:
                    self.score.fault(f"a conversation ended with {status} {code}")
                return None
            previous = body["id"]
        return str(body["output"][-1]["content"][0]["text"])

    async def hang_up(self) -> None:
        body = {"prompt": self.tokens(40), "max_tokens": 60, "ignore_eos": True, "stream": True, "retain": True}
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(self.draw.choice([0.01, 0.1, 0.3])):
                async with self.session.post(f"{self.world.url}/v1/completions", json=body) as answer:
                    async for _ in answer.content:
                        pass

    # --- leases --------------------------------------------------------------------------------------------------

    async def lease(self) -> Lease | None:
        durable, named = self.draw.random() < 0.6, self.draw.random() < 0.5
        lives = dict(self.world.lives)
        name = f"job-{self.number}-{self.draw.randrange(10**9)}"
        body: dict[str, Any] = {"prompt": self.tokens(self.draw.randint(5, 60)), "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "retain": {"ttl": LEASE_SECONDS, "durable": durable}}
        status, answer, headers = await self.post("/v1/completions", body | ({"request_id": name} if named else {}))
        if status != 200:
            self.score.seen[f"lease refused: {answer['error']['code']}"] += 1
            return None
        choice, owner = answer["choices"][0], headers["x-bequest-replica"]
        if answer.get("retained") is None:
            return None
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        lasts = bool(answer["retained"].get("durable"))
        self.score.seen["durable leases" if lasts else "leases in memory"] += 1
        return Lease(name if named else answer["id"], tokens, lasts, owner, lives.get(owner, 0))

    async def child(self, lease: Lease, more: dict[str, Any]) -> None:
        suffix = self.tokens(4)
        asked = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
        lived = self.world.lives[lease.owner] == lease.life
        body = {"continuation_of": lease.reference, "continuation_token_ids": suffix, "continuation_at": "last"}
        status, answer, headers = await self.persist("/v1/completions", body | asked)
        lived = lived and self.world.lives[lease.owner] == lease.life and not self.world.restarting
        if status != 200:
            self.refused(lease, lived, status, answer)
            return
        self.score.seen["continuations"] += 1
        if lived:
            self.count_way(lease, headers)
        inherited = answer["continuation"]
        self.score.seen[f"source {inherited['source']}"] += 1
        if (lease.durable or lived) and inherited["computed_tokens"] != len(suffix) + 1:
            self.score.fault(f"a lease was computed again: {inherited}")
        whole = {"prompt": lease.tokens + suffix, "cache_salt": str(self.draw.random()), "store": False}
        status, expected, _ = await self.persist("/v1/completions", whole | asked)
        if status == 200 and _ids(expected) != _ids(answer):
            self.score.fault(f"wrong tokens: {_ids(answer)}, not {_ids(expected)} of {lease}")

    def count_way(self, lease: Lease, headers: dict[str, str]) -> None:
        """Of a child whose owner lived all the time."""
        there = headers["x-bequest-replica"] == lease.owner and "detour" not in headers
        self.score.seen["owner lived"] += 1
        self.score.seen["reached its owner"] += there
        if not there:
            kind = "id" if lease.reference.startswith("cmpl-") else "name"
            way = "by a detour" if "detour" in headers else f"at {headers['x-bequest-replica']}, not {lease.owner}"
            self.score.seen[f"missed: {kind}, {way}, {time.monotonic() - self.world.router_ended:.0f} s"] += 1

    def refused(self, lease: Lease, lived: bool, status: int, answer: Any) -> None:
        code = answer["error"]["code"]
        what = "durable" if lease.durable else "in memory, owner lived" if lived else "in memory, owner ended"
        self.score.seen[f"refused ({what}): {status} {code}"] += 1
        if code in ("insufficient_retention", "queue_full"):
            return
        if lease.durable or lived or code not in ("continuation_parent_not_found", "continuation_parent_expired"):
            self.score.fault(f"a lease ({what}) was refused with {status} {code}")

    # --- requests ------------------------------------------------------------------------------------------------

    async def persist(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        """Again, while a process that was ended comes back: what a client's retries do."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                status, answer, headers = await self.post(path, body)
            except CutOff:
                status, answer, headers = 503, {"error": {"code": "cut off"}}, {}
            if status not in (421, 503) or time.monotonic() > end:
                return status, answer, headers
            self.score.seen[f"repeated after {status} {answer['error']['code']}"] += 1
            await asyncio.sleep(0.5)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        try:
            async with self.session.post(self.world.url + path, json=body) as answer:
                data = await answer.read()
                if answer.status in (502, 504) or not data.startswith(b"{"):
                    raise CutOff
                found = json.loads(data)
                if answer.status == 503:
                    raise CutOff
                headers = {name.lower(): value for name, value in answer.headers.items()}
                return answer.status, found, headers | ({"detour": "1"} if answer.history else {})
        except (aiohttp.ClientError, OSError):
            raise CutOff from None

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(10, 2000) for _ in range(count)]


async def torment(world: World, minutes: float, environment: dict[str, str]) -> None:
    """One kill a minute; the restart in the middle, the router in the last third."""
    draw, began = random.Random(1), time.monotonic()
    done: set[str] = set()
    while (passed := time.monotonic() - began) < minutes * 60:
        await asyncio.sleep(5)
        if "restart" not in done and passed > minutes * 30:
            done.add("restart")
            await _rolling_restart(world, environment)
        elif "reload" not in done and passed > minutes * 42:
            done.add("reload")
            await _end_router(world, signal.SIGUSR2)
        elif "router" not in done and passed > minutes * 48:
            done.add("router")
            await _end_router(world, signal.SIGKILL)
        elif f"kill {int(passed // 60)}" not in done and passed > 20:
            done.add(f"kill {int(passed // 60)}")
            tag = draw.choice(TAGS)
            if (pid := world.pid_of(tag)) is not None:
                world.lives[tag] += 1
                os.kill(pid, signal.SIGKILL)
                world.score.seen["replicas killed"] += 1


async def _rolling_restart(world: World, environment: dict[str, str]) -> None:
    world.restarting = True
    command = [sys.executable, "-m", "bequest", "cluster", "restart"]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    if await process.wait():
        world.score.fault(f"the rolling restart ended with {process.returncode}")
    for tag in TAGS:  # each was ended somewhere in between
        world.lives[tag] += 1
    world.restarting = False
    world.score.seen["rolling restarts"] += 1


async def _end_router(world: World, number: signal.Signals) -> None:
    world.router_ended = time.monotonic()
    configuration = str(world.folder / "cluster" / "router1" / "haproxy.cfg")
    pids = _processes(configuration)
    for pid in pids[:1] if number == signal.SIGUSR2 else pids:
        os.kill(pid, number)
    world.score.seen["router reloads" if number == signal.SIGUSR2 else "routers killed"] += 1


async def first_tokens(session: aiohttp.ClientSession, world: World, count: int = 150) -> dict[str, float]:
    """Medians in milliseconds, of r1 itself and through the router, in turns."""
    times: dict[str, list[float]] = {"direct": [], "routed": []}
    for number in range(count):
        for way, url in (("direct", f"http://127.0.0.1:{world.port + 101}"), ("routed", world.url)):
            body = {"prompt": [number % 900 + 10, 5, 7], "max_tokens": 1, "stream": True}
            began = time.perf_counter()
            named = {"X-Bequest-Replica": "r1"}
            async with session.post(f"{url}/v1/completions", json=body, headers=named) as answer:
                await answer.content.readany()
                times[way].append(1000 * (time.perf_counter() - began))
                await answer.read()
    return {way: statistics.median(found) for way, found in times.items()}


def _ids(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def _processes(*words: str) -> list[int]:
    """Whose command lines have all these words; the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            said = {*(entry / "cmdline").read_bytes().split(b"\0")} if entry.name.isdigit() else set()
            if {word.encode() for word in words} <= said:
                found.append(int(entry.name))
    return sorted(found)


async def soak(world: World, given: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        medians = await first_tokens(session, world)
        end = time.monotonic() + given.minutes * 60
        clients = [Client(session, world, given.seed + number).run(end) for number in range(given.clients)]
        await asyncio.gather(torment(world, given.minutes, environment), *clients)
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(SHAPE, folder / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bequest", "cluster", "up", "--replicas", "3", "--port", str(given.port)]
        command += ["--estates", str(folder / "estates"), "--folder", str(folder / "cluster"), "--drain", "15"]
        world = World(f"http://127.0.0.1:{given.port}", folder, given.port)
        with subprocess.Popen([*command, str(model), *SERVE], stderr=subprocess.PIPE, text=True, env=environment) as up:
            try:
                assert up.stderr is not None
                while "ready on" not in (line := up.stderr.readline()):
                    if not line:
                        raise SystemExit("the cluster did not come up")
                    print(line, end="", file=sys.stderr)
                medians = asyncio.run(soak(world, given, environment))
            finally:
                up.terminate()
                up.wait(120)
    return report(world.score, medians, given)


def report(score: Score, medians: dict[str, float], given: argparse.Namespace) -> int:
    score.show()
    seen = score.seen
    share = seen["reached its owner"] / max(seen["owner lived"], 1)
    added = medians["routed"] - medians["direct"]
    print(f"first token p50: {medians['direct']:.2f} ms direct, {medians['routed']:.2f} ms routed ({added:+.2f} ms)")
    print(f"reached its owner where that lived: {100 * share:.2f} %")
    if given.json is not None:
        figures = {"seen": dict(seen), "faults": score.faults, "first_token_ms": medians, "reached": share}
        given.json.write_text(json.dumps(figures))
    return 1 if score.faults else 0


if __name__ == "__main__":
    sys.exit(main())
