"""The fuzzer asks every route, mostly well, and finds what is broken."""

from __future__ import annotations

from typing import Any

from benchmarks.fuzz.__main__ import Campaign
from benchmarks.fuzz.document import operations_of
from benchmarks.fuzz.minimising import minimised
from bequest.engine.types import Request, Sink
from bequest.server.about.openapi import document
from tests.attack.conftest import Serve, Victim
from tests.server.fakes import FakeEngine


class Broken(FakeEngine):
    """Falls over whenever eight or seventeen tokens are asked for."""

    def submit(self, request: Request, sink: Sink, *, goes_on: bool = False) -> None:
        if request.params.max_tokens in (8, 17):
            raise ZeroDivisionError
        super().submit(request, sink, goes_on=goes_on)


async def campaign(victim: Victim, requests: int, seed: int, clients: int) -> Campaign:
    fuzzing = Campaign(victim.front.url, {"anonymous": None}, requests, seed, server=None)
    await fuzzing.run(clients)
    return fuzzing


async def test_most_requests_are_good_and_no_answer_is_our_fault(fake: Victim) -> None:
    report = (await campaign(fake, 400, seed=1, clients=4)).report
    assert not report.faults, report.faults
    assert report.share_ok >= 0.5
    assert set(report.statuses) == {operation.name for operation in operations_of(document())}


async def test_what_is_broken_is_found_and_made_small(serve: Serve) -> None:
    # One client: the order in which several are answered, and so what is asked next, is the machine's.
    report = (await campaign(serve(engine=Broken), 400, seed=2, clients=1)).report
    found = [fault for fault in report.faults.values() if fault.what == "500 internal_error" and fault.body]
    assert found, report.faults
    for fault in found:
        assert {8, 17} & {value for value in fault.body.values() if isinstance(value, int)}, fault.body
        assert len(fault.body) <= 3, fault.body


async def test_the_smallest_body_that_breaks_is_what_is_left() -> None:
    async def breaks(body: Any) -> bool:
        return isinstance(body, dict) and 7 in body.get("a", [])

    assert await minimised({"x": [1, 2, {"y": 3}], "a": [1, 7, 9], "b": {"a": 7}}, breaks) == {"a": [7]}


def test_references_of_the_document_are_resolved() -> None:
    operations = {operation.name: operation for operation in operations_of(document())}
    chat = operations["POST /v1/chat/completions"].fields
    assert chat is not None and "properties" in chat["stream_options"]["anyOf"][0]
    form = operations["POST /v1/audio/transcriptions"]
    assert form.fields is not None and {"file", "language"} <= form.fields.keys() and form.required == {"file"}
