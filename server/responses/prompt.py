"""The prompt of a response: instructions, the stored conversation and the new input, through the chat template.

With `previous_response_id` the new rendering is laid beside the parent's tokens: as far as they agree the child begins
with them, as sampled, and the engine may find their KV. Nothing depends on that: where the template rewrites history,
or the instructions are others, less is inherited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs

from bequest.engine.errors import EngineError, InvalidRequest, ParentLost
from bequest.engine.types import Lineage, ParentChoice
from bequest.engine.types.image import Image
from bequest.server.asks.chats import TemplateUse, check_converses, check_countable, template_kwargs
from bequest.server.asks.extension import Conversation
from bequest.server.asks.images import extend_seen, images_in, look_at, merged, spelling_of_images, unfolded
from bequest.server.asks.inheriting import other_model
from bequest.server.asks.messages import MESSAGE_CHARS, text_length
from bequest.server.asks.prompt import Prompt, check_not_empty
from bequest.server.asks.prompts import check_length
from bequest.server.asks.ranges import agreed
from bequest.server.asks.reading import Reading
from bequest.server.asks.terms import AskTerms
from bequest.server.context import Context
from bequest.server.responses.items import REFERENCE, Item, input_items, messages_of
from bequest.server.stores.responses import StoredResponse, Turn
from bequest.server.transport.work import INLINE_CHARS, has_large_body, off_loop
from bequest.server.wire.bodies import ResponseBody
from bequest.server.wire.errors import ApiError, at_field, invalid, missing
from bequest.server.wire.reading import shorten

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsePrompt:
    """A prompt, and what has to be stored of it."""

    prompt: Prompt
    text: str  # what its tokens were made of
    items: list[Item]  # of this request's input
    parent: StoredResponse | None


async def response_prompt(
    context: Context, terms: AskTerms, body: ResponseBody, reading: Reading, answered: bool = True
) -> ResponsePrompt:
    """Not `answered`: its tokens are counted alone, and there may be more than the model takes."""
    check_converses(context, "input")
    count = len(body.input) if isinstance(body.input, list) else 1
    given = await off_loop(context, MESSAGE_CHARS * count, lambda: input_items(body.input))
    items = await _resolved(context, terms.tenant, given)
    parent = None
    if body.previous_response_id is not None:
        parent = await _previous(context, terms.tenant, body.previous_response_id, terms.deadline)
        if parent.adapter != (None if terms.adapter is None else terms.adapter.name):
            raise other_model(terms, parent.adapter, body.previous_response_id)
    messages = await off_loop(context, _history_chars(parent) + MESSAGE_CHARS * count, lambda: _messages(parent, items))
    messages, images = await look_at(context, messages)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages and items:
        raise invalid("`input` holds reasoning alone: send what it led to, too, or what comes next.", "input")
    if not messages:
        raise missing("input", "`input` is missing: send a string, or a list of items.")
    images = merged(() if parent is None else parent.images, images)
    builder = _Builder(context, body, reading, parent, images, check_length if answered else check_countable)
    try:
        chars = 0 if has_large_body() else text_length(messages, INLINE_CHARS)
        built = await off_loop(context, chars, lambda: builder.build(messages))
    except InvalidRequest as error:
        raise at_field(error, "input") from error
    prompt = Prompt(built.token_ids, origin=built.conversation, images=images)
    if parent is not None:
        same_cache = body.cache_salt in (None, "", parent.cache_salt) and await _can_inherit(context, terms, parent)
        lineage = Lineage(parent.id, 0, built.at if same_cache else 0)
        prompt = structs.replace(prompt, lineage=lineage, cache_salt=parent.cache_salt)
    return ResponsePrompt(check_not_empty(prompt, "input"), built.conversation.prompt_text, items, parent)


async def _resolved(context: Context, tenant: str, items: list[Item]) -> list[Item]:
    """With items that stored responses said in place of references to them."""
    turns: dict[str, Turn] = {}  # by id, each once
    for number, item in enumerate(items):
        if item["type"] == REFERENCE:
            turn = _turn_of(context, tenant, item["id"], number)
            turns[turn.id] = turn
    if not turns:
        return items

    def work() -> list[Item]:
        said = {item_id: item for turn in turns.values() for item_id, item in turn.said_items().items()}
        return [said[item["id"]] if item["type"] == REFERENCE else item for item in items]

    return await off_loop(context, sum(len(turn.items) for turn in turns.values()), work)


def _turn_of(context: Context, tenant: str, item_id: str, number: int) -> Turn:
    turn = context.stored.turn_of(tenant, item_id)
    if turn is None:
        raise ApiError(
            404,
            "item_not_found",
            f"Item with id '{shorten(item_id, 100)}' not found: no response that is stored has it in its `output`. It "
            "was never stored (`store: false`), was deleted or has made room for others. Send the item itself.",
            param=f"input[{number}].id",
            absent=item_id,
        )
    return turn


async def _can_inherit(context: Context, terms: AskTerms, parent: StoredResponse) -> bool:
    """Not if the files of its lease are broken, or if its adapter was loaded again. Its items are here: they are
    computed again."""
    try:
        await context.engine.reach(terms.tenant, parent.id, 0)
        return context.engine.parent(terms.tenant, parent.id).adapter == terms.adapter
    except ParentLost:
        return False
    except EngineError:
        return True  # nothing is left to inherit


def _history_chars(parent: StoredResponse | None) -> int:
    """Near enough to tell a long conversation from a short one: its text is in the prompt."""
    return 0 if parent is None else len(parent.prompt_text)


def _messages(parent: StoredResponse | None, items: Sequence[Item]) -> list[Message]:
    history = parent.turn.all_items() if parent is not None else []
    return messages_of([*history, *items], len(history))


async def _previous(context: Context, tenant: str, reference: str, deadline: float | None) -> StoredResponse:
    """The response to continue from; one that still runs is waited for."""
    stored = context.stored.get(tenant, reference)
    running = context.running.get(tenant, reference)
    if stored is None and running is not None:
        try:
            async with asyncio.timeout(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                await running.ended.wait()
        except TimeoutError:
            message = f"The previous response '{reference}' was still running at this request's `timeout`."
            raise ApiError(504, "deadline_exceeded", message, param="timeout") from None
        stored = context.stored.get(tenant, reference)
    if stored is None:
        shown = reference if len(reference) <= 100 else reference[:99] + "…"
        raise ApiError(
            400,
            "previous_response_not_found",
            f"Previous response with id '{shown}' not found: it was never stored (`store: false`), failed, was deleted "
            "or has made room for others. Send the whole conversation as `input` instead.",
            param="previous_response_id",
            absent=reference,
        )
    return stored


def _effort(body: ResponseBody) -> tuple[str | None, dict[str, Any] | None, str]:
    """`reasoning.effort`, or `reasoning_effort` as in chat, and which of them."""
    given = (body.reasoning or {}).get("effort")
    if given is not None and not isinstance(given, str):
        raise ApiError(400, "invalid_type", "`reasoning.effort` must be a string.", param="reasoning.effort")
    param, effort = agreed("reasoning.effort", given, "reasoning_effort", body.reasoning_effort)
    return effort, body.chat_template_kwargs, param


class _Built(NamedTuple):
    conversation: Conversation
    token_ids: tuple[int, ...]
    at: int  # how many of them are the parent's


class _Builder:
    """Messages → tokens, in a worker thread where they are long."""

    def __init__(
        self,
        context: Context,
        body: ResponseBody,
        reading: Reading,
        parent: StoredResponse | None,
        images: tuple[Image, ...],
        check: Callable[[Context, str, str], None],
    ) -> None:
        """`check` refuses a text that takes too long to be tokenised; it gets the field, too."""
        template = context.text.chat_template
        if template is None:
            raise invalid("This model has no chat template, which `input` needs; use /v1/completions.", "input")
        kwargs = template_kwargs(reading.template_kwargs(*_effort(body)))
        tools = reading.tools.for_template()
        self._context = context
        spelling = spelling_of_images(context)
        self._template = TemplateUse(
            template, None, kwargs, opened=True, continued=False, tools=tools, spelling=spelling
        )
        self._parent = parent
        self._check = check
        self._images = images  # the parent's too
        self._truncate = body.truncation == "auto"
        self._room = context.engine.info.max_model_len - max(body.max_output_tokens or 0, 1)

    def build(self, messages: Sequence[Message]) -> _Built:
        if self._truncate:
            return self._longest(messages)
        return self._whole(messages)

    def _longest(self, messages: Sequence[Message]) -> _Built:
        """`truncation: "auto"`: without as many of the oldest messages as it takes, but always with the last.

        If even that is too long, or the template refuses whatever is left, the error is that of the whole.
        """
        best = self._fitting(messages)
        low, high = 1, sum(message["role"] not in _LASTING for message in messages) - 1
        if best is not None:
            return best
        while low <= high:
            middle = (low + high) // 2
            built = self._fitting(_without_oldest(messages, middle))
            if built is not None and built.conversation.messages[-1] is messages[-1]:
                best, high = built, middle - 1
            else:
                low = middle + 1
        return best if best is not None else self._whole(messages)

    def _fitting(self, messages: Sequence[Message]) -> _Built | None:
        try:
            conversation = self._template.render(messages)
            check_length(self._context, conversation.prompt_text, "input")
            built = self._built(conversation)
        except (ApiError, EngineError):
            return None
        return built if len(built.token_ids) <= self._room else None

    def _whole(self, messages: Sequence[Message]) -> _Built:
        conversation = self._template.render(messages)
        self._check(self._context, conversation.prompt_text, "input")
        return self._built(conversation)

    def _built(self, conversation: Conversation) -> _Built:
        context, parent, text = self._context, self._parent, conversation.prompt_text
        if parent is None or not parent.token_ids:
            encoded = context.text.tokenizer.encode(text, add_special_tokens=False)
            images = images_in(conversation.messages, self._images)
            return _Built(conversation, unfolded(context, encoded, images, "input"), 0)
        ids = tuple(parent.token_ids)
        choice = ParentChoice(ids, parent.num_prompt, len(ids))
        extension = extend_seen(context, choice, len(ids), parent.prompt_text, conversation, self._images)
        return _Built(conversation, ids[: extension.at] + extension.suffix_ids, extension.at)


_LASTING = ("system", "developer")  # roles that truncation leaves


def _without_oldest(messages: Sequence[Message], dropped: int) -> list[Message]:
    """Without the `dropped` oldest that are no instructions, and without results of calls that went with them."""
    kept: list[Message] = []
    orphaned = True
    for message in messages:
        if message["role"] in _LASTING:
            kept.append(message)
        elif dropped > 0:
            dropped -= 1
        elif not (orphaned and message["role"] == "tool"):
            kept.append(message)
            orphaned = False
    return kept
