"""All replicas at one address: samples with their replica, and a state for operators alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bequest.cluster.haproxy import Backend
from bequest.cluster.overview import Overview, labelled
from tests.cluster.places import free_ports
from tests.server.conftest import (
    Starter,
    start,  # noqa: F401  a fixture
)
from tests.server.front import Front
from tests.server.test_console import key_file

ONE = """\
# HELP a_total Some.
# TYPE a_total counter
a_total{model_name="m"} 3.0
# HELP b Others.
# TYPE b gauge
b 1e+06
"""


def test_samples_of_one_family_stay_together() -> None:
    """A scraper wants that. Numbers stay as they were written."""
    text = labelled({"r1": ONE, "r2": ONE.replace("3.0", "4.0"), "r3": None})
    assert (
        text
        == """\
# HELP a_total Some.
# TYPE a_total counter
a_total{replica="r1",model_name="m"} 3.0
a_total{replica="r2",model_name="m"} 4.0
# HELP b Others.
# TYPE b gauge
b{replica="r1"} 1e+06
b{replica="r2"} 1e+06
# HELP bequest:replica_up Whether the replica answers.
# TYPE bequest:replica_up gauge
bequest:replica_up{replica="r1"} 1
bequest:replica_up{replica="r2"} 1
bequest:replica_up{replica="r3"} 0
"""
    )


@asynccontextmanager
async def overview(*fronts: Front) -> AsyncIterator[str]:
    """Of these servers, and of one that does not answer."""
    port, nobody = free_ports(2)
    ports = [int(front.url.rpartition(":")[2]) for front in fronts]
    backends = [Backend(f"r{number}", "127.0.0.1", at) for number, at in enumerate([*ports, nobody], 1)]
    running = Overview(lambda: backends, lambda: {"replicas": {}, "sum": {"running": 7}})
    await running.start(port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await running.close()


async def asked(url: str, key: str | None = None) -> tuple[int, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_the_metrics_of_all(start: Starter) -> None:  # noqa: F811
    async with overview(await start(), await start()) as url:
        status, text = await asked(f"{url}/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = {sample.labels["replica"]: sample.value for sample in families["vllm:num_requests_running"].samples}
    assert running == {"r1": 0.0, "r2": 0.0}
    assert [sample.value for sample in families["bequest:replica_up"].samples] == [1.0, 1.0, 0.0]


async def test_who_may_see_what(start: Starter, tmp_path: Path) -> None:  # noqa: F811
    """As the replicas say: a key for guarded metrics, an operator's for the state."""
    front = await start(api_key_file=key_file(tmp_path), guard_metrics=True)
    async with overview(front) as url:
        assert (await asked(f"{url}/metrics"))[0] == 401
        assert (await asked(f"{url}/metrics", "b"))[0] == 200
        assert (await asked(f"{url}/cluster/state"))[0] == 401
        status, text = await asked(f"{url}/cluster/state", "g")
        assert status == 403 and "operator" in text
        assert await asked(f"{url}/cluster/state", "b") == (200, '{"replicas": {}, "sum": {"running": 7}}')
    async with overview() as url:
        assert (await asked(f"{url}/cluster/state"))[0] == 503


async def test_a_server_says_that_it_is_a_replica(start: Starter) -> None:  # noqa: F811
    async def said(**flags: Any) -> object:
        _, state = await (await start(**flags)).get("/console/state")
        return state["replica"]

    assert (await said(), await said(replica_tag="r2")) == (None, "r2")
