"""Whatever the client's pace, a stream's events add up to what the engine delivered, in order and once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bequest.engine._C import Progress, TokenTexts
from bequest.engine.text.outlets import Outlet, pass_on
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


# A token is a character of these. As on its way through the engine, the second half has to go in a Delta.
ALPHABET = 'ab"\\é日🙂\n'
TOKENS = st.lists(st.tuples(st.booleans(), st.integers(0, 2 * len(ALPHABET) - 1)), max_size=30)


@given(TOKENS, st.booleans())
def test_tokens_that_pass_an_outlet_read_like_those_that_do_not(steps: list[tuple[bool, int]], chunked: bool) -> None:
    plain, passed = (asyncio.run(streamed(steps, chunked, through)) for through in (False, True))
    assert passed == plain


async def streamed(steps: list[tuple[bool, int]], chunked: bool, through: bool) -> bytes:
    """The bytes of a stream whose client takes them or lags, with its tokens through the outlet or in Deltas alone."""
    wire = Wire()
    stream = EventStream(Done(lambda endings: b""), keep_alive=0)
    source = stream.add_source(PlainChunks({"id": "x"}, range(1), detailed=False, report=Report()))
    assert source.outlet is not None
    sequence = Progress()
    sequence.outlet = source.outlet
    stream._connection = _Connection(SimpleNamespace(protocol=wire, transport=wire, chunked=chunked))  # type: ignore[arg-type]
    source(Delta("x", (ChoiceDelta(0, "begin", (1,)),), first=True))
    stream._flush()
    texts = TokenTexts(lambda token: json.dumps(ALPHABET[token], ensure_ascii=False).encode() if token < 8 else b"")
    for takes, token in steps:
        wire.writing_paused = not takes
        if takes:
            stream._flush()  # as the handler's task does when the client has caught up
        assert source.outlet.is_open == (not source.holds)
        if not through or pass_on(texts, [sequence], [token]):
            source(Delta("x", (ChoiceDelta(0, ALPHABET[token % 8], (token,)),)))
    if through:
        assert source.outlet.num_written == sum(takes and token < 8 for takes, token in steps)
    source(Delta("x", (ChoiceDelta(0, "end", (2,), finish_reason="stop"),), usage=Usage(1, 1, 0)))
    wire.writing_paused = False
    stream._flush()
    assert not source.outlet.is_open
    return wire.data


def test_an_outlet_writes_nothing_to_a_connection_that_closes_or_fails() -> None:
    class Broken(Wire):
        closing = False

        def is_closing(self) -> bool:
            return self.closing

        def write(self, data: bytes) -> None:
            raise RuntimeError("the transport is gone")

    wire, outlet, texts = Broken(), Outlet(b"<", b">"), TokenTexts(lambda token: b"x")
    sequence = Progress()
    assert pass_on(texts, [sequence], [1]) == [0]  # it has none
    sequence.outlet = outlet
    assert pass_on(texts, [sequence], [1]) == [0]  # closed
    outlet.open(wire, wire, True)
    assert pass_on(texts, [sequence, sequence], [1, 1]) == [0, 1]
    wire.closing = True
    assert pass_on(texts, [sequence], [1]) == [0]
    assert outlet.num_written == 0
