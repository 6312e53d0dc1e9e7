"""One line of a batch: its body takes the way of any request, and its answer is a line again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from bequest.engine.errors import EngineError
from bequest.server.access.keys import Caller
from bequest.server.asks.call import Call, seek, served_model
from bequest.server.batches.lines import Line
from bequest.server.context import Context
from bequest.server.generation.chat import whole_chat
from bequest.server.generation.completions import whole_completion
from bequest.server.responses.responses import whole_response
from bequest.server.states.embeddings import whole_embeddings
from bequest.server.transport.intake import typed_body
from bequest.server.transport.work import INLINE_BYTES, worked_for
from bequest.server.wire.bodies import ChatBody, CompletionBody, EmbeddingsBody, ResponseBody, SampledBody
from bequest.server.wire.errors import ApiError, from_engine, internal, unsupported
from bequest.server.wire.names import new_id
from bequest.server.wire.replicas import redirected

_log = logging.getLogger("bequest.server")

# Behind everybody who waits for an answer. Lower is earlier, and who says nothing has 0.
PRIORITY = 1_000_000
# Not the line's fault: it is tried again.
_LATER = ("queue_full", "server_busy", "loading", "draining", "sleeping", "engine_dead")


@dataclass(frozen=True, slots=True)
class Endpoint:
    body: type[Any]
    prefix: str  # of its answers' ids
    whole: Callable[[Call[Any]], Awaitable[bytes]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatBody, "chatcmpl-", whole_chat),
    "/v1/completions": Endpoint(CompletionBody, "cmpl-", whole_completion),
    "/v1/embeddings": Endpoint(EmbeddingsBody, "hs-", whole_embeddings),
    "/v1/responses": Endpoint(ResponseBody, "resp_", whole_response),
}


class NotNow(Exception):
    """The server cannot take the line at the moment."""


@dataclass(frozen=True, slots=True)
class Outcome:
    line: bytes  # of the output, without its end
    failed: bool


async def outcome_of(context: Context, caller: Caller, endpoint: Endpoint, line: Line) -> Outcome:
    """Raises NotNow. Any other fault is the line's answer."""
    answer_id = new_id(endpoint.prefix, context.config.replica_tag)
    with worked_for(caller.tenant, len(line.body) > INLINE_BYTES):
        try:
            call, ignored = await _call(context, caller, endpoint, line, answer_id)
            return _answered(line, 200, answer_id, await endpoint.whole(call), ignored)
        except ApiError as error:
            return _refused(line, answer_id, redirected(error, context.config.replica_tag, owner_gone=False))
        except EngineError as error:
            refusal = redirected(from_engine(error), context.config.replica_tag, owner_gone=False)
            return _refused(line, answer_id, refusal)
        except Exception:
            _log.exception("the line '%s' of a batch failed (%s)", line.custom_id, answer_id)
            return _refused(line, answer_id, internal(answer_id))


async def _call(
    context: Context, caller: Caller, endpoint: Endpoint, line: Line, answer_id: str
) -> tuple[Call[Any], list[str]]:
    """As server/asks/call.py makes it of a request, and the names of the fields that nobody reads."""
    body, ignored = await typed_body(context, caller, bytes(line.body), endpoint.body)
    if isinstance(body, SampledBody):
        if body.stream:
            raise unsupported("stream", "`stream` cannot be used in a batch: answers come whole. Leave it out.")
        body = _without_record(body)
    limits = replace(caller.limits, lowest_priority=max(PRIORITY, caller.limits.lowest_priority))
    await seek(context, caller.tenant, body)
    served = served_model(context, caller, body)
    return Call(context, body, answer_id, served, replace(caller, limits=limits), time.monotonic()), ignored


def _without_record(body: SampledBody) -> SampledBody:
    """Thousands of lines would push out the records that live requests leave. Who wants one says so."""
    if body.store is not None or body.retain or body.request_id is not None:
        return body
    return msgspec.structs.replace(body, store=False)


def _refused(line: Line, answer_id: str, error: ApiError) -> Outcome:
    if error.code in _LATER:
        raise NotNow(error.message) from error
    return _answered(line, error.status, answer_id, error.body(), [])


def _answered(line: Line, status: int, answer_id: str, body: bytes, ignored: list[str]) -> Outcome:
    """`ignored` stands in a header of other answers."""
    response = {"status_code": status, "request_id": answer_id, "body": orjson.Fragment(body)}
    if ignored:
        response["ignored"] = ignored
    return Outcome(_line(line.custom_id, response, None), failed=status != 200)


def not_run(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not executed."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    return orjson.dumps({"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error})
