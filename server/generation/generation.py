"""What completions and chat share: from typed body to engine requests, and from deltas to a whole answer.

The handlers' order is always the same: read the body, check, tokenise, submit, then either collect or stream; leaving
the `with` block of a Job aborts whatever has not finished, whichever way it was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import orjson
from aiohttp import web

from bequest.engine.errors import EngineError
from bequest.engine.types import (
    ChoiceDelta,
    Delta,
    Lineage,
    OutputMode,
    Request,
    Retain,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from bequest.engine.types.encoder import EncoderInput
from bequest.server.context import ARRIVED, CALLER, CONTEXT, TENANT, Context
from bequest.server.continuation import leases
from bequest.server.continuation.report import Report
from bequest.server.errors import from_engine, invalid
from bequest.server.generation import sampling
from bequest.server.generation.chunks import usage_event
from bequest.server.generation.encoder_prompts import with_rules
from bequest.server.generation.opening import in_time
from bequest.server.generation.sse import Done, EventStream, Source
from bequest.server.interfaces import EngineLike
from bequest.server.names import check_name, part_id
from bequest.server.states.extraction import release
from bequest.server.states.generated import GeneratedStates
from bequest.server.states.wish import StatesWish, check_states
from bequest.server.wire import GenerationBody

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, and where it comes from."""

    token_ids: tuple[int, ...]
    text: str = ""  # what `echo` gives back
    lineage: Lineage | None = None  # of a continuation, even if nothing of its parent is in it
    cache_salt: str = ""  # the parent's
    origin: object = None  # what the tokens were made from, for whoever continues
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose decoder's prompt is `token_ids`
    param: str | None = None  # the field that `token_ids` came in, where it is not `prompt`


class _EndedSink(Protocol):
    @property
    def finished(self) -> bool: ...

    def __call__(self, delta: Delta) -> None: ...


class Job:
    """The engine requests of one HTTP request: submitted together, and aborted where unfinished on leaving."""

    def __init__(self, engine: EngineLike, requests: Sequence[Request], sinks: Sequence[_EndedSink]) -> None:
        self._engine = engine
        self._pairs = list(zip(requests, sinks, strict=True))
        self._submitted: list[tuple[Request, _EndedSink]] = []

    def __enter__(self) -> Self:
        try:
            for request, sink in self._pairs:
                self._engine.submit(request, sink)
                self._submitted.append((request, sink))
        except EngineError as error:
            self._abort()
            raise from_engine(error) from error
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    def _abort(self) -> None:
        for request, sink in self._submitted:
            if not sink.finished:
                self._engine.abort(request.id)


class Collector:
    """The sink of a request whose answer is sent whole."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self._done = done
        self.choices: dict[int, ChoiceDelta] = {}
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self.usage: Usage | None = None
        self.delivery = Delta("")  # the last one; with OutputMode.FINAL the only one
        self.finished = False

    def __call__(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        for choice in delta.choices:
            self.choices[choice.index] = choice
        self.delivery, self.usage, self.finished = delta, delta.usage, delta.finished
        if self._done.done():
            return
        if delta.error is not None:
            self._done.set_exception(from_engine(delta.error))
        elif self.finished:
            self._done.set_result(None)


async def collect(engine: EngineLike, requests: Sequence[Request]) -> list[Collector]:
    """Runs the requests to their end; the first error ends them all. Cancelled when the client goes away."""
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
    collectors = [Collector(end) for end in ends]
    whole = [replace(request, output=OutputMode.FINAL) for request in requests]
    with Job(engine, whole, collectors):
        try:
            await (ends[0] if len(ends) == 1 else asyncio.gather(*ends))
        except BaseException:
            release(*(collector.delivery for collector in collectors))
            raise
    return collectors


def open_stream(
    context: Context, body: GenerationBody, head: dict[str, Any], report: Report, states: GeneratedStates | None
) -> tuple[EventStream, dict[str, Any], Report]:
    """A stream, the head of its chunks, and what they report.

    Where a last chunk tells the usage, it tells of the lease too, and the others say that the usage is null. Without
    it the chunk of hidden states is the last.
    """
    keep_alive = context.config.sse_keep_alive_interval
    unleased = replace(report, leased=False)
    if body.stream_options is None or not body.stream_options.include_usage:
        no_usage = Done(lambda endings: b"")
        if states is None:
            return EventStream(no_usage, keep_alive), head, report
        return EventStream(no_usage, keep_alive, partial(states.chunk, head, report)), head, unleased

    def last_event(endings: Sequence[Delta]) -> bytes:
        usages = [ending.usage for ending in endings if ending.usage is not None]
        return usage_event(head, usage_object(usages), report.retained(endings[-1]))

    chunk_head = {**head, "usage": None}
    chunk = None if states is None else partial(states.chunk, chunk_head, unleased)
    return EventStream(Done(last_event), keep_alive, chunk), chunk_head, unleased


async def in_stream(http: web.Request, headers: dict[str, str], work: Awaitable[_Result]) -> _Result:
    """Awaits the end of a parent, which a stream of chunks needs before it can be asked for."""
    return await in_time(http, http.app[CONTEXT].config.sse_keep_alive_interval, headers, Done.failed, work)


async def send_stream(
    engine: EngineLike,
    http: web.Request,
    requests: Sequence[Request],
    sources: Sequence[Source],
    stream: EventStream,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Runs the requests into the stream. What fails before the first event is raised; cancelled as `collect` is."""
    with Job(engine, requests, sources):
        try:
            await stream.wait_first()
            return await stream.run(http, headers)
        finally:
            stream.release()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a body says of its engine requests, apart from prompt and sampling."""

    tenant: str
    name: str | None
    priority: int
    deadline: float | None  # on the engine's clock
    cache_salt: str
    retain: Retain | None
    keep_record: bool
    default_tokens: int | None  # the endpoint's max_tokens; None: all the room there is
    max_prompt_tokens: int | None  # of the key


def terms_of(context: Context, http: web.Request, body: GenerationBody, default_tokens: int | None) -> Terms:
    """`timeout` counts from the request's arrival, whatever it has to wait for first."""
    limits = http[CALLER].limits
    timeout = sampling.timeout_seconds(body.timeout, limits.max_timeout)
    return Terms(
        tenant=http[TENANT],
        name=None if body.request_id is None else check_name(body.request_id),
        priority=sampling.priority(body.priority, limits.lowest_priority),
        deadline=None if timeout is None else http[ARRIVED] + timeout,
        cache_salt=body.cache_salt or "",
        retain=leases.retain(body, context.leases, default_tokens),
        keep_record=body.store is not False,
        default_tokens=default_tokens,
        max_prompt_tokens=limits.max_prompt_tokens,
    )


def engine_requests(
    context: Context,
    body: GenerationBody,
    answer_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    terms: Terms,
    wish: StatesWish | None = None,
) -> list[Request]:
    """One engine request per prompt, named after the answer. The client's own name belongs to the first."""
    if terms.retain is not None and len(prompts) > 1:
        raise invalid("`retain` needs a single prompt: send each prompt in a request of its own.", "retain")
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            sampling.check_prompt_len(len(prompt.token_ids), terms.max_prompt_tokens)
            fitted = sampling.with_room(params, body, len(prompt.token_ids), context.engine.info, terms.default_tokens)
        except EngineError as error:
            raise from_engine(error, prompt.param) from error
        if terms.retain is not None and wish is not None and wish.params.stack == "encoder" and fitted.max_tokens == 0:
            raise invalid("`retain` is of the decoder, which does not run for the encoder's states alone.", "retain")
        continues = prompt.lineage is not None and prompt.lineage.at > 0
        fitted = with_rules(fitted, context.engine.info.encoder, len(prompt.token_ids), continues)
        requests.append(
            Request(
                id=part_id(answer_id, index),
                tenant=terms.tenant,
                prompt_token_ids=prompt.token_ids,
                params=fitted,
                priority=terms.priority,
                deadline=terms.deadline,
                cache_salt=terms.cache_salt or prompt.cache_salt,
                name=terms.name if index == 0 else None,
                lineage=prompt.lineage,
                retain=terms.retain,
                keep_record=terms.keep_record,
                origin=prompt.origin,
                encoder=prompt.encoder,
                hidden_states=None if wish is None else wish.params,
            )
        )
    sampling.check_answer_size(body, requests)
    if wish is not None:
        check_states(wish, requests, context.engine.info, context.states_budget)
    return requests


def truncated(ids: Sequence[int], body: GenerationBody, max_model_len: int) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` of a prompt; -1 keeps what leaves room for the completion."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tuple(ids)
    if keep == -1:
        asked = sampling.max_tokens(body)
        keep = max(max_model_len - (1 if asked is None else asked), 1)
    if not 1 <= keep <= max_model_len:
        raise invalid(
            f"`truncate_prompt_tokens` must be from 1 to {max_model_len}, or -1 for what fits, not {keep}.",
            "truncate_prompt_tokens",
        )
    return tuple(ids[-keep:])


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` needs `stream: true`.", "stream_options")


def check_not_empty(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise invalid(f"`{param}` is empty: there is no token to begin from.", param)
    return prompt


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def json_response(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json", headers=headers)
