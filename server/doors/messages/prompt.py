"""The prompt of a message: its conversation through the chat template, behind what is known of it already."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bequest.engine.types import Lineage, Parent, ParentChoice
from bequest.engine.types.image import Image
from bequest.server.asks.chats import ChatSource, TemplateUse, check_countable, off_loop_rendering, template_use
from bequest.server.asks.extension import Conversation, common_length
from bequest.server.asks.images import Folded, extend_seen, look_at, merged, unfolded
from bequest.server.asks.messages import MESSAGE_CHARS
from bequest.server.asks.prompt import Prompt, check_not_empty
from bequest.server.asks.prompts import check_length
from bequest.server.asks.reading import Reading
from bequest.server.context import Context
from bequest.server.doors.messages.body import ConversingBody
from bequest.server.doors.messages.cache_marks import Place, check_places, longest_places, tokens_before
from bequest.server.doors.messages.conversation import Said, read_conversation
from bequest.server.doors.messages.known_turns import KnownTurns
from bequest.server.doors.messages.thinking import Thinking
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire.errors import invalid


@dataclass(frozen=True, slots=True)
class CacheLength:
    """So many of a prompt's first tokens are to be kept."""

    ttl: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MessagePrompt:
    prompt: Prompt
    digest: bytes  # of the conversation
    to_cache: tuple[CacheLength, ...]  # the shorter first


@dataclass(frozen=True, slots=True)
class _Given:
    """What a message says, and who said the same before."""

    said: Said
    images: tuple[Image, ...]
    use: TemplateUse
    digest: bytes
    parent: Parent | None


async def message_prompt(
    context: Context, tenant: str, body: ConversingBody, reading: Reading, thinking: Thinking, known: KnownTurns
) -> MessagePrompt:
    given = await _read(context, tenant, body, reading, thinking, known)
    said, use = given.said, given.use

    def work() -> MessagePrompt:
        rendered = use.render(said.messages())
        check_length(context, rendered.prompt_text, "messages")
        prompt = _prompt(context, given.parent, rendered, given.images)
        lengths = [_cache_length(context, said, use, prompt, rendered, place) for place in longest_places(said.places)]
        ordered = sorted(filter(None, lengths), key=lambda length: length.num_tokens)
        return MessagePrompt(prompt, given.digest, tuple(ordered))

    made = await off_loop_rendering(context, use, said.messages(), work)
    return replace(made, prompt=check_not_empty(made.prompt, "messages"))


async def count_tokens(
    context: Context, tenant: str, body: ConversingBody, reading: Reading, thinking: Thinking, known: KnownTurns
) -> int:
    """Of the prompt that the same message would have: an answer that is known counts as it was sampled."""
    given = await _read(context, tenant, body, reading, thinking, known)
    said, use = given.said, given.use

    def work() -> int:
        rendered = use.render(said.messages())
        check_countable(context, rendered.prompt_text, "messages")
        return len(_prompt(context, given.parent, rendered, given.images).token_ids)

    return await off_loop_rendering(context, use, said.messages(), work)


async def _read(
    context: Context, tenant: str, body: ConversingBody, reading: Reading, thinking: Thinking, known: KnownTurns
) -> _Given:
    kwargs = thinking.template_kwargs(reading, body.chat_template_kwargs)

    def work() -> Said:
        said = read_conversation(body)
        check_places(said.places)
        return said

    given = await off_loop(context, MESSAGE_CHARS * len(body.messages or ()), work)
    messages, images = await look_at(context, given.messages())
    said = given.seen(messages)
    last = said.turns[-1]
    if last.role == "assistant" and last.calls:
        raise invalid("`messages` ends with calls: send their results as `tool_result` blocks.", "messages")
    # An answer that has begun goes on.
    source = ChatSource(given=None, template_kwargs=kwargs, continues=last.role == "assistant", tools=reading.tools)
    use = template_use(context, source, last.role)
    digests = await apart(context, lambda: said.digests(reading.tools, use.kwargs))
    parent = known.parent(context.engine, tenant, digests, body.cache_salt or "")
    return _Given(said, images, use, digests[-1], parent)


def _token_ids(context: Context, text: str, images: Sequence[Image]) -> tuple[int, ...]:
    return unfolded(context, context.text.tokenizer.encode(text, add_special_tokens=False), images, "messages")


def _prompt(context: Context, parent: Parent | None, rendered: Conversation, images: tuple[Image, ...]) -> Prompt:
    if parent is None or not isinstance(parent.origin, Conversation):
        token_ids = _token_ids(context, rendered.prompt_text, images)
        return Prompt(token_ids, origin=rendered, images=merged(images))
    choice, known = parent.choices[0], merged(parent.images, images)
    extension = extend_seen(context, choice, choice.shown_len, parent.origin.prompt_text, rendered, known)
    token_ids = (*choice.token_ids[: extension.at], *extension.suffix_ids)
    lineage = Lineage(parent.id, 0, extension.at)
    return Prompt(token_ids, lineage=lineage, origin=rendered, images=merged(images))


def _cache_length(
    context: Context, said: Said, use: TemplateUse, prompt: Prompt, rendered: Conversation, place: Place
) -> CacheLength | None:
    """Up to where the prompt stays as it is, whatever stands behind the place. None: the template does not show it."""
    mark = f"MARK-{secrets.token_hex(8)}"
    other = _marked(said, use, place, mark)
    text = rendered.prompt_text
    if other == text:
        return None
    num_chars = common_length(text, other)
    length = len(prompt.token_ids)
    folded = Folded(context, ParentChoice(prompt.token_ids, length, length), prompt.images)
    num_tokens = folded.end_of(tokens_before(context.text.tokenizer, folded.token_ids, text, num_chars))
    return CacheLength(place.ttl, num_tokens) if num_tokens else None


def _marked(said: Said, use: TemplateUse, place: Place, mark: str) -> str:
    if place.tool is None:
        return use.render(said.marked(place, mark)).prompt_text
    tools: list[dict[str, object]] = [dict(tool) for tool in use.tools or ()]
    if place.tool < len(tools):
        tools[place.tool] = _with_mark(tools[place.tool], mark)
    return _with_tools(use, tools).render(said.messages()).prompt_text


def _with_mark(tool: dict[str, object], mark: str) -> dict[str, object]:
    """A tool is shown with its schema last: the mark is its last property."""
    function = tool["function"]
    assert isinstance(function, dict)
    parameters = function["parameters"]
    properties = {**(parameters.get("properties") or {}), mark: {"type": "string"}}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def _with_tools(use: TemplateUse, tools: Sequence[dict[str, object]]) -> TemplateUse:
    return replace(use, tools=tools or None)
