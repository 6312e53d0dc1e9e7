"""Conversations → tokens, through a chat template: the model's own, or one that the client brings."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bequest.engine.errors import EngineError
from bequest.engine.types.image import Image
from bequest.server.asks.extension import Conversation
from bequest.server.asks.images import STAND_IN, before_looking, look_at, merged, spelling_of_images, unfolded
from bequest.server.asks.messages import MESSAGE_CHARS, check_results, check_roles_shown, conversation, text_length
from bequest.server.asks.prompt import Prompt, Truncation
from bequest.server.asks.prompts import check_length, encode
from bequest.server.asks.tools import Tools
from bequest.server.context import Context
from bequest.server.interfaces import ChatTemplateLike
from bequest.server.transport.work import INLINE_CHARS, has_large_body, off_loop
from bequest.server.wire.bodies import EmbeddingsBody, TokenizeBody
from bequest.server.wire.errors import ApiError, from_engine, invalid, unsupported

_HEAD_START = 0.001  # seconds, in which the decoder of an image leaves the interpreter to others
_LONGEST_TEMPLATE = 1 << 18  # characters
# What a body says of how its messages are rendered, and the values that ask for nothing.
_OF_RENDERING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """What a body says of its conversation."""

    given: list[dict[str, Any]] | None
    field: str = "messages"  # where it is given
    template: str | None = None  # the client's own; None: the model's
    template_kwargs: Mapping[str, Any] | None = None
    opens: bool | None = None  # `add_generation_prompt`; None: unless the last message goes on
    continues: bool = False  # `continue_final_message`
    tools: Tools | None = None  # None: nothing is said of them
    special: bool = False  # whether the tokenizer adds its special tokens: the template writes its own
    truncation: Truncation = Truncation()
    # How a parent's answer becomes a message, where it is more than its text: it holds thoughts.
    reads_answer: Callable[[str, Prompt], dict[str, Any]] | None = None
    image_kwargs: Mapping[str, Any] | None = None  # `mm_processor_kwargs`
    only_counts: bool = False  # tokens are counted, for whatever model: it need not converse, nor must they fit


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """How messages become text: a template, and what the client said about its use."""

    template: ChatTemplateLike
    source: str | None  # of the template, where it is the client's own
    kwargs: Mapping[str, Any]
    opened: bool  # the answer's turn is opened after the last message
    continued: bool  # the last message is the beginning of the answer
    tools: Sequence[Mapping[str, Any]] | None = None
    spelling: tuple[str, str] | None = None  # of an image: what the template writes, and what stands there in its place

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        text = self.template.render(
            messages,
            add_generation_prompt=self.opened,
            continue_final_message=self.continued,
            tools=self.tools,
            **self.kwargs,
        )
        text = text if self.spelling is None else text.replace(*self.spelling)
        check_roles_shown(messages, text)
        return Conversation(tuple(messages), text, self.source, self.kwargs, self.tools, self.continued)

    def after_answer(self, before: Conversation, new: Sequence[Mapping[str, Any]]) -> str | None:
        """The text between an answer to `before` and where the next one begins: the end of its turn, new messages.

        None: the template does not show an answer as it is, or not without the calls in it.
        """
        mark = f"ANSWER-{secrets.token_hex(16)}"
        try:
            text = self.render([*before.answered(mark), *new]).prompt_text
        except EngineError:
            return None
        return text.partition(mark)[2] if text.count(mark) == 1 else None


def template_use(
    context: Context, source: ChatSource, last_role: str, before: Conversation | None = None
) -> TemplateUse:
    """How the messages are to be rendered, the last of which is `last_role`'s. A conversation that goes on is rendered
    as it was `before`, unless the client says otherwise."""
    if not source.only_counts:
        check_converses(context, source.field)
    written, kwargs = source.template, template_kwargs(source.template_kwargs)
    tools: Sequence[Mapping[str, Any]] | None = None if source.tools is None else source.tools.for_template()
    if before is not None:
        tools = before.tools if source.tools is None else tools
        written, kwargs = written or before.template, {**before.template_kwargs, **kwargs}
    template = context.text.chat_template if written is None else _foreign(context, written)
    if template is None:
        raise _no_template(source.field)
    opened = not source.continues if source.opens is None else source.opens
    _check_last(source.continues, opened, last_role)
    return TemplateUse(template, written, kwargs, opened, source.continues, tools, spelling_of_images(context))


def _foreign(context: Context, written: str) -> ChatTemplateLike:
    """A template that the client wrote."""
    if context.templates.seconds == 0:
        raise unsupported("chat_template", "This server takes no `chat_template` of requests; leave it out.")
    if len(written) > _LONGEST_TEMPLATE:
        message = f"`chat_template` has {len(written)} characters, at most {_LONGEST_TEMPLATE}."
        raise invalid(message, "chat_template")
    return context.templates.template(written, context.text.tokenizer.role_tokens)


def _check_last(continued: bool, opened: bool, last_role: str) -> None:
    if continued and opened:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other: the last message is either "
            "continued or followed by a new one.",
            "continue_final_message",
        )
    if continued and last_role != "assistant":
        raise invalid("`continue_final_message` needs a last message of the assistant.", "continue_final_message")


def _no_template(param: str) -> ApiError:
    message = "this model has no chat template: send chat_template with the request, or use /v1/completions"
    return invalid(message, param)


def check_not_rendered(body: TokenizeBody | EmbeddingsBody, field: str) -> None:
    """Refuses what would do nothing, where the text in `field` is taken as it is."""
    for name, idle in _OF_RENDERING.items():
        value = getattr(body, name, None)
        if value is not None and value not in idle:
            raise invalid(f"`{name}` needs `messages`: `{field}` is taken as it is, without a chat template.", name)


def check_converses(context: Context, param: str) -> None:
    """Refuses a conversation, in the field `param`, with a model that reads one input."""
    encoder = context.engine.info.encoder
    if encoder is not None:
        audio = encoder.takes == "audio"
        where = "a recording to /v1/audio/transcriptions" if audio else "its input as `prompt` to /v1/completions"
        raise invalid(f"`{param}` cannot be used with an encoder-decoder model: send {where}.", param)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages through the chat template."""

    conversation: Conversation
    token_ids: tuple[int, ...]
    images: tuple[Image, ...]


async def _given_messages(context: Context, source: ChatSource, whole: bool) -> list[dict[str, Any]]:
    given = source.given

    def work() -> list[dict[str, Any]]:
        messages = conversation(given, source.field)
        if whole:
            check_results(messages, source.field)
        return messages

    return await off_loop(context, MESSAGE_CHARS * len(given or ()), work)


async def read_messages(context: Context, source: ChatSource) -> tuple[list[dict[str, Any]], tuple[Image, ...]]:
    """The messages that a body has, and their images. They follow a parent, whose answer may have made calls."""
    return await look_at(context, await _given_messages(context, source, whole=False), source.image_kwargs)


async def rendered_chat(context: Context, source: ChatSource) -> RenderedChat:
    """The text need not wait for images, which take ten times as long."""
    given = await _given_messages(context, source, whole=True)
    if (unseen := before_looking(given)) is None:
        messages, images = await look_at(context, given, source.image_kwargs)
        rendered, ids = await _tokenised(context, source, messages)
    else:
        decoding = asyncio.Event()

        async def beside() -> tuple[Conversation, list[int]]:
            await asyncio.sleep(0)  # images come first, as far as nobody has to be waited for
            if decoding.is_set():
                await asyncio.sleep(_HEAD_START)
            return await _tokenised(context, source, unseen)

        looking = look_at(context, given, source.image_kwargs, decoding)
        looked, made = await asyncio.gather(looking, beside(), return_exceptions=True)
        if isinstance(looked, BaseException):
            raise looked
        messages, images = looked
        if isinstance(made, BaseException):
            raise made
        rendered, ids = made
        if str(STAND_IN) in rendered.prompt_text:  # a template that writes what it is given
            rendered, ids = await _tokenised(context, source, messages)
    rendered = replace(rendered, messages=tuple(messages))
    return RenderedChat(rendered, unfolded(context, ids, images, source.field), merged(images))


async def _tokenised(
    context: Context, source: ChatSource, messages: Sequence[Mapping[str, Any]]
) -> tuple[Conversation, list[int]]:
    use = template_use(context, source, messages[-1]["role"])

    def work() -> Conversation:
        rendered = use.render(messages)
        if not source.only_counts and source.truncation.keep is None:
            check_length(context, rendered.prompt_text, source.field)
        return rendered

    rendered = await off_loop_rendering(context, use, messages, work)
    if source.only_counts:
        check_countable(context, rendered.prompt_text, source.field)
    [ids] = await encode(context, [rendered.prompt_text], source.special)
    return rendered, ids


def check_countable(context: Context, text: str, param: str) -> None:
    """Refuses a text that is only tokenised, whatever the model's window, if that would take too long."""
    most = context.config.max_tokenize_chars
    if len(text) > most:
        message = f"`{param}` has {len(text)} characters; at most {most} are tokenised (--max-tokenize-chars)."
        raise invalid(message, param)


async def off_loop_rendering(
    context: Context, use: TemplateUse, messages: Sequence[Mapping[str, Any]], work: Callable[[], _Result]
) -> _Result:
    """Runs `work`, which renders `messages`. A template of the client's may loop for long, however short they are."""
    chars = INLINE_CHARS + 1 if use.source or has_large_body() else text_length(messages, INLINE_CHARS)
    try:
        return await off_loop(context, chars, work)
    except EngineError as error:
        raise from_engine(error) from error


def template_kwargs(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Extra variables for the template; those that have fields of their own are not set this way."""
    own = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message", "self"}
    for name in kwargs or {}:
        if name in own:
            raise invalid(f"`chat_template_kwargs` must not set `{name}`.", f"chat_template_kwargs.{name}")
    return kwargs or {}
