"""Hidden states beside a generated answer: on each choice of a whole one, in a chunk of its own in a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from aiohttp import web

from bequest.engine.types import Delta, Request
from bequest.engine.types.states import ChoiceStates
from bequest.server.answers.encoding import JsonBody, states_object
from bequest.server.answers.extraction import is_small
from bequest.server.answers.report import Report
from bequest.server.asks.ask import Ask
from bequest.server.asks.wish import JsonEncoding
from bequest.server.context import Context
from bequest.server.transport.pieces import Piece, release
from bequest.server.transport.sending import joined, made_off_loop, send_body


@dataclass(frozen=True, slots=True)
class GeneratedStates:
    """What the requests of one answer want, and how the answer shows it."""

    context: Context
    encoding: JsonEncoding
    requests: Sequence[Request]  # in the order of the answer's choices

    async def send_whole(
        self, http: web.Request, answer: dict[str, Any], deliveries: Sequence[Delta], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Sends an answer, each of its choices with its states. `deliveries` are the requests' last ones."""
        with self._body(answer, deliveries) as (body, small):
            return await send_body(http, body, small, "application/json", headers, self.context.encoder)

    async def written(self, answer: dict[str, Any], deliveries: Sequence[Delta]) -> bytes:
        """The same answer as JSON, for whoever keeps it."""
        with self._body(answer, deliveries) as (body, small):
            return await joined(body, small, self.context.encoder)

    @contextmanager
    def _body(self, answer: dict[str, Any], deliveries: Sequence[Delta]) -> Iterator[tuple[JsonBody, bool]]:
        """The answer, and whether it is small. What it is made of is given back behind it."""
        try:
            found = self._found(deliveries)
            fillings: list[ChoiceStates] = []
            for choice in answer["choices"]:
                choice["hidden_states"] = _shown(found.get(choice["index"]), choice["index"], fillings)
            yield JsonBody({**answer, **_computed(deliveries)}, fillings, self.encoding), is_small(fillings)
        finally:
            release(*deliveries)

    def chunk(self, head: dict[str, Any], report: Report, endings: Sequence[Delta]) -> AsyncIterator[Piece]:
        """The event with the states of all choices, piece by piece. `endings` are the requests' last deliveries."""
        fillings: list[ChoiceStates] = []
        shown = [_shown(states, index, fillings) for index, states in sorted(self._found(endings).items())]
        value = {**head, "choices": [], "hidden_states": shown, **_computed(endings), **report.retained(endings[-1])}
        pieces = chain((b"data: ",), JsonBody(value, fillings, self.encoding).pieces(), (b"\n\n",))
        if is_small(fillings):
            return _at_once(pieces)
        return made_off_loop(pieces, self.context.encoder)

    def _found(self, deliveries: Sequence[Delta]) -> dict[int, ChoiceStates]:
        """The states by the index that their choice has in the answer."""
        n = self.requests[0].params.n
        firsts = {request.id: number * n for number, request in enumerate(self.requests)}
        found = {}
        for delivery in deliveries:
            if delivery.hidden_states is not None:
                self.context.metrics.on_states(delivery.hidden_states, "completion")
                found.update({firsts[delivery.request_id] + one.index: one for one in delivery.hidden_states.choices})
        return found


def generated_states(context: Context, ask: Ask) -> GeneratedStates | None:
    if ask.states is None:
        return None
    assert ask.states.encoding != "safetensors"
    return GeneratedStates(context, ask.states.encoding, ask.requests)


def _shown(states: ChoiceStates | None, index: int, fillings: list[ChoiceStates]) -> dict[str, Any] | None:
    """The object of a choice, whose gap is `fillings`' next. A completion that did not come to any of the positions has
    nothing that could be pooled."""
    if states is None or (states.pooling != "none" and not len(states.positions)):
        return None
    fillings.append(states)
    return states_object(states, index)


def _computed(deliveries: Sequence[Delta]) -> dict[str, int]:
    found = [delivery.hidden_states for delivery in deliveries if delivery.hidden_states is not None]
    return {"computed_tokens": sum(states.computed_tokens for states in found)}


async def _at_once(pieces: Iterator[Piece]) -> AsyncIterator[Piece]:
    yield b"".join(pieces)
