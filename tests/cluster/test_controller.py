"""What the controller does, and in which order, over replicas and routers that write it down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bequest.cluster import controller
from bequest.cluster.command import shown
from bequest.cluster.controller import Controller, ReplicaEnded
from bequest.cluster.figures import Figures
from bequest.cluster.haproxy import Backend
from bequest.cluster.settings import ClusterSettings, tag_of


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_LOOK", 0.04)


class Stage:
    """Fleet, router and looker in one."""

    def __init__(self, **settings: int) -> None:
        self.told: list[str] = []
        self.figures: dict[str, Figures] = {}
        self.down: set[str] = set()
        self.ended: set[int] = set()  # servers that did not stay
        self.unreached: set[str] = set()  # by the router
        self.places: dict[int, Backend] = {}
        self.alive = True
        self.address = "http://127.0.0.1:8000"
        self.now = 0.0
        fields = {"replicas": 2, "least": 1, "most": 4, **settings}
        routers: Any = [self]
        self.controller = Controller(
            ClusterSettings(**fields),
            _Fleet(self),
            routers,
            self.look,
            lambda: self.now,  # type: ignore[arg-type]
        )

    async def comes_to(self, told: list[str]) -> None:
        """And goes no further."""
        for _ in range(10_000):
            if len(self.told) >= len(told):
                break
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # ten looks
        assert self.told == told

    @property
    def is_alive(self) -> bool:
        return self.alive

    def start(self, backends: list[Backend]) -> None:
        self.alive = True
        self.told.append("router starts with " + " ".join(one.tag for one in backends))

    def reload(self, backends: list[Backend]) -> None:
        self.told.append("router has " + " ".join(f"{one.tag}@{one.host}" for one in backends))

    def set_state(self, tag: str, state: str) -> None:
        self.told.append(f"{tag} {state}")

    def reaches(self, tag: str) -> bool:
        return tag not in self.unreached

    def set_weight(self, tag: str, weight: int) -> None:
        self.told.append(f"{tag} weighs {weight}")

    def stop(self) -> None:
        self.told.append("router stops")

    async def look(self, backend: Backend) -> Any:
        return None if backend.tag in self.down else ("ready", self.figures.get(backend.tag, Figures()))


class _Fleet:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def start(self, number: int) -> Backend:
        self.stage.told.append(f"start {tag_of(number)}")
        self.stage.places[number] = Backend(tag_of(number), "127.0.0.1", 8100 + number)
        return self.stage.places[number]

    async def locate(self, number: int) -> Backend | None:
        return self.stage.places.get(number)

    async def renew(self, number: int) -> None:
        self.stage.told.append(f"renew {tag_of(number)}")

    async def keeps(self, number: int) -> bool:
        return number not in self.stage.ended

    async def retire(self, number: int) -> None:
        self.stage.told.append(f"retire {tag_of(number)}")


async def up(**settings: int) -> Stage:
    stage = Stage(**settings)
    await stage.controller.up()
    assert stage.told == ["start r1", "start r2", "router starts with r1 r2"]
    stage.told.clear()
    return stage


async def test_scaling_drains_before_it_takes_away() -> None:
    """The router knows before the server ends, and forgets it afterwards."""
    stage = await up()
    await stage.controller.scale(3)
    assert stage.told == ["start r3", "router has r1@127.0.0.1 r2@127.0.0.1 r3@127.0.0.1"]
    stage.told.clear()
    await stage.controller.scale(1)
    assert stage.told == [
        *("r3 drain", "retire r3", "router has r1@127.0.0.1 r2@127.0.0.1"),
        *("r2 drain", "retire r2", "router has r1@127.0.0.1"),
    ]


async def test_a_number_that_is_free_is_taken_again() -> None:
    """So its tag is, with the leases that it left."""
    stage = await up()
    await stage.controller.scale(1)
    stage.told.clear()
    await stage.controller.scale(2)
    assert stage.told[0] == "start r2"


@pytest.mark.parametrize("replicas", [0, 5])
async def test_out_of_bounds(replicas: int) -> None:
    stage = await up()
    with pytest.raises(ValueError, match=r"from 1 \(--min\) to 4 \(--max\)"):
        await stage.controller.scale(replicas)
    assert stage.told == []


async def test_a_rolling_restart_waits_for_each() -> None:
    stage = await up()
    stage.down.add("r1")
    restarting = asyncio.ensure_future(stage.controller.renew())
    await stage.comes_to(["r1 drain", "renew r1"])
    stage.down.clear()
    await restarting
    assert stage.told == ["r1 drain", "renew r1", "r1 ready", "r2 drain", "renew r2", "r2 ready"]


async def test_a_replica_that_does_not_come_back_ends_a_restart() -> None:
    """A wrong key file, say. The others run on, and routers give it prompts as soon as it is well."""
    stage = await up()
    stage.down.add("r1")
    stage.ended.add(1)
    with pytest.raises(ReplicaEnded, match=r"r1 ended while it loaded.*/r1\.log"):
        await stage.controller.renew()
    assert stage.told == ["r1 drain", "renew r1", "r1 ready"]
    await stage.controller.scale(1)


async def test_the_end_does_not_wait_for_a_restart() -> None:
    stage = await up()
    stage.down.add("r1")
    restarting = asyncio.ensure_future(stage.controller.renew())
    await stage.comes_to(["r1 drain", "renew r1"])
    await stage.controller.down()
    await restarting
    assert stage.told[2:] == ["r1 ready", "retire r1", "retire r2", "router stops"]


async def test_a_rolling_restart_waits_for_the_router() -> None:
    """It finds by checks of its own that a replica is back, and would have nobody meanwhile."""
    stage = await up()
    stage.unreached.add("r1")
    restarting = asyncio.ensure_future(stage.controller.renew())
    await stage.comes_to(["r1 drain", "renew r1", "r1 ready"])
    stage.unreached.clear()
    await restarting
    assert stage.told[3:] == ["r2 drain", "renew r2", "r2 ready"]


async def test_a_replica_that_a_router_never_reaches_does_not_hold_up_all() -> None:
    stage = await up()
    stage.unreached.add("r1")
    restarting = asyncio.ensure_future(stage.controller.renew())
    await stage.comes_to(["r1 drain", "renew r1", "r1 ready"])
    stage.now = 60.0
    await restarting
    assert stage.told[-1] == "r2 ready"


async def test_a_router_that_ended_is_started_again() -> None:
    stage = await up()
    stage.alive = False
    await stage.controller.look_once()
    assert stage.told == ["router starts with r1 r2"]


async def test_a_replica_that_moved_is_found() -> None:
    stage = await up()
    stage.places[2] = replace(stage.places[2], host="10.0.0.7")
    await stage.controller.look_once()
    assert stage.told == [], "it answers where it was"
    stage.down.add("r2")
    await stage.controller.look_once()
    assert stage.told == ["router has r1@127.0.0.1 r2@10.0.0.7"]


async def test_it_scales_by_itself() -> None:
    stage = await up()
    for second in range(17):
        stage.now = float(second)
        queued = Figures(queued_requests=10.0 * second, queued_seconds=30.0 * second, budget_blocks=10)
        stage.figures = {"r1": queued, "r2": queued}
        await stage.controller.look_once()
    assert "start r3" in stage.told


async def test_a_replica_full_of_leases_gets_fewer_prompts() -> None:
    """Said once, and again when a router begins anew."""
    stage = await up()
    stage.figures = {"r1": Figures(leased_blocks=9, budget_blocks=10), "r2": Figures(leased_blocks=1, budget_blocks=10)}
    await stage.controller.look_once()
    await stage.controller.look_once()
    assert stage.told == ["r1 weighs 3"]
    stage.alive = False
    await stage.controller.look_once()
    assert stage.told == ["r1 weighs 3", "router starts with r1 r2", "r1 weighs 3"]
    stage.figures = {}
    await stage.controller.look_once()
    assert stage.told[-1] == "r1 weighs 10"


async def test_the_end_comes_after_the_last_answer() -> None:
    stage = await up()
    await stage.controller.down()
    assert stage.told == ["retire r1", "retire r2", "router stops"]


async def test_status_has_each_and_the_sum() -> None:
    stage = await up()
    stage.figures = {"r1": Figures(running=2, leased_blocks=1, budget_blocks=4), "r2": Figures(running=3)}
    stage.down.add("r2")
    await stage.controller.look_once()
    status = stage.controller.status()
    assert status["replicas"]["r1"]["running"] == 2 and status["replicas"]["r2"]["state"] == "down"
    assert status["sum"]["running"] == 2 and status["sum"]["leased_share"] == 0.25
    assert shown(status).splitlines() == [
        "replica  address         state  running  waiting  leases  leased  tokens",
        "r1       127.0.0.1:8101  ready  2        0        0       25%     0",
        "r2       127.0.0.1:8102  down   0        0        0       0%      0",
        "sum                             2        0        0       25%     0",
        "router   http://127.0.0.1:8000",
    ]
