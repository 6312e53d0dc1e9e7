"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import orjson
from aiohttp import web

from bequest.server.access.marks import CALLER
from bequest.server.asks.chats import ChatSource, check_countable, check_not_rendered, rendered_chat
from bequest.server.asks.images import shown_ids
from bequest.server.asks.prompts import encode
from bequest.server.asks.ranges import check_ids
from bequest.server.asks.tools import chat_tools
from bequest.server.context import CONTEXT, Context
from bequest.server.transport.intake import read_body
from bequest.server.transport.replies import json_response
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire import fields
from bequest.server.wire.bodies import DetokenizeBody, TokenizeBody
from bequest.server.wire.errors import invalid, missing


async def tokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body, ignored = await read_body(request, context, TokenizeBody)
    context.served_name(body.model, request[CALLER])
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid("`prompt` and `messages` exclude each other: send one of them.", "prompt")
        rendered = await rendered_chat(context, await apart(context, lambda: _source(body)))
        tokens = shown_ids(context, rendered.token_ids, rendered.images)
    elif body.prompt is not None:
        check_not_rendered(body, "prompt")
        check_countable(context, body.prompt, "prompt")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        [tokens] = await encode(context, [body.prompt], special)
    else:
        raise missing("prompt", "`prompt` is missing: send a string as `prompt`, or a conversation as `messages`.")
    shown = await off_loop(context, len(tokens), lambda: _shown(context, tokens, body.return_token_strs))
    return json_response(shown, fields.ignored_header(ignored))


def _shown(context: Context, tokens: list[int], with_text: bool) -> orjson.Fragment:
    answer = {
        "count": len(tokens),
        "max_model_len": context.engine.info.max_model_len,
        "tokens": tokens,
        "token_strs": [context.text.tokenizer.token_text(t) for t in tokens] if with_text else None,
    }
    return orjson.Fragment(orjson.dumps(answer))


def _source(body: TokenizeBody) -> ChatSource:
    return ChatSource(
        given=body.messages,
        template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        opens=body.add_generation_prompt,
        continues=body.continue_final_message,
        tools=chat_tools(body.tools, None, None),
        special=bool(body.add_special_tokens),
        image_kwargs=body.mm_processor_kwargs,
        only_counts=True,
    )


async def tokenizer_info(request: web.Request) -> web.Response:
    """What the model's tokenizer_config.json would say, as far as this server uses it."""
    context = request.app[CONTEXT]
    template, tokenizer, info = context.text.chat_template, context.text.tokenizer, context.engine.info
    special = sorted(tokenizer.special_ids)
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": info.max_model_len,
            "vocab_size": info.vocab_size,
            "chat_template": None if template is None else template.source,
            "bos_token": tokenizer.role_tokens.get("bos_token"),
            "eos_token": tokenizer.role_tokens.get("eos_token"),
            "eos_token_ids": info.eos_token_ids,
            "special_tokens": {str(token): tokenizer.token_text(token) for token in special},
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Every token is shown, special ones too: tokenising the answer gives the tokens back."""
    context = request.app[CONTEXT]
    body, ignored = await read_body(request, context, DetokenizeBody)
    context.served_name(body.model, request[CALLER])
    if body.tokens is None:
        raise missing("tokens", "`tokens` is missing: send a list of token ids.")
    tokens = body.tokens

    def work() -> orjson.Fragment:
        check_ids(tokens, context.engine.info.vocab_size, "tokens")
        text = context.text.tokenizer.decode(tokens, skip_special_tokens=False)
        return orjson.Fragment(orjson.dumps({"prompt": text}))

    return json_response(await off_loop(context, 4 * len(tokens), work), fields.ignored_header(ignored))
