"""What a chat or a generation asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bequest.engine.types import OutputMode
from bequest.server.asks.ask import Ask, ask_of
from bequest.server.asks.call import HttpCall
from bequest.server.asks.chats import ChatSource, rendered_chat, template_use
from bequest.server.asks.constraints import json_schema
from bequest.server.asks.continued import chat_prompt, suffix_ids
from bequest.server.asks.extension import Conversation
from bequest.server.asks.prompt import Prompt, check_not_empty
from bequest.server.asks.prompts import TextSource, encode_behind, plain_prompts
from bequest.server.asks.reading import Reading
from bequest.server.asks.sampling import Sampling, check_logprobs, chosen_by
from bequest.server.asks.terms import AskTerms, passing_terms
from bequest.server.context import Context
from bequest.server.doors.ollama.body import (
    GeneratingBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_messages,
    check_generate,
    effort_of,
    with_images,
)
from bequest.server.doors.ollama.options import length_of, named_as_sent, sampled_by
from bequest.server.stores.grammars import Constraint
from bequest.server.transport.work import apart
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten


async def chat_ask(call: HttpCall[OllamaChatBody], reading: Reading) -> Ask:
    """`reading` is how the answer is read."""
    context, body = call.context, call.body
    messages = await apart(context, lambda: chat_messages(body, context.images is not None))
    terms = passing_terms(call, None)
    source = ChatSource(
        given=messages,
        template_kwargs=_template_kwargs(call, reading),
        continues=messages[-1].get("role") == "assistant",
        tools=None if body.tools is None else reading.tools,
    )
    return await _ask(call, reading, terms, lambda: chat_prompt(context, terms, source, None, None))


async def generate_ask(call: HttpCall[OllamaGenerateBody], reading: Reading) -> Ask:
    check_generate(call.body)
    return await _ask(call, reading, passing_terms(call, None), lambda: _generate_prompt(call, reading))


async def _ask(
    call: HttpCall[OllamaChatBody] | HttpCall[OllamaGenerateBody],
    reading: Reading,
    terms: AskTerms,
    find: Callable[[], Awaitable[Prompt]],
) -> Ask:
    context, body = call.context, call.body
    with named_as_sent():
        logprobs = _logprobs(body)
        chosen = chosen_by(context, sampled_by(body.options), logprobs=logprobs, shows_special=reading.shows_special)
        context.engine.check_room(terms.tenant)
        prompt = await find()
        length = length_of(body.options, len(prompt.token_ids))
        # The grammar comes behind the prompt, which says whether thoughts come first.
        constraint = await apart(context, lambda: reading.constraint(_form(body), prompt))
        held = await context.grammars.held(call.tenant, constraint)
        sampling = Sampling(chosen=chosen, length=length, held=held)
        output = OutputMode.DELTA if body.stream else OutputMode.FINAL
        return await apart(context, lambda: ask_of(context, call.id, [prompt], sampling, terms, output=output))


def _template_kwargs(
    call: HttpCall[OllamaChatBody] | HttpCall[OllamaGenerateBody], reading: Reading
) -> Mapping[str, Any] | None:
    effort = effort_of(call.body.think, reading.shows_thoughts, call.model)
    return reading.template_kwargs(effort, None, "think")


def _logprobs(body: GeneratingBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    return check_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None


def _form(body: GeneratingBody) -> Constraint | None:
    given = body.format
    if not given:
        return None
    if isinstance(given, dict):
        return json_schema(given, "format", "format", "format")
    if given != "json":
        raise invalid(f"`format` must be 'json' or a JSON schema, not {shorten(repr(given))}.", "format")
    return json_schema({"type": "object"}, "json", "format", "format")


# --- prompts of a generation -------------------------------------------------------------------------------------


async def _generate_prompt(call: HttpCall[OllamaGenerateBody], reading: Reading) -> Prompt:
    """Through the chat template as the question of a user, unless the client or the model wants it otherwise."""
    context, body = call.context, call.body
    content: str | list[dict[str, Any]] = body.prompt or ""
    if body.images:
        content = with_images(body.prompt, body.images, "images", context.images is not None)
    if body.raw or body.suffix:
        [prompt] = await plain_prompts(context, TextSource(given=body.prompt or "", after=body.suffix or ""))
        return prompt
    if context.text.chat_template is None or context.engine.info.encoder is not None:
        return await _untold_prompt(context, body)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    source = ChatSource(given=messages, field="prompt", template_kwargs=_template_kwargs(call, reading))
    if body.context:
        return await _continued(call, source, body.context)
    rendered = await rendered_chat(context, source)
    prompt = Prompt(rendered.token_ids, origin=rendered.conversation, images=rendered.images)
    return check_not_empty(prompt, "prompt")


async def _untold_prompt(context: Context, body: OllamaGenerateBody) -> Prompt:
    """Of a model that knows no questions and answers: the prompt as it is, behind what came before."""
    encoder = context.engine.info.encoder
    why = "this model has no chat template" if encoder is None else "an encoder reads the prompt as it is"
    for name in ("images", "system") if encoder is None else ("images", "system", "context"):
        if getattr(body, name):
            raise invalid(f"`{name}` cannot be used here: {why}. Leave it out.", name)
    if not body.context:
        [prompt] = await plain_prompts(context, TextSource(given=body.prompt or ""))
        return prompt
    before = await suffix_ids(context, body.context, "context")
    return Prompt((*before, *await suffix_ids(context, body.prompt or "", "prompt", before[-1])), param="prompt")


async def _continued(call: HttpCall[OllamaGenerateBody], source: ChatSource, before: list[int]) -> Prompt:
    """Behind the tokens of an earlier answer: the end of its turn and the new one, as the template writes them."""
    context, new = call.context, source.given or []
    ids = tuple(await suffix_ids(context, before, "context"))
    use = template_use(context, source, "user")
    asked = use.render([{"role": "user", "content": "?"}])
    tail = use.after_answer(Conversation(asked.messages, asked.prompt_text), new)
    if tail is None:
        tail = use.render(new).prompt_text
    [more] = await encode_behind(context, [tail], ids[-1] if ids else None)
    return Prompt((*ids, *more))
