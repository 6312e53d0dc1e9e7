"""Lists of much: a page costs what is on it."""

from __future__ import annotations

from bequest.engine.types import RecordEntry
from tests.attack.conftest import Serve
from tests.server.fakes import FakeEngine


class _Many(FakeEngine):
    """Has a thousand records, and counts how many are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = 0

    def record_names(self, tenant: str) -> list[tuple[str, str | None]]:
        return [(f"cmpl-{i}", None) for i in range(1000)]

    def record(self, tenant: str, reference: str) -> RecordEntry:
        self.looked_at += 1
        return RecordEntry(reference, None, 1.0, None, "warm", None, None, 0, ())


async def test_a_page_looks_at_its_own_records_alone(serve: Serve) -> None:
    victim = serve(engine=_Many)
    engine = victim.server.engine
    answer, content = await victim.front.get("/v1/continuations?limit=1")
    assert answer.status == 200 and engine.looked_at == 1
    assert content["has_more"] and content["last_id"] == "cmpl-999"
    answer, content = await victim.front.get("/v1/continuations?limit=100&after=cmpl-500&order=asc")
    assert answer.status == 200 and engine.looked_at == 101
    assert [entry["id"] for entry in content["data"]] == [f"cmpl-{i}" for i in range(501, 601)]
