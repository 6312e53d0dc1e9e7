"""A response on its way: run, answered, and stored."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from bequest.engine.types import Delta, Request
from bequest.server.answers.running import Collector, Job
from bequest.server.answers.streams import send_stream
from bequest.server.context import Context
from bequest.server.responses.answer import Answer
from bequest.server.responses.events import ResponseFormat
from bequest.server.responses.items import without_logprobs
from bequest.server.responses.prompt import ResponsePrompt
from bequest.server.stores.responses import RunningResponse, StoredResponse, Turn
from bequest.server.transport.sse import EventStream


@dataclass(frozen=True, slots=True)
class Making:
    """A response on its way: run, answered, and stored unless the client does not want that."""

    context: Context
    request: Request
    prompt: ResponsePrompt
    answer: Answer
    running: RunningResponse

    def registered(self) -> AbstractContextManager[None]:
        """While it runs it can be found, if it will be stored."""
        request = self.request
        if not request.terms.keep_record:
            return nullcontext()
        return self.context.running.begin(request.tenant, request.terms.name, self.running)

    async def whole(self) -> bytes:
        """The finished object as JSON."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.fail = lambda error: None if done.done() else done.set_exception(error)
        collector = Collector(done)
        with Job(self.context.engine, [self.request], [collector]):
            await done
        self.answer.begin(collector.delivery)
        self.answer.take(collector.choices[0])
        return self.finish(collector.delivery)[1]

    async def stream(self, http: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        events = ResponseFormat(self.answer, self.finish)
        stream = EventStream(events, self.context.config.sse_keep_alive_interval)
        self.running.fail = stream.fail
        source = stream.add_source(events)
        return await send_stream(self.context.engine, http, [self.request], [source], stream, headers)

    def finish(self, ending: Delta) -> tuple[dict[str, Any], bytes]:
        """The object, as such and as JSON. It is stored first: the client may come back at once."""
        response = self.answer.finish(ending)
        body = orjson.dumps(response)
        self.store(response, body)
        return response, body

    def store(self, response: dict[str, Any], body: bytes, failure: bytes = b"") -> None:
        """Unless the client does not want that, or somebody deleted it meanwhile."""
        if self.request.terms.keep_record and self.running.keep:
            self.context.stored.put(self._stored(response, body, failure))

    def _stored(self, response: dict[str, Any], body: bytes, failure: bytes) -> StoredResponse:
        request, prompt, parent = self.request, self.prompt, self.prompt.parent
        items = orjson.dumps([*prompt.items, *map(without_logprobs, response["output"])])
        return StoredResponse(
            id=request.id,
            name=request.terms.name,
            tenant=request.tenant,
            body=body,
            turn=Turn(
                request.id,
                None if parent is None else parent.turn,
                items,
                len(prompt.items),
                tuple(item["id"] for item in response["output"]),
            ),
            token_ids=array("i", (*request.prompt_token_ids, *self.answer.token_ids)),
            num_prompt=len(request.prompt_token_ids),
            prompt_text=prompt.text,
            cache_salt=request.cache_salt,
            adapter=None if request.adapter is None else request.adapter.name,
            pieces=self.answer.pieces,
            images=request.images,
            failure=failure,
        )
