"""What a response asks for."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from bequest.engine.types import OutputMode
from bequest.server.asks.ask import Ask, ask_of, check_stream_options
from bequest.server.asks.call import Call, HttpCall
from bequest.server.asks.lengths import Length, length_of
from bequest.server.asks.reading import Reading
from bequest.server.asks.sampling import Sampling, chosen_by, sampling_chars
from bequest.server.asks.speculation import speculation_of
from bequest.server.asks.terms import record_terms
from bequest.server.responses import document
from bequest.server.responses.body import logprobs_of, response_constraint
from bequest.server.responses.events import failed_at_once
from bequest.server.responses.prompt import ResponsePrompt, response_prompt
from bequest.server.transport.opening import in_time
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire.bodies import ResponseBody


@dataclass(frozen=True, slots=True)
class ResponseAsk:
    ask: Ask
    prompt: ResponsePrompt  # of the ask, with what has to be stored of it
    head: dict[str, Any]  # the object as it stands before anything is known of the answer


class Waiting(Protocol):
    """Awaits the prompt, whose parent may still run; `head` is the object as it stands meanwhile."""

    async def __call__(self, head: dict[str, Any], finding: Awaitable[ResponsePrompt]) -> ResponsePrompt: ...


async def at_rest(head: dict[str, Any], finding: Awaitable[ResponsePrompt]) -> ResponsePrompt:
    return await finding


def kept_open(call: HttpCall[ResponseBody]) -> Waiting:
    """A stream whose parent still runs gets comments meanwhile."""
    if not call.body.stream or not call.body.previous_response_id:
        return at_rest

    async def waiting(head: dict[str, Any], finding: Awaitable[ResponsePrompt]) -> ResponsePrompt:
        interval = call.context.config.sse_keep_alive_interval
        return await in_time(call.http, interval, call.headers, partial(failed_at_once, head), finding)

    return waiting


async def response_ask(call: Call[ResponseBody], reading: Reading, waiting: Waiting) -> ResponseAsk:
    """`reading` is how the answer is read."""
    context, body = call.context, call.body
    check_stream_options(body)
    logprobs = logprobs_of(body)
    chosen, form = await off_loop(
        context,
        sampling_chars(body),
        lambda: (
            chosen_by(context, body, logprobs=logprobs, shows_special=reading.shows_special),
            response_constraint(body),
        ),
    )
    length = response_length(body)
    terms = record_terms(call, length.open_ended)
    head = document.in_progress(body, call.id, int(time.time()), call.model, chosen, reading.tools)
    context.engine.check_room(terms.tenant)
    prompt = await waiting(head, response_prompt(context, terms, body, reading))
    # The grammar comes behind the prompt, which says whether thoughts come first.
    constraint = await apart(context, lambda: reading.constraint(form, prompt.prompt))
    held = await context.grammars.held(call.tenant, constraint)
    speculation = speculation_of(body, context.engine.info)
    sampling = Sampling(chosen=chosen, length=length, held=held, speculation=speculation)
    output = OutputMode.DELTA if body.stream or body.background else OutputMode.FINAL
    ask = await apart(context, lambda: ask_of(context, call.id, [prompt.prompt], sampling, terms, output=output))
    return ResponseAsk(ask, prompt, head)


def response_length(body: ResponseBody) -> Length:
    return length_of(body.max_output_tokens, "max_output_tokens", body.min_tokens, None)
