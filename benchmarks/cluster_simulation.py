"""A SIMULATION of many replicas behind a router, on a clock that is only counted: no server runs.

    python -m benchmarks.cluster_simulation [--replicas 1,10,100,1000] [--minutes 10] [--json FILE]

What is real: the rules of routing (a tag in the id, a consistent hash with bounded load of how a prompt begins, and
weights by leased memory, cluster/scaling.py), and the engine's own budget of leases (engine/inheritance/budget.py).
What is assumed: how long a device takes, which the flags say, how often replicas fail, and what a request costs the
router. The traffic:

- agents of 43 turns whose conversation ends at 142,000 tokens, of which each turn samples 444. Each turn continues the
  one before by its id, under a lease of 5 minutes. The first turn begins with one of 50 system prompts, some of which
  are far more common than others.
- two-stage rankings: 500 tokens and 200 sampled, leased for a minute, then 5 more and a search.

A replica that fails is back after a while. Its agents find their leases in the store, where they were durable, or send
their whole conversation again.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

from bequest.cluster.scaling import weight_of
from bequest.engine.errors import EngineError
from bequest.engine.inheritance.budget import LeaseBudget

TURNS, LONGEST, SAMPLED = 43, 142_000, 444
SYSTEM, PROMPTS = 3_000, 50  # tokens of a system prompt, and how many there are
STAGE_PROMPT, STAGE_SAMPLED, STAGE_SUFFIX = 500, 200, 5
BLOCK = 16
AGENT_TTL, STAGE_TTL = 300.0, 60.0
LOAD_FACTOR = 1.5  # as in cluster/haproxy.py
_POINTS = 64  # of a replica on the ring
WARM_UP = 180.0  # seconds that are not counted: at the beginning every conversation is new to its replica


@dataclass(frozen=True)
class Assumed:
    """Of a device with an 8B model in bfloat16, about, and of its surroundings."""

    prefill: float = 20_000.0  # tokens per second
    step: float = 0.010  # seconds per sampled token while few run
    crowd: int = 64  # sequences from which on steps take longer in proportion
    budget_tokens: int = 1_600_000  # that leases may hold, on the device and on the host
    think: float = 8.0  # seconds between an agent's turns: its tools run
    agents: int = 6  # at a time, of each replica
    rankings: float = 2.0  # per second and replica
    failures: float = 24.0  # hours between two failures of a replica
    repair: float = 60.0  # seconds until it is back, its model loaded
    detection: float = 1.0  # seconds until the router knows
    store: float = 2e9  # bytes per second that a replica reads from the store
    token_bytes: int = 131_072
    durable: float = 1.0  # share of leases that are in the store
    router: float = 60e-6  # seconds of a core for a request
    hint: str = "conversation"  # what is hashed; system: the beginning of the system prompt alone
    weights: int = 1  # 0: a replica gets as many new prompts when its leases fill their budget


@dataclass
class Replica:
    number: int
    budget: LeaseBudget
    prefill_free: float = 0.0  # when the prompts before are computed
    open: int = 0
    down_until: float = 0.0
    points: int = _POINTS  # on the ring, by its weight
    prefixes: set[int] = field(default_factory=set)  # system prompts in its cache
    life: int = 0  # counts failures: what an earlier life held is gone


@dataclass
class Seen:
    counts: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    computed: int = 0  # tokens of prompts
    needed: int = 0  # of them, that had to be computed by anybody
    leased: list[float] = field(default_factory=list)  # fullest budgets, by the second
    imbalance: list[float] = field(default_factory=list)  # most open requests over the mean, by the second
    names: int = 0


@dataclass
class Lease:
    replica: int
    life: int
    blocks: int
    until: float
    serial: int


class Ring:
    """HAProxy's consistent hash with bounded load, as far as it decides here."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        points = [(_hash(f"{one.number}/{k}"), one.number, k) for one in replicas for k in range(_POINTS)]
        self._points = sorted(points)
        self._replicas = replicas
        self.open = 0  # requests of all replicas

    def choose(self, key: str, now: float) -> Replica:
        mean = (self.open + 1) / len(self._replicas)
        at = bisect_left(self._points, (_hash(key), 0, 0))
        for step in range(len(self._points)):
            _, number, point = self._points[(at + step) % len(self._points)]
            one = self._replicas[number]
            if point < one.points and one.down_until <= now and one.open < LOAD_FACTOR * mean:
                return one
        return min(self._replicas, key=lambda one: (one.down_until > now, one.open))


class Simulation:
    def __init__(self, replicas: int, assumed: Assumed, seed: int = 0) -> None:
        self.assumed = assumed
        blocks = assumed.budget_tokens // BLOCK
        self.replicas = [Replica(number, LeaseBudget(blocks, blocks, None)) for number in range(replicas)]
        self.ring = Ring(self.replicas)
        self.seen = Seen()
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, seconds: float) -> Seen:
        for one in self.replicas:
            for _ in range(self.assumed.agents):
                self.at(self.random.uniform(0, self.assumed.think * 4), Agent(self, self.random.randrange(TURNS)).turn)
            self._next_ranking(one.number)
            self._next_failure(one)
        self.at(1.0, self._look)
        self._until(WARM_UP)
        self.seen = Seen()
        self._until(WARM_UP + seconds)
        return self.seen

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()

    # --- the device ----------------------------------------------------------------------------------------------

    def compute(self, one: Replica, tokens: int, sampled: int, reading: float, then: Callable[[bool], None]) -> None:
        """Prompts are computed one after the other, answers beside each other. `then` hears whether it lived."""
        life, begins = one.life, max(self.now + reading, one.prefill_free)
        self.seen.waits.append(begins - self.now - reading)
        one.prefill_free = begins + tokens / self.assumed.prefill
        one.open += 1
        self.ring.open += 1
        self.seen.counts["requests"] += 1
        step = self.assumed.step * max(1.0, one.open / self.assumed.crowd)
        ends = one.prefill_free + sampled * step

        def ended() -> None:
            lived = one.life == life
            if lived:
                one.open -= 1
                self.ring.open -= 1
            then(lived)

        self.at(ends - self.now, ended)

    # --- leases --------------------------------------------------------------------------------------------------

    def lease(self, one: Replica, tokens: int, ttl: float, parent: Lease | None = None) -> Lease | None:
        """None: the budget is full, and the request goes without. What a parent pays for is paid once; here the child
        takes it over."""
        blocks = -(-tokens // BLOCK)
        shared = parent.blocks if parent is not None and self.is_good(parent) and parent.replica == one.number else 0
        try:
            one.budget.open_lease("t", blocks - shared, blocks, lambda tenant: None)
        except EngineError:
            self.seen.counts["leases refused"] += 1
            return None
        self.seen.counts["leases"] += 1
        if parent is not None and shared:
            parent.blocks = 0
            one.budget.close_lease("t")
        lease = Lease(one.number, one.life, blocks, self.now + ttl, next(self._numbers))
        self.at(ttl, lambda: self.release(lease))
        return lease

    def release(self, lease: Lease) -> None:
        one = self.replicas[lease.replica]
        if lease.blocks and one.life == lease.life:
            one.budget.settle("t", lease.blocks)
            one.budget.close_lease("t")
        lease.blocks = 0

    def is_good(self, lease: Lease | None) -> bool:
        return lease is not None and self.now < lease.until and self.replicas[lease.replica].life == lease.life

    # --- what happens by itself ----------------------------------------------------------------------------------

    def _next_ranking(self, number: int) -> None:
        self.at(self.random.expovariate(self.assumed.rankings), lambda: self._rank(number))

    def _rank(self, number: int) -> None:
        self._next_ranking(number)
        Ranking(self).begin()

    def _next_failure(self, one: Replica) -> None:
        hours = self.random.expovariate(1 / self.assumed.failures)
        self.at(hours * 3600, lambda: self._fail(one))

    def _fail(self, one: Replica) -> None:
        self.seen.counts["failures"] += 1
        one.life += 1
        self.ring.open -= one.open
        one.open, one.prefixes = 0, set()
        one.down_until = self.now + self.assumed.repair
        one.prefill_free = one.down_until
        one.budget = LeaseBudget(one.budget.capacity, one.budget.capacity, None)
        self._next_failure(one)

    def _look(self) -> None:
        self.at(1.0, self._look)
        for one in self.replicas if self.assumed.weights else ():
            one.points = weight_of(one.budget.used / one.budget.capacity, _POINTS)
        self.seen.leased.append(max(one.budget.used / one.budget.capacity for one in self.replicas))
        mean = sum(one.open for one in self.replicas) / len(self.replicas)
        if mean >= 1:
            self.seen.imbalance.append(max(one.open for one in self.replicas) / mean)


class Agent:
    def __init__(self, simulation: Simulation, turn: int) -> None:
        """It may be in the midst of its work when the simulation begins."""
        self.world, self.number = simulation, turn
        self._begin()

    def _begin(self) -> None:
        draw = self.world.random
        self.prompt = min(int(draw.paretovariate(1.0)) - 1, PROMPTS - 1)
        self.key = f"prompt {self.prompt}" + (f" {draw.random()}" if self.world.assumed.hint == "conversation" else "")
        self.parent: Lease | None = None
        self.home: int | None = None

    @property
    def tokens(self) -> int:
        return SYSTEM + (LONGEST - SYSTEM) * self.number // TURNS

    def turn(self) -> None:
        if self.number == TURNS:
            self.number = 0
            self._begin()
        before, self.number = self.tokens, self.number + 1
        whole = self.tokens - SAMPLED
        one, inherited, reading = self._routed(before)
        world = self.world
        world.seen.needed += whole - before if self.home is not None else whole - SYSTEM
        world.seen.computed += whole - inherited
        lease = world.lease(one, self.tokens, AGENT_TTL, self.parent)
        self.parent, self.home = lease, one.number
        one.prefixes.add(self.prompt)
        world.compute(one, whole - inherited, SAMPLED, reading, self._ended)

    def _routed(self, before: int) -> tuple[Replica, int, float]:
        """Where this turn goes, how many tokens it inherits there, and how long they take to be read."""
        world = self.world
        if self.home is None:
            one = world.ring.choose(self.key, world.now)
            return one, SYSTEM if self.prompt in one.prefixes else 0, 0.0
        world.seen.counts["continuations"] += 1
        owner = world.replicas[self.home]
        if world.is_good(self.parent):
            world.seen.counts["at their owner"] += 1
            return owner, before, 0.0
        one = owner if owner.down_until <= world.now else world.ring.choose(self.key, world.now)
        in_store = self.parent is not None and world.now < self.parent.until
        if in_store and world.random.random() < world.assumed.durable:
            world.seen.counts["found in the store"] += 1
            return one, before, before * world.assumed.token_bytes / world.assumed.store
        world.seen.counts["sent again"] += 1
        return one, SYSTEM if self.prompt in one.prefixes else 0, 0.0

    def _ended(self, lived: bool) -> None:
        if not lived:
            self.world.seen.counts["cut off"] += 1
            self.number -= 1
        self.world.at(self.world.random.expovariate(1 / self.world.assumed.think), self.turn)


class Ranking:
    def __init__(self, simulation: Simulation) -> None:
        self.world = simulation

    def begin(self) -> None:
        world = self.world
        one = world.ring.choose(f"ranking {world.random.random()}", world.now)
        lease = world.lease(one, STAGE_PROMPT + STAGE_SAMPLED, STAGE_TTL)
        world.seen.names += 1
        world.seen.computed += STAGE_PROMPT
        world.seen.needed += STAGE_PROMPT
        world.compute(one, STAGE_PROMPT, STAGE_SAMPLED, 0.0, lambda lived: self._second(lived, one, lease))

    def _second(self, lived: bool, one: Replica, lease: Lease | None) -> None:
        world = self.world
        if not lived:
            world.seen.counts["cut off"] += 1
            return
        world.seen.counts["continuations"] += 1
        world.seen.counts["at their owner"] += 1
        tokens = STAGE_SUFFIX + 1 if lease is not None else STAGE_PROMPT + STAGE_SAMPLED
        world.seen.computed += tokens
        world.seen.needed += STAGE_SUFFIX + 1
        world.compute(one, tokens, 3, 0.0, lambda lived: None if lease is None else world.release(lease))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def figures(replicas: int, minutes: float, assumed: Assumed) -> dict[str, float]:
    seen = Simulation(replicas, assumed).run(minutes * 60)
    counts, seconds = seen.counts, minutes * 60
    waits = sorted(seen.waits)
    rate = counts["requests"] / seconds
    return {
        "replicas": replicas,
        "requests per second": rate,
        "router cores": rate * assumed.router,
        "wait p50 ms": 1000 * waits[len(waits) // 2],
        "wait p99 ms": 1000 * waits[int(len(waits) * 0.99)],
        "most over mean": sum(seen.imbalance) / max(len(seen.imbalance), 1),
        "fullest budget %": 100 * sum(seen.leased) / max(len(seen.leased), 1),
        "leases refused %": 100 * counts["leases refused"] / max(counts["leases refused"] + counts["leases"], 1),
        "at owner %": 100 * counts["at their owner"] / max(counts["continuations"], 1),
        "failures": counts["failures"],
        "from the store": counts["found in the store"],
        "sent again": counts["sent again"],
        "cut off": counts["cut off"],
        "computed / needed": seen.computed / max(seen.needed, 1),
        "names learned": seen.names,
        "checks per second": 2 * replicas,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A simulation of many replicas behind a router.")
    parser.add_argument("--replicas", default="1,10,100,1000")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    for name, value in asdict(Assumed()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args()
    assumed = Assumed(**{name: getattr(given, name) for name in asdict(Assumed())})
    columns = [figures(int(count), given.minutes, assumed) for count in given.replicas.split(",")]
    print(f"SIMULATED, {given.minutes:g} minutes; no server ran")
    for name in columns[0]:
        print(f"{name:<22}" + "".join(f"{column[name]:>12.4g}" for column in columns))
    if given.json is not None:
        given.json.write_text(json.dumps({"simulated": True, "assumed": asdict(assumed), "columns": columns}))


if __name__ == "__main__":
    main()
