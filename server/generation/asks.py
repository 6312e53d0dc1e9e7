"""What completions and chats ask for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from bequest.engine.types import OutputMode
from bequest.server.asks.ask import Ask, ask_of, check_stream_options
from bequest.server.asks.call import Call, HttpCall
from bequest.server.asks.chats import ChatSource
from bequest.server.asks.constraints import check_alone, constraint_of
from bequest.server.asks.continued import chat_prompt, text_prompts
from bequest.server.asks.inheriting import chat_inheriting, text_inheriting
from bequest.server.asks.lengths import Length, generation_length
from bequest.server.asks.prompt import Prompt, Truncation
from bequest.server.asks.prompts import TextSource
from bequest.server.asks.reading import Reading
from bequest.server.asks.sampling import (
    Chosen,
    Sampling,
    check_logprobs,
    chosen_by,
    default_tokens,
    sampling_chars,
)
from bequest.server.asks.speculation import predicted, speculation_of
from bequest.server.asks.terms import AskTerms, record_terms
from bequest.server.asks.wish import StatesWish, completion_states
from bequest.server.stores.catalogues import StoredCatalogue
from bequest.server.stores.grammars import Constraint, Held
from bequest.server.transport.opening import in_time
from bequest.server.transport.sse import Done
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire.bodies import ChatBody, CompletionBody, GenerationBody, SampledBody
from bequest.server.wire.errors import invalid

COMPLETION_DEFAULT_TOKENS = 16
_Result = TypeVar("_Result")


class Waiting(Protocol):
    """Awaits what may take as long as a parent runs."""

    async def __call__(self, finding: Awaitable[_Result]) -> _Result: ...


async def at_rest(finding: Awaitable[_Result]) -> _Result:
    return await finding


def kept_open(call: HttpCall[GenerationBody]) -> Waiting:
    """A stream whose parent still runs gets comments meanwhile."""
    if not call.body.stream or not call.body.continuation_of:
        return at_rest

    async def waiting(finding: Awaitable[_Result]) -> _Result:
        interval = call.context.config.sse_keep_alive_interval
        return await in_time(call.http, interval, call.headers, Done.failed, finding)

    return waiting


async def completion_ask(call: Call[CompletionBody], waiting: Waiting = at_rest) -> Ask:
    """`waiting` is how a parent that still runs is waited for."""
    body = call.body
    check_stream_options(body)
    catalogue = _catalogue(call)
    logprobs = check_logprobs(body.logprobs, "logprobs")
    in_prompt = _prompt_logprobs(body, logprobs if body.echo else None)
    chosen, constraint = await off_loop(
        call.context,
        sampling_chars(body),
        lambda: (
            chosen_by(call.context, body, logprobs=logprobs, prompt_logprobs=in_prompt, catalogue=catalogue),
            constraint_of(body),
        ),
    )
    held = await _held(call, constraint)
    length = generation_length(body, default_tokens(catalogue, COMPLETION_DEFAULT_TOKENS))
    sampling = _sampling(call, chosen, length, held, copies=chosen["n"])
    terms, wish = await _admitted(call, length)
    prompts = await waiting(_text_prompts(call, terms, length))
    context, output = call.context, _output(body)
    return await apart(context, lambda: ask_of(context, call.id, prompts, sampling, terms, wish, output))


async def chat_ask(call: Call[ChatBody], reading: Reading, waiting: Waiting = at_rest) -> Ask:
    """`reading` is how its answers are read."""
    body = call.body
    check_stream_options(body)
    catalogue = _catalogue(call)
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    logprobs = check_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    in_prompt = _prompt_logprobs(body, None)

    def work() -> tuple[Chosen, Constraint | None]:
        chosen = chosen_by(
            call.context,
            body,
            logprobs=logprobs,
            prompt_logprobs=in_prompt,
            catalogue=catalogue,
            shows_special=reading.shows_special,
        )
        return chosen, constraint_of(body)

    chosen, form = await off_loop(call.context, sampling_chars(body), work)
    length = generation_length(body, default_tokens(catalogue, None))
    terms, wish = await _admitted(call, length)
    prompt = await waiting(_chat_prompt(call, reading, terms, length))
    # The grammar comes behind the prompt, which says whether thoughts come first.
    held = await _held(call, await apart(call.context, lambda: reading.constraint(form, prompt)))
    sampling = _sampling(call, chosen, length, held, prediction=await predicted(call.context, body))
    context, output = call.context, _output(body)
    return await apart(context, lambda: ask_of(context, call.id, [prompt], sampling, terms, wish, output))


def _catalogue(call: Call[GenerationBody]) -> StoredCatalogue | None:
    return call.context.catalogues.named(call.tenant, call.body.catalogue)


async def _held(call: Call[GenerationBody], constraint: Constraint | None) -> Held:
    if constraint is not None:
        check_alone(call.body, constraint.param)
    return await call.context.grammars.held(call.tenant, constraint)


def _prompt_logprobs(body: GenerationBody, echoed: int | None) -> int | None:
    """`echo` with `logprobs` shows the prompt's log-probabilities too."""
    asked = check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    return max((count for count in (asked, echoed) if count is not None), default=None)


def _sampling(
    call: Call[GenerationBody],
    chosen: Chosen,
    length: Length,
    held: Held,
    *,
    copies: int = 1,
    prediction: tuple[int, ...] = (),
) -> Sampling:
    field = "logprobs" if call.body.prompt_logprobs is None else "prompt_logprobs"
    return Sampling(
        chosen=chosen,
        length=length,
        held=held,
        speculation=speculation_of(call.body, call.context.engine.info, prediction),
        prompt_copies=copies,
        prompt_field=field,
    )


async def _admitted(call: Call[GenerationBody], length: Length) -> tuple[AskTerms, StatesWish | None]:
    """Raises QueueFull before anything is tokenised in vain."""
    terms = record_terms(call, length.open_ended)
    given, info = call.body.return_hidden_states, call.context.engine.info
    wish = None if given is None else await apart(call.context, lambda: completion_states(given, info))
    if wish is None:
        call.context.engine.check_room(terms.tenant)
    return terms, wish


async def _text_prompts(call: Call[CompletionBody], terms: AskTerms, length: Length) -> list[Prompt]:
    body = call.body
    source = TextSource(
        given=body.prompt,
        special=body.add_special_tokens,
        truncation=_truncation(body, length),
        after=body.suffix or "",
        echo=body.echo,
        embeds=body.prompt_embeds,
    )
    wanted = text_inheriting(body, source)
    return await text_prompts(call.context, terms, source, wanted, body.continuation_fallback)


async def _chat_prompt(call: Call[ChatBody], reading: Reading, terms: AskTerms, length: Length) -> Prompt:
    body = call.body
    source = ChatSource(
        given=body.messages,
        template=body.chat_template,
        template_kwargs=reading.template_kwargs(body.reasoning_effort, body.chat_template_kwargs),
        opens=body.add_generation_prompt,
        continues=body.continue_final_message,
        tools=None if body.tools is None else reading.tools,
        special=bool(body.add_special_tokens),
        truncation=_truncation(body, length),
        reads_answer=reading.message if reading.shows_thoughts else None,
        image_kwargs=body.mm_processor_kwargs,
    )
    return await chat_prompt(call.context, terms, source, chat_inheriting(body), body.continuation_fallback)


def _truncation(body: GenerationBody, length: Length) -> Truncation:
    completion = 1 if length.asked is None else length.asked
    return Truncation(body.truncate_prompt_tokens, completion, body.truncation_side)


def _output(body: SampledBody) -> OutputMode:
    return OutputMode.DELTA if body.stream else OutputMode.FINAL
