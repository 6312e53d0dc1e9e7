"""Bodies that are large for the files in them alone: few ways to worker threads and back, as of small bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from bequest.server.access.turns import FairPool
from bequest.server.transport import intake
from bequest.server.wire.inline_files import file_bytes
from tests.attack.conftest import Serve
from tests.server.fakes import FakeEngine, seeing_engine
from tests.tiny_seeing import data_url, encoded, picture

pytest.importorskip("PIL")
PHOTOGRAPH = data_url(encoded(picture(300, 300)))  # noise, of 360 KB


def chat(*parts: dict[str, Any], **fields: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **fields})


def image(url: str = PHOTOGRAPH) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(said: str = "what is it?") -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One for each way to a worker thread: what is done there."""
    seen: list[str] = []
    run = FairPool.run

    async def counted(self: FairPool, tenant: str, work: Callable[[], Any]) -> Any:
        seen.append(work.__qualname__)
        return await run(self, tenant, work)

    monkeypatch.setattr(FairPool, "run", counted)
    return seen


async def test_an_image_is_read_in_few_ways(serve: Serve, ways: list[str]) -> None:
    """Its body is read, its pixels are made, and beside these its digest."""
    victim = serve(engine=seeing_engine)
    answer, content = await victim.front.post("/v1/chat/completions", chat(image(), text()))
    assert answer.status == 200, content
    assert len(ways) == 3, ways
    engine = victim.server.context.engine
    assert isinstance(engine, FakeEngine)
    assert engine.looked_ahead == [image.first_id for image in engine.submitted[0].images]


async def test_a_long_text_beside_an_image(serve: Serve, ways: list[str]) -> None:
    """It is rendered where nobody waits for it; and so is all else, where the text alone is large."""
    victim = serve(engine=seeing_engine)
    await victim.front.post("/v1/chat/completions", chat(image(), text("why? " * 500)))
    assert "_tokenised.<locals>.work" in ways and "chat_ask.<locals>.work" not in ways
    await victim.front.post("/v1/chat/completions", chat(image(), text("why? " * 4000)))
    assert "chat_ask.<locals>.work" in ways


async def test_a_body_without_room_for_one_go(serve: Serve, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted first, and parsed when there is room for what it holds."""
    monkeypatch.setattr(intake, "_ONE_GO", 0)
    victim = serve(engine=seeing_engine)
    answer, content = await victim.front.post("/v1/chat/completions", chat(image(), text()))
    assert answer.status == 200, content
    assert len(ways) == 4, ways
    assert await victim.server.on_loop(lambda: victim.server.context.in_flight.used_bytes) == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"image_url": {"url": "data:abc"}}, 8),
        ([{"image_url": "data:abcd"}, {"image": "data:a"}, 7, "data:a"], 15),
        ({"text": "data:abc", "url": "https://data:abc"}, 0),
        ({"url": ["data:abc"]}, 0),
        ({"url": None}, 0),
    ],
)
def test_bytes_of_files(value: Any, expected: int) -> None:
    assert file_bytes(value) == expected
