"""POST /v1/embeddings: one vector per input, made of the model's last hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
from aiohttp import web

from bequest.engine.types.hidden import HiddenStatesParams, Pooling, Positions, Stack
from bequest.server.answers.encoding import GAP, Assembled, JsonBody, States
from bequest.server.answers.extraction import extracted, is_small
from bequest.server.asks.ask import Ask, ask_of
from bequest.server.asks.call import Call, begin
from bequest.server.asks.chats import ChatSource
from bequest.server.asks.continued import plain_chat
from bequest.server.asks.prompts import TextSource, plain_prompts
from bequest.server.asks.sampling import NOTHING_SAMPLED
from bequest.server.asks.terms import AskTerms, input_terms
from bequest.server.asks.wish import JSON_ENCODINGS, JsonEncoding, StatesWish, one_of
from bequest.server.context import Context
from bequest.server.states.inputs import chat_sources, check_count, input_source
from bequest.server.transport.sending import joined, send_body
from bequest.server.transport.work import apart
from bequest.server.wire.bodies import EmbeddingsBody
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

# The first is the default: a decoder's last token has seen all others, and of an encoder's each has.
_POOLINGS: dict[Stack, tuple[Pooling, ...]] = {"decoder": ("last", "mean"), "encoder": ("mean", "last")}
_FOREIGN_IDS = (
    " Token ids must be this model's own: send text instead (in LangChain: check_embedding_ctx_length=False)."
)


async def embeddings(http: web.Request) -> web.StreamResponse:
    call = await begin(http, EmbeddingsBody, "hs-")
    async with _embedded(call) as (json, small):
        return await send_body(http, json, small, "application/json", call.headers, call.context.encoder)


async def whole_embeddings(call: Call[EmbeddingsBody]) -> bytes:
    """The answer as JSON, for whoever keeps it."""
    async with _embedded(call) as (json, small):
        return await joined(json, small, call.context.encoder)


@asynccontextmanager
async def _embedded(call: Call[EmbeddingsBody]) -> AsyncIterator[tuple[JsonBody, bool]]:
    """The answer, and whether it is small."""
    context, body = call.context, call.body
    encoding = one_of(body.encoding_format, JSON_ENCODINGS, "encoding_format")
    length = vector_length(body.dimensions, context.engine.info.hidden_size)
    ask = await embeddings_ask(call, encoding)
    async with extracted(context, ask.requests) as results:
        vectors = await vectors_of(context, [result.states for result in results], length, body.normalize is not False)
        tokens = sum(result.usage.prompt_tokens for result in results)
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": GAP} for i in range(len(vectors))],
            "model": call.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        yield JsonBody(answer, vectors, encoding), is_small(vectors)


async def embeddings_ask(call: Call[EmbeddingsBody], encoding: JsonEncoding = "float") -> Ask:
    body = call.body
    check_count(body.input)
    chats = await apart(call.context, lambda: chat_sources(call.context, body))
    source = input_source(body, body.input, _FOREIGN_IDS) if chats is None else chats
    return await pooled_ask(call.context, call.id, source, input_terms(call), body.pooling, encoding)


async def pooled_ask(
    context: Context,
    answer_id: str,
    source: TextSource | Sequence[ChatSource],
    terms: AskTerms,
    pooling: str | None = None,
    encoding: JsonEncoding = "float",
) -> Ask:
    """The last hidden states of each input, as one vector. `pooling` None: as the model's stack does best."""
    info = context.engine.info
    stack: Stack = "decoder" if info.encoder is None else "encoder"
    chosen = one_of(pooling, _POOLINGS[stack], "pooling")
    positions: Positions = "last" if chosen == "last" else "all"
    layers = (info.num_layers_of(stack),)
    wish = StatesWish(HiddenStatesParams(layers, positions, chosen, "float32", stack=stack), encoding)
    if isinstance(source, TextSource):
        prompts = await plain_prompts(context, source)
    else:
        prompts = [await plain_chat(context, chat) for chat in source]
    return await apart(context, lambda: ask_of(context, answer_id, prompts, NOTHING_SAMPLED, terms, wish))


def vector_length(dimensions: int | None, hidden_size: int) -> int:
    if dimensions is None:
        return hidden_size
    if not 1 <= dimensions <= hidden_size:
        raise invalid(
            f"`dimensions` must be from 1 to {hidden_size}, what this model has, not {shorten(str(dimensions))}.",
            "dimensions",
        )
    return dimensions


async def vectors_of(context: Context, answers: list[States], length: int, normalize: bool) -> list[Assembled]:
    """The first `length` numbers of each of the states [1, H]; normalised afterwards, so that what is cut off does not
    count."""

    def work() -> npt.NDArray[np.float32]:
        values = np.concatenate([states.assemble() for states in answers])[:, :length]  # [inputs, length] float32
        if not normalize:
            return np.ascontiguousarray(values)
        norms = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        return (values / np.where(norms > 0, norms, 1)).astype(np.float32)

    if is_small(answers):
        values = work()
    else:
        values = await asyncio.get_running_loop().run_in_executor(context.encoder, work)
    return [Assembled(s.layers, s.positions, s.dtype, row) for s, row in zip(answers, values, strict=True)]
