"""Whatever the client's pace, a stream's events add up to what the engine delivered, in order and once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.types import ChoiceDelta, Delta, Usage
from bequest.server.answers.chunks import Chunks
from bequest.server.answers.report import Report
from bequest.server.transport.sse import Done, EventStream, _Connection

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
# Each step: whether the client takes bytes during it, and what each choice gains (None: nothing).
STEPS = st.lists(st.tuples(st.booleans(), st.lists(st.none() | TEXT, min_size=2, max_size=2)), min_size=1, max_size=30)


class Wire:
    """A transport that remembers, and a protocol that can be paused."""

    def __init__(self) -> None:
        self.writing_paused = False
        self.data = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        assert not self.writing_paused, "nothing is written to a client that lags"
        self.data += data


class PlainChunks(Chunks):
    plain_prefix = '{"index":%d,"text":'
    plain_suffix = b',"finish_reason":null}]}\n\n'

    def choice(self, choice: ChoiceDelta, first: bool, prompt_logprobs: Any) -> dict[str, Any]:
        return {"index": self._indices[choice.index], "text": choice.text, "finish_reason": choice.finish_reason}


@given(STEPS, st.integers(0, 3))
def test_events_add_up(steps: list[tuple[bool, list[str | None]]], opened_after: int) -> None:
    asyncio.run(play(steps, opened_after))


async def play(steps: list[tuple[bool, list[str | None]]], opened_after: int) -> None:
    wire = Wire()
    stream = EventStream(Done(lambda endings: b""), keep_alive=0)
    source = stream.add_source(PlainChunks({"id": "x"}, range(2), detailed=False, report=Report()))
    told = ["", ""]
    for number, (takes, gains) in enumerate(steps):
        if number == opened_after:
            stream._connection = _Connection(SimpleNamespace(protocol=wire, transport=wire, chunked=False))  # type: ignore[arg-type]
        wire.writing_paused = not takes
        if number >= opened_after and takes:
            stream._flush()  # as the handler's task does when the client has caught up
        texts = [gain if gain is not None or number else "" for gain in gains]
        choices = tuple(ChoiceDelta(i, text, (1,)) for i, text in enumerate(texts) if text is not None)
        source(Delta("x", choices, first=number == 0))
        told = [before + (gain or "") for before, gain in zip(told, gains, strict=True)]
    ends = tuple(ChoiceDelta(i, "end", (2,), finish_reason="stop") for i in range(2))
    source(Delta("x", ends, usage=Usage(1, 1, 0)))
    wire.writing_paused = False
    stream._connection = stream._connection or _Connection(
        SimpleNamespace(protocol=wire, transport=wire, chunked=False)  # type: ignore[arg-type]
    )
    stream._flush()

    parts = wire.data.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    events = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    assert [[choice["index"] for choice in event["choices"]] for event in events[:2]] == [[0], [1]]
    heard = ["", ""]
    for choice in (choice for event in events for choice in event["choices"]):
        heard[choice["index"]] += choice["text"]
    assert heard == [text + "end" for text in told]
    assert [c["index"] for e in events for c in e["choices"] if c["finish_reason"]] == [0, 1]
