"""Two engines that sleep, end and start again on their files, while clients continue, change and move what they left.

Random worlds of the scheduler (world.py) have neither files nor sleep nor estates. Here the engine itself runs over the
paged fake: every token is the oracle's, a lease inherits all that it can, and what was promised to last is there.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from bequest.engine.engine import AsyncEngine
from bequest.engine.errors import EngineError, InternalError, ParentExpired, ParentLost, ParentNotFound
from bequest.engine.formats.estate_file import from_bytes, to_bytes
from bequest.engine.types import Lineage, Request, Retain, SamplingParams
from bequest.engine.types.recurrent import StateSizes
from bequest.engine.vault.shelf import Shelf
from tests.engine.drafters import OracleDrafter
from tests.engine.drawn_states import with_states
from tests.engine.harness import EOS, Setup, make_engine, request
from tests.engine.paged_fake import VOCAB, expected_tokens

MAX_LEN = 60
CLIENTS, MOVES = 8, 150


class Site:
    """An engine, and the directory of its leases."""

    def __init__(self, path: Path, setup: Setup) -> None:
        self.path, self.setup = path, setup
        self.up = asyncio.Event()
        self.promised: set[str] = set()  # leases that outlive the engine
        self.changed: set[str] = set()  # those that somebody ended, or made short, maybe before their promise was read
        self.engine: AsyncEngine

    async def start(self) -> None:
        self.engine, _ = make_engine(self.setup)
        self.engine._estates.piece_bytes = 64
        await self.engine.open_files(Shelf(self.path, 10.0), 20.0)
        self.up.set()

    async def end(self, *, drains: bool) -> None:
        self.up.clear()
        assert not drains or await self.engine.drain(20)
        await self.engine.stop()
        for _ in range(100):  # who moves an estate hears of it a moment later
            for record in self.engine.retention.leases.holders():
                self.engine.retention.leases.end(record)
            with suppress(AssertionError):
                self.engine.scheduler.check_idle()
                break
            await asyncio.sleep(0.01)
        self.engine.scheduler.check_idle()


class Lives:
    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = draw = random.Random(seed)
        block_size, most = draw.choice([1, 3, 4, 8]), draw.choice([1, 2, 8])
        enough = -(-MAX_LEN // block_size)
        kind = draw.choice(["plain", "plain", "windows", "recurrent"])
        windows = (0, 3, 9) if kind == "windows" else (0,)
        self.exact = kind == "plain"
        leases = draw.choice([1, 3]) * enough * len(windows)
        setup = Setup(
            num_blocks=1 + leases + draw.choice([1, 4]) * enough * len(windows),
            block_size=block_size,
            max_num_seqs=most,
            chunk=draw.choice([4, 64]),
            prefix_caching=draw.random() < 0.7,
            max_model_len=MAX_LEN,
            num_host_blocks=draw.choice([1, 100]),
            num_lease_blocks=leases,
            num_file_blocks=10_000,
            states=StateSizes(num_slots=60, num_lease_slots=30, interval=7) if kind == "recurrent" else None,
            windows=windows,
            state_interval=8,
            idle_sleep=draw.choice([0.0, 0.005]),
            drafter=OracleDrafter(seed, 0.5) if draw.random() < 0.5 else None,
        )
        self.sites = [Site(folder / name, setup) for name in "ab"]
        self.known: list[str] = []
        self.seen: Counter[str] = Counter()
        self.left = MOVES

    async def live(self) -> None:
        for site in self.sites:
            await site.start()
        await asyncio.wait_for(asyncio.gather(*(self._client() for _ in range(CLIENTS))), 60)
        for site in self.sites:
            for entry in site.engine.records("t"):
                site.engine.forget("t", entry.id)
            assert await site.engine.drain(20)
            await site.engine.written()
            assert site.engine.retention.books.used == 0
            assert not [*(site.path / "leases").iterdir(), *(site.path / "blocks").iterdir()]
            await site.end(drains=False)
            assert site.engine.load().retention_charged == 0

    async def _client(self) -> None:
        moves = [self._ask] * 14 + [self._meddle] * 3 + [self._travel] * 2 + [self._sleep] * 2 + [self._restart]
        while self.left > 0:
            self.left -= 1
            site = self.draw.choice(self.sites)
            while not site.up.is_set():
                await site.up.wait()
            try:
                await self.draw.choice(moves)(site)
            except EngineError as error:
                assert not isinstance(error, ParentLost | InternalError) and site.engine.state != "dead"
                self.seen[type(error).__name__] += 1
            await asyncio.sleep(0)

    def _someone(self) -> str:
        return self.draw.choice(self.known[-30:]) if self.known else "nobody"

    async def _ask(self, site: Site) -> None:
        draw, engine = self.draw, site.engine
        prompt, lineage = [draw.randrange(10, VOCAB) for _ in range(draw.randint(1, 30))], None
        if draw.random() < 0.6:
            parent = await engine.parent_ended("t", self._someone(), None)
            tokens = parent.choices[0].token_ids
            at = draw.choice([len(tokens), draw.randint(1, len(tokens))])
            prompt, lineage = [*tokens[:at], *prompt[:2]], Lineage(parent.id, 0, at)
        params = SamplingParams(max_tokens=draw.choice([0, draw.randint(0, 20)]), temperature=0)
        if len(prompt) + max(1, params.max_tokens) > MAX_LEN:
            return
        retain = Retain(draw.choice([0.05, 600]), durable=draw.random() < 0.6) if draw.random() < 0.6 else None
        asked = request(prompt, params, lineage=lineage, retain=retain)
        asked = with_states(draw, asked) if draw.random() < 0.2 else asked
        await self._answered(site, engine, asked)

    def _inherited(self, engine: AsyncEngine, asked: Request) -> int:
        """What its parent's lease promises it."""
        lineage = asked.terms.lineage
        parent = None if lineage is None else engine.retention.get("t", lineage.parent)
        if not self.exact or parent is None or lineage is None or not parent.leased or asked.hidden_states is not None:
            return 0
        return min(lineage.at, parent.kept[0].computed, len(asked.prompt_token_ids) - 1)

    async def _answered(self, site: Site, engine: AsyncEngine, asked: Request) -> None:
        """By this engine: the next one on its files may not have them yet."""
        leaves, tokens, inherited = self.draw.random() < 0.1, list[int](), self._inherited(engine, asked)
        expected = expected_tokens(asked.prompt_token_ids, asked.params.max_tokens, eos=EOS)
        self.known.append(asked.id)
        async for delta in engine.generate(asked):
            tokens += [token for choice in delta.choices for token in choice.token_ids]
            if delta.inheritance is not None and inherited:
                assert delta.inheritance.inherited_tokens >= inherited
                assert delta.inheritance.source in ("blocks", "host", "file")
                self.seen[delta.inheritance.source] += 1
            retained, retain = delta.retained, asked.terms.retain
            if retained is not None and retained.durable and retain is not None and retain.ttl == 600:
                site.promised |= {asked.id} - site.changed
            if leaves and not delta.finished:
                break
            assert not delta.finished or tokens == expected
        assert tokens == expected[: len(tokens)]

    async def _meddle(self, site: Site) -> None:
        name, ttl = self._someone(), self.draw.choice([None, 0.05, 600])
        forgets = self.draw.random() < 0.5
        if forgets or ttl != 600:
            site.changed.add(name)
            site.promised.discard(name)
        if forgets:
            site.engine.forget("t", name)
        else:
            site.engine.set_ttl("t", name, ttl)

    async def _travel(self, site: Site) -> None:
        name, other = self._someone(), self.draw.choice(self.sites)
        estate = await site.engine.export_estate("t", name)
        await other.up.wait()
        await other.engine.import_estate("t", from_bytes(to_bytes(estate)), 600)
        self.seen["travelled"] += 1

    async def _sleep(self, site: Site) -> None:
        sleep = partial(site.engine.sleep, wakes_itself=True)
        for change in (sleep, site.engine.wake):
            task: asyncio.Task[object] = asyncio.ensure_future(change())
            await asyncio.wait({task}, timeout=self.draw.choice([0.0, 20.0]))
            task.cancel()  # who asked for it may leave
            await asyncio.wait({task})
            self.seen["slept"] += not task.cancelled() and task.exception() is None

    async def _restart(self, site: Site) -> None:
        await site.end(drains=self.draw.random() < 0.5)
        await site.start()
        self.seen["restarted"] += 1
        for name in site.promised:
            try:
                assert site.engine.record("t", name).grade == "stored"
            except (ParentNotFound, ParentExpired):
                pytest.fail(f"{name} was promised")


@pytest.mark.parametrize("seed", range(6))
async def test_lives_of_two_engines(seed: int, tmp_path: Path) -> None:
    lives = Lives(seed, tmp_path)
    await lives.live()
    assert lives.seen["restarted"]
