"""Prompts → tokens. Long texts are tokenised in the worker pool: nothing holds the event loop up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bequest.engine.errors import EngineError
from bequest.engine.text import ChatTemplate
from bequest.engine.text.fill_in import fill_in_tokens
from bequest.engine.types.encoder import EncoderInfo
from bequest.server.asks.encoder_prompts import check_forms, decoder_ids, encoder_input
from bequest.server.asks.extension import Conversation
from bequest.server.asks.messages import conversation, text_length
from bequest.server.asks.prompt import Prompt, check_not_empty, truncated
from bequest.server.asks.prompt_forms import Form, Piece, read_forms
from bequest.server.asks.sampling import check_ids, context_exceeded
from bequest.server.asks.tools import chat_tools
from bequest.server.context import Context
from bequest.server.interfaces import ChatTemplateLike
from bequest.server.transport.work import _INLINE_CHARS, off_loop
from bequest.server.wire.bodies import ChatBody, CompletionBody, InputField, PromptField, TokenizeBody
from bequest.server.wire.errors import ApiError, at_field, from_engine, invalid, unsupported

_Result = TypeVar("_Result")
MESSAGE_CHARS = 20  # that reading a message takes as long as


async def encode(context: Context, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    tokenizer = context.text.tokenizer
    chars = sum(map(len, texts))
    return await off_loop(context, chars, lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])


def check_length(context: Context, text: str, encoder: EncoderInfo | None = None, param: str = "prompt") -> None:
    """Refuses a text that must be too long, for the encoder if it is given, before minutes are spent on its tokens."""
    longest = context.text.tokenizer.max_chars_per_token
    limit = context.engine.info.max_model_len if encoder is None else encoder.max_len
    if longest is None or len(text) <= limit * longest:
        return
    least = -(-len(text) // longest)
    if encoder is None:
        raise from_engine(context_exceeded(limit, least, 1), None if param == "prompt" else param)
    try:
        encoder.check_length(least)
    except EngineError as error:
        raise at_field(error, param) from error


async def plain_prompts(
    context: Context,
    body: CompletionBody,
    given: PromptField | InputField | Sequence[int] | None,
    name: str = "prompt",
    hint: str = "",
) -> list[Prompt]:
    """The prompts that are `given` in the field `name`. `hint` follows the complaint about a foreign token id."""
    forms = read_forms(given, name)
    check_forms(context, body, forms)
    encoder = context.engine.info.encoder
    pieces = [form.prompt for form in forms]
    for piece in pieces:
        if not isinstance(piece.given, str):
            check_ids(piece.given, context.engine.info.vocab_size, piece.param, hint)
        elif body.truncate_prompt_tokens is None:
            check_length(context, piece.given, encoder, piece.param)
    gap = await _gap(context, body)
    special = (True if body.add_special_tokens is None else body.add_special_tokens) and gap is None
    tokens = await _tokens(context, pieces, special)
    if encoder is not None:
        return await _encoder_prompts(context, encoder, body, forms, tokens)
    prompts = []
    for piece, ids in zip(pieces, tokens, strict=True):
        prompt = _completion_prompt(context, body, piece.given, ids if gap is None else gap(ids))
        prompts.append(check_not_empty(prompt, piece.param))
    return prompts


async def _gap(context: Context, body: CompletionBody) -> Callable[[list[int]], list[int]] | None:
    """With `suffix`: from the tokens of a prompt to those of a prompt whose answer stands between the two."""
    if not body.suffix:
        return None
    tokenizer = context.text.tokenizer
    marks = fill_in_tokens(tokenizer.id_of)
    if marks is None:
        message = "`suffix` cannot be used here: this model has no tokens for filling in the middle. Leave it out."
        raise unsupported("suffix", message)
    if body.echo:
        raise invalid("`echo` cannot be used with `suffix`: the prompt does not end where the answer begins.", "echo")
    check_length(context, body.suffix)
    [after] = await encode(context, [body.suffix], add_special_tokens=False)
    begin = [] if body.add_special_tokens is False else tokenizer.encode("", add_special_tokens=True)
    return lambda before: marks.prompt(begin, before, after)


async def _encoder_prompts(
    context: Context, info: EncoderInfo, body: CompletionBody, forms: Sequence[Form], tokens: Sequence[Sequence[int]]
) -> list[Prompt]:
    """`tokens`: those of the encoder prompts. A decoder's text is the beginning of its answer, tokenised as such."""
    decoders = [form.decoder for form in forms if form.decoder is not None]
    for piece in decoders:
        if isinstance(piece.given, str):
            check_length(context, piece.given, None, piece.param)
    begun = iter(await _tokens(context, decoders, add_special_tokens=False))
    prompts = []
    for form, ids in zip(forms, tokens, strict=True):
        decoder = decoder_ids(context, info, None if form.decoder is None else next(begun), form.decoder)
        param = None if form.decoder is None else form.decoder.param
        prompts.append(Prompt(decoder, encoder=encoder_input(info, body, ids, form.prompt), param=param))
    return prompts


async def _tokens(context: Context, pieces: Sequence[Piece], add_special_tokens: bool) -> list[list[int]]:
    encoded = iter(await encode(context, [p.given for p in pieces if isinstance(p.given, str)], add_special_tokens))
    return [next(encoded) if isinstance(piece.given, str) else piece.given for piece in pieces]


def _completion_prompt(context: Context, body: CompletionBody, given: str | list[int], ids: list[int]) -> Prompt:
    kept = truncated(ids, body, context.engine.info.max_model_len)
    if not body.echo:
        return Prompt(kept)
    if isinstance(given, str) and len(kept) == len(ids):
        return Prompt(kept, given)
    return Prompt(kept, context.text.tokenizer.decode(list(kept), skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """How messages become text: a template, and what the client said about its use."""

    template: ChatTemplateLike
    source: str | None  # the client's own template
    kwargs: Mapping[str, Any]
    opened: bool  # the answer's turn is opened after the last message
    continued: bool  # the last message is the beginning of the answer
    tools: Sequence[Mapping[str, Any]] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        text = self.template.render(
            messages,
            add_generation_prompt=self.opened,
            continue_final_message=self.continued,
            tools=self.tools,
            template=self.source,
            **self.kwargs,
        )
        return Conversation(tuple(messages), text, self.source, self.kwargs, self.tools, self.continued)


def template_use(
    context: Context, body: ChatBody | TokenizeBody, last_role: str, before: Conversation | None = None
) -> TemplateUse:
    """How `body` wants its messages rendered, the last of which is `last_role`'s. A conversation that goes on is
    rendered as it was `before`, unless the client says otherwise."""
    if isinstance(body, ChatBody):
        check_converses(context, "messages")
    source, kwargs = body.chat_template, template_kwargs(body.chat_template_kwargs)
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    tools: Sequence[Mapping[str, Any]] | None = chat_tools(body.tools, choice, None).for_template()
    if before is not None:
        tools = before.tools if body.tools is None else tools
        source, kwargs = source or before.template, {**before.template_kwargs, **kwargs}
    template = context.text.chat_template
    if template is None:
        if source is None:
            raise _no_template()
        template = ChatTemplate("")
    continued = body.continue_final_message
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other: the last message is either "
            "continued or followed by a new one.",
            "continue_final_message",
        )
    if continued and last_role != "assistant":
        raise invalid("`continue_final_message` needs a last message of the assistant.", "continue_final_message")
    return TemplateUse(template, source, kwargs, opened, continued, tools)


def _no_template() -> ApiError:
    message = "this model has no chat template: send chat_template with the request, or use /v1/completions"
    return invalid(message, "messages")


def check_converses(context: Context, param: str) -> None:
    """Refuses a conversation, in the field `param`, with a model that reads one input."""
    encoder = context.engine.info.encoder
    if encoder is not None:
        audio = encoder.takes == "audio"
        where = "a recording to /v1/audio/transcriptions" if audio else "its input as `prompt` to /v1/completions"
        raise invalid(f"`{param}` cannot be used with an encoder-decoder model: send {where}.", param)


async def rendered_chat(
    context: Context, body: ChatBody | TokenizeBody, given: list[dict[str, Any]] | None, name: str = "messages"
) -> tuple[Conversation, list[int]]:
    """The messages `given` in the field `name` through the chat template, which writes its own special tokens."""
    messages = await off_loop(context, MESSAGE_CHARS * len(given or ()), lambda: conversation(given, name))
    use = template_use(context, body, messages[-1]["role"])

    def work() -> tuple[Conversation, list[int]]:
        rendered = use.render(messages)
        if isinstance(body, ChatBody) and body.truncate_prompt_tokens is None:
            check_length(context, rendered.prompt_text)
        return rendered, context.text.tokenizer.encode(rendered.prompt_text, bool(body.add_special_tokens))

    return await off_loop_rendering(context, use, messages, work)


async def off_loop_rendering(
    context: Context, use: TemplateUse, messages: Sequence[Mapping[str, Any]], work: Callable[[], _Result]
) -> _Result:
    """Runs `work`, which renders `messages`. A template of the client's may loop for long, however short they are."""
    chars = _INLINE_CHARS + 1 if use.source else text_length(messages)
    try:
        return await off_loop(context, chars, work)
    except EngineError as error:
        raise from_engine(error) from error


def template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Extra variables for the template; those that have fields of their own are not set this way."""
    own = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message", "self"}
    for name in kwargs or {}:
        if name in own:
            raise invalid(f"`chat_template_kwargs` must not set `{name}`.", f"chat_template_kwargs.{name}")
    return kwargs or {}
