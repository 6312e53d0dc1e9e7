"""Prompts → tokens. Long texts are tokenised in the worker pool: nothing holds the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine.errors import EngineError
from engine.text import ChatTemplate, no_template_error
from server.context import Context
from server.errors import ApiError, from_engine, invalid, missing
from server.generation import Prompt, check_not_empty, truncated
from server.messages import conversation, text_length
from server.sampling import check_ids, context_exceeded
from server.wire import ChatBody, CompletionBody, TokenizeBody

_INLINE_CHARS = 2000  # a millisecond or so; the way to the pool and back costs a tenth of one
_Result = TypeVar("_Result")


async def off_loop(context: Context, chars: int, work: Callable[[], _Result]) -> _Result:
    """Runs `work` over a text of so many characters, in the pool if it is long."""
    if chars <= _INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(context.pool, work)


async def encode(context: Context, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    tokenizer = context.text.tokenizer
    chars = sum(map(len, texts))
    return await off_loop(context, chars, lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])


def check_length(context: Context, text: str) -> None:
    """Refuses a text that must be too long before minutes are spent on its tokens."""
    longest = context.text.tokenizer.max_chars_per_token
    limit = context.engine.info.max_model_len
    if longest is not None and len(text) > limit * longest:
        raise from_engine(context_exceeded(limit, -(-len(text) // longest), 1))


async def completion_prompts(context: Context, body: CompletionBody) -> list[Prompt]:
    """`prompt` is a string, a list of token ids, or a list of either."""
    given = body.prompt
    if given is None:
        raise missing("prompt", "`prompt` is missing: send a string, a list of token ids, or a list of either.")
    if isinstance(given, str):
        items: list[Any] = [given]
    elif given and all(isinstance(item, int) for item in given):
        items = [given]
    else:
        items = given
    params = ["prompt"] if items is not given else [f"prompt[{index}]" for index in range(len(items))]
    if not items:
        raise invalid("`prompt` is an empty list; send at least one token or string.", "prompt")
    for param, item in zip(params, items, strict=True):
        if isinstance(item, int):
            raise ApiError(400, "invalid_type", f"`{param}` is a bare token id among other prompts.", param=param)
        if not isinstance(item, str):
            check_ids(item, context.engine.info.vocab_size, param)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    texts = [item for item in items if isinstance(item, str)]
    if body.truncate_prompt_tokens is None:
        for text in texts:
            check_length(context, text)
    encoded = iter(await encode(context, texts, special))
    prompts = []
    for param, item in zip(params, items, strict=True):
        prompt = _completion_prompt(context, body, item, next(encoded) if isinstance(item, str) else item)
        prompts.append(check_not_empty(prompt, param))
    return prompts


def _completion_prompt(context: Context, body: CompletionBody, given: str | list[int], ids: list[int]) -> Prompt:
    kept = truncated(ids, body, context.engine.info.max_model_len)
    if not body.echo:
        return Prompt(kept)
    if isinstance(given, str) and len(kept) == len(ids):
        return Prompt(kept, given)
    return Prompt(kept, context.text.tokenizer.decode(list(kept), skip_special_tokens=False))


async def chat_prompt(context: Context, body: ChatBody | TokenizeBody) -> list[int]:
    """The conversation through the chat template; templates write their own special tokens."""
    template = context.text.chat_template
    if template is None:
        if body.chat_template is None:
            raise from_engine(no_template_error())
        template = ChatTemplate("")
    messages = conversation(body.messages)
    continued = body.continue_final_message
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other: the last message is either "
            "continued or followed by a new one.",
            "continue_final_message",
        )
    if continued and messages[-1]["role"] != "assistant":
        raise invalid("`continue_final_message` needs a last message of the assistant.", "continue_final_message")
    kwargs = _template_kwargs(body.chat_template_kwargs)
    tokenizer = context.text.tokenizer

    def work() -> list[int]:
        text = template.render(
            messages,
            add_generation_prompt=opened,
            continue_final_message=continued,
            template=body.chat_template,
            **kwargs,
        )
        if isinstance(body, ChatBody) and body.truncate_prompt_tokens is None:
            check_length(context, text)
        return tokenizer.encode(text, bool(body.add_special_tokens))

    # A template of the client's may loop for long, however short the messages.
    chars = _INLINE_CHARS + 1 if body.chat_template else text_length(messages)
    try:
        return await off_loop(context, chars, work)
    except EngineError as error:
        raise from_engine(error) from error


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Extra variables for the template; those that have fields of their own are not set this way."""
    own = {"messages", "tools", "template", "add_generation_prompt", "continue_final_message", "self"}
    for name in kwargs or {}:
        if name in own:
            raise invalid(f"`chat_template_kwargs` must not set `{name}`.", f"chat_template_kwargs.{name}")
    return kwargs or {}
