"""Sends random requests, mostly valid ones, and looks for answers that are the server's own fault.

    python -m benchmarks.fuzz [--requests 10000] [--clients 16] [--seed 0] [--json FILE] [--url URL [--key KEY …]]

Bodies are made from the fields of /openapi.json; a quarter of them is spoilt. Every route is asked, streams are read to
their end, answers' ids are continued, listed and deleted, some clients leave early, and tenants try each other's ids.
One tenant in three sends what is expensive: for it a late answer is no fault, for the others it is.
Beside that two canaries ask /health and for a stream of one token: their worst wait is what a request can cost others.
A fault is a 5xx, an error in a stream, an error without its object, no answer at all, or another tenant's data. Each
kind is shown once, with its body made as small as it can be, and with the server's traceback.

Without --url a server with a small random model is started, which has keys of four tenants. Exits with 1 on a fault.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fuzz.canaries import Canaries
from benchmarks.fuzz.document import operations_of
from benchmarks.fuzz.harvest import Harvest
from benchmarks.fuzz.minimising import minimised
from benchmarks.fuzz.report import Fault, Report
from benchmarks.fuzz.sending import Gun
from benchmarks.fuzz.shots import Chances, Maker
from benchmarks.fuzz.values import TEMPLATE, WORDS, Values
from benchmarks.soaking import Score, Server

TENANTS = ["ann", "bob", "eve", "canary"]  # eve is hostile
_SILENT = 5.0  # seconds between lines of progress


@dataclass
class Campaign:
    """What all clients share."""

    url: str
    keys: dict[str, str | None]  # by tenant; the last one is the canaries'
    requests: int
    seed: int
    server: Server | None

    def __post_init__(self) -> None:
        self.report, self.chances = Report(), Chances()
        self.harvest = Harvest(list(self.keys))
        self.sent = 0

    async def run(self, clients: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            operations = operations_of(await self._ask(session, "GET", "/openapi.json"))
            vocabulary = (await self._ask(session, "POST", "/tokenize", {"prompt": " ".join(WORDS)}))["tokens"]
            telling = asyncio.ensure_future(self._tell())
            running = []
            for number in range(clients):
                tenant, hostile = self._tenant_of(number)
                values = Values(random.Random(f"{self.seed} {number}"), self.harvest, tenant, vocabulary)
                gun = Gun(session, self.url, self.keys[tenant], tenant, self.harvest, may_wait=hostile)
                maker = Maker(operations, values, self.chances, hostile)
                if number == 0:
                    maker.unasked = list(operations)  # however few requests there are, every route is asked
                running.append(self._client(maker, gun))
            await asyncio.gather(*running)
            telling.cancel()

    def _tenant_of(self, client: int) -> tuple[str, bool]:
        """The tenant of a client, and whether that one is hostile: there must be others to see what it does to them."""
        tenants = list(self.keys)[:-1] or list(self.keys)
        tenant = tenants[client % len(tenants)]
        return tenant, len(tenants) > 2 and tenant == tenants[-1]

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> dict[str, Any]:
        key = next(iter(self.keys.values()))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with session.request(method, self.url + path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            told: dict[str, Any] = await answer.json()
            return told

    async def _client(self, maker: Maker, gun: Gun) -> None:
        while self.sent < self.requests:
            self.sent += 1
            shot = maker.shot()
            answer = await gun.fire(shot)
            self.chances.learn(shot, answer.status)
            if fault := self.report.count(shot, answer):
                print(f"  FAULT {fault.what}: {shot.method} {shot.path[:100]}", file=sys.stderr, flush=True)
                await self._look_into(fault, gun)
            if answer.fault.startswith("no answer") and self.server is not None and not self.server.is_alive:
                self.sent = self.requests  # there is nobody left to ask

    async def _look_into(self, fault: Fault, gun: Gun) -> None:
        if self.server is not None:
            fault.trace = trace_of(self.server.log, fault.answer.content)
        body = fault.shot.body
        if not isinstance(body, dict) or fault.what.startswith("no answer"):
            return

        async def breaks(candidate: Any) -> bool:
            return (await gun.fire(fault.shot.with_body(candidate))).fault == fault.what

        if await breaks(body):  # else it depends on what was there, such as a parent
            fault.body = await minimised(body, breaks)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_SILENT)
            shown = f"{self.sent} sent, {self.report.share_ok:.0%} answered with 200, {self.report.num_faults} faults"
            print(f"  {shown}", file=sys.stderr, flush=True)


def trace_of(log: str, content: bytes) -> str:
    """The traceback that the server wrote for an answer, by the id in its message."""
    found = re.search(rb"((?:cmpl-|chatcmpl-|resp_|hs-|req-|cat-)\w+)", content)
    if found is None:
        return ""
    _, _, after = log.partition(f"({found[1].decode()})")
    lines = after.splitlines()[1:]
    end = next((i for i, line in enumerate(lines) if re.match(r"\d{4}-\d\d-\d\d", line)), len(lines))
    return "\n".join(lines[:end][-8:])


def _start(folder: Path) -> tuple[Server, dict[str, str | None]]:
    """A server with keys of four tenants, whose model is random."""
    keys = {tenant: f"key-of-{tenant}" for tenant in TENANTS}
    file = folder / "keys.toml"
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in keys.items()))
    return Server(folder, ["--api-key-file", str(file)], chat_template=TEMPLATE), dict(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--key", action="append", default=[], help="one per tenant; the last one is the canaries'")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    score = Score()
    with tempfile.TemporaryDirectory() as folder:
        server, keys = None, {f"tenant {i}": key for i, key in enumerate(options.key)} or {"anonymous": None}
        if options.url is None:
            server, keys = _start(Path(folder))
        campaign = Campaign(options.url or server.url, keys, options.requests, options.seed, server)
        began = time.monotonic()
        canaries = Canaries(campaign.url, list(keys.values())[-1])
        try:
            with canaries:
                asyncio.run(campaign.run(options.clients))
        finally:
            if server is not None:
                server.end(score)
    seconds = time.monotonic() - began
    campaign.report.show(canaries, seconds)
    score.show()
    if options.json:
        figures = campaign.report.figures(canaries, seconds)
        Path(options.json).write_text(json.dumps(figures, indent=2, default=repr))
    sys.exit(1 if campaign.report.faults or score.faults else 0)


if __name__ == "__main__":
    main()
