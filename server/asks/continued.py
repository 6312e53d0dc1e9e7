"""The prompt of a request, whole or behind a parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from bequest.engine.types import Lineage
from bequest.engine.types.image import Image
from bequest.server.asks.chats import (
    ChatSource,
    TemplateUse,
    off_loop_rendering,
    read_messages,
    rendered_chat,
    template_use,
)
from bequest.server.asks.embeds import given_prompts
from bequest.server.asks.extension import Conversation, answer_text
from bequest.server.asks.images import extend_seen, images_in, merged, unfolded
from bequest.server.asks.inheriting import Cut, Inheriting, cut
from bequest.server.asks.prompt import Prompt, check_not_empty
from bequest.server.asks.prompts import TextSource, check_length, encode_behind, plain_prompts
from bequest.server.asks.ranges import check_ids
from bequest.server.asks.terms import AskTerms
from bequest.server.context import Context
from bequest.server.transport.work import apart
from bequest.server.wire.errors import ApiError, invalid


async def text_prompts(
    context: Context, terms: AskTerms, source: TextSource, wanted: Inheriting | None, fallback: str | list[int] | None
) -> list[Prompt]:
    """The prompts of a request, or the single one of a continuation. `fallback` is for a parent that is gone."""
    if wanted is None:
        return await plain_prompts(context, source)
    begin = await cut(context, terms, wanted)
    if begin is not None and source.embeds is not None:
        [rows] = await given_prompts(context, source.embeds)
        return [begin.prompt(begin.at, rows.token_ids, None, merged(begin.parent.images, [rows]))]
    if begin is not None:
        ids = await suffix_ids(context, wanted.suffix, wanted.suffix_field, begin.last)
        return [begin.prompt(begin.at, ids, None, param=wanted.suffix_field)]
    whole = structs.replace(source, given=fallback, field="continuation_fallback", embeds=None)
    [prompt] = await plain_prompts(context, whole)
    return [_fallen_back(prompt, wanted)]


async def chat_prompt(
    context: Context,
    terms: AskTerms,
    source: ChatSource,
    wanted: Inheriting | None,
    fallback: list[dict[str, Any]] | None,
) -> Prompt:
    """The prompt of a conversation, or of its continuation."""
    if wanted is None:
        return await plain_chat(context, source)
    begin = await cut(context, terms, wanted)
    if begin is not None:
        return await _continued_chat(context, source, wanted, begin)
    whole = replace(source, given=fallback, field="continuation_fallback")
    return _fallen_back(await plain_chat(context, whole), wanted)


async def plain_chat(context: Context, source: ChatSource) -> Prompt:
    """The prompt of a whole conversation."""
    rendered = await rendered_chat(context, source)
    kept = source.truncation.of_prompt(rendered.token_ids, context.engine.info.max_model_len)
    return check_not_empty(Prompt(kept, origin=rendered.conversation, images=rendered.images), source.field)


async def _continued_chat(context: Context, source: ChatSource, wanted: Inheriting, begin: Cut) -> Prompt:
    if source.given:
        return await _next_turn(context, source, begin)
    if source.opens:
        raise invalid(
            "`add_generation_prompt` needs new `messages`: without any, the parent's answer itself goes on.",
            "add_generation_prompt",
        )
    ids = await suffix_ids(context, wanted.suffix, wanted.suffix_field, begin.last)
    origin = begin.parent.origin
    if not isinstance(origin, Conversation) or begin.at < begin.answer_at:
        return begin.prompt(begin.at, ids, None, param=wanted.suffix_field)
    return begin.prompt(begin.at, ids, replace(origin, answer_at=begin.answer_at), param=wanted.suffix_field)


async def _next_turn(context: Context, source: ChatSource, begin: Cut) -> Prompt:
    """The parent's conversation with its answer and the new messages, beginning with the parent's tokens.

    The text after the answer (its end of turn, the new messages) is what the template makes of the whole.
    """
    before = _conversation_of(begin)
    new, images = await read_messages(context, source)
    _check_not_repeated(before, new)
    if begin.at < begin.answer_at:
        raise invalid(
            f"`continuation_at` is {begin.at}, inside the parent's prompt ({begin.answer_at} tokens), where no message "
            "ends: new `messages` can follow its answer, or a part of it.",
            "continuation_at",
        )
    answer = _answer(context, begin)
    known = merged(begin.parent.images, images)
    messages = [*_history(source, before, begin, answer), *new]
    use = template_use(context, source, new[-1]["role"], before)

    def work() -> Prompt:
        if source.reads_answer is not None and answer is not None:
            kept = _behind_all(context, begin, use, before, answer, messages, len(new), known)
            if kept is not None:
                return kept
        whole = use.render(messages)
        check_length(context, whole.prompt_text, "messages")
        choice = replace(begin.choice, num_prompt=begin.answer_at)
        extension = extend_seen(context, choice, begin.at, before.prompt_text, whole, known)
        return begin.prompt(extension.at, extension.suffix_ids, whole, known)

    return check_not_empty(await off_loop_rendering(context, use, messages, work), "messages")


def _conversation_of(begin: Cut) -> Conversation:
    origin = begin.parent.origin
    if isinstance(origin, Conversation):
        return origin
    raise ApiError(
        400,
        "continuation_mismatch",
        f"`messages` cannot follow '{begin.reference}', which was not made of messages: continue it in "
        "/v1/completions, or send `messages: []` with a `continuation_suffix`.",
        param="continuation_of",
    )


def _answer(context: Context, begin: Cut) -> str | None:
    """As much of the parent's answer as is kept. A parent that sampled nothing, or a branch before its first token, has
    none; one that ended at once has an empty one."""
    ids = begin.choice.token_ids
    if begin.at == begin.answer_at and (begin.branch or len(ids) == begin.answer_at):
        return None
    return answer_text(context.text.tokenizer, ids[begin.answer_at : begin.at], context.engine.info.eos_token_ids)


def _history(source: ChatSource, before: Conversation, begin: Cut, answer: str | None) -> Sequence[Mapping[str, Any]]:
    """The parent's messages with its answer."""
    if answer is None:
        return before.messages
    if source.reads_answer is None or before.continued:
        return before.answered(answer)
    prompt = Prompt(begin.choice.token_ids[: begin.answer_at], origin=replace(before, answer_at=None))
    return (*before.messages, source.reads_answer(answer, prompt))


def _behind_all(
    context: Context,
    begin: Cut,
    use: TemplateUse,
    before: Conversation,
    answer: str,
    messages: Sequence[Mapping[str, Any]],
    num_new: int,
    known: tuple[Image, ...],
) -> Prompt | None:
    """The next turn behind all of the parent's tokens, its thoughts too, which many templates would leave out.

    None: the template does not say what follows an answer.
    """
    new = messages[len(messages) - num_new :]
    tail = use.after_answer(before, new)
    if tail is None:
        return None
    text = before.prompt_text + answer + tail
    check_length(context, text, "messages")
    encoded = context.text.tokenizer.encode_behind(tail, begin.last)
    ids = unfolded(context, encoded, images_in(new, known), "messages")
    whole = Conversation(tuple(messages), text, use.source, use.kwargs, use.tools, use.continued)
    return begin.prompt(begin.at, ids, whole, known)


def _check_not_repeated(before: Conversation, new: list[dict[str, Any]]) -> None:
    """The new messages must not begin with the old ones: those up to the first answer, to be exact, since a client
    may remember an answer otherwise. A first question that is asked again, alone, later on, is a new one."""
    old = before.messages
    first = next((index for index in range(1, len(old)) if old[index]["role"] == "assistant"), len(old))
    if tuple(new[:first]) == old[:first] and (len(new) > first or first == len(old)):
        raise ApiError(
            400,
            "continuation_repeats_parent",
            "`messages` begins with the messages of the parent, which are inherited: send the new ones alone, or leave "
            "`continuation_of` out.",
            param="messages",
        )


def _fallen_back(prompt: Prompt, wanted: Inheriting) -> Prompt:
    """The client asked for a parent, and hears of it by the name it used."""
    return structs.replace(prompt, lineage=Lineage(wanted.reference, 0, at=0))


async def suffix_ids(context: Context, given: str | list[int], param: str, last: int | None = None) -> Sequence[int]:
    """Text is tokenised alone, without BOS or EOS, as what goes on behind the token `last`."""
    if not isinstance(given, str):
        return await apart(context, lambda: check_ids(given, context.engine.info.vocab_size, param))
    check_length(context, given, param)
    [ids] = await encode_behind(context, [given], last)
    return ids
