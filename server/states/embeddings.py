"""POST /v1/embeddings: one vector per input, made of the model's last hidden states."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiohttp import web

from bequest.engine.types.hidden import HiddenStatesParams, Pooling, Positions, Stack
from bequest.server.access.marks import ANSWER_ID
from bequest.server.answers.encoding import GAP, Assembled, JsonBody, States
from bequest.server.answers.extraction import extracted, is_small
from bequest.server.asks.ask import engine_requests
from bequest.server.asks.prompts import plain_prompts
from bequest.server.asks.terms import terms_of
from bequest.server.asks.wish import JSON_ENCODINGS, StatesWish, one_of
from bequest.server.context import CONTEXT, Context
from bequest.server.states.hidden_states import NOTHING_SAMPLED, as_completion
from bequest.server.transport.intake import read_object
from bequest.server.transport.sending import send_body
from bequest.server.wire import fields
from bequest.server.wire.bodies import EmbeddingsBody
from bequest.server.wire.errors import invalid
from bequest.server.wire.names import new_id
from bequest.server.wire.reading import shorten

# The first is the default: a decoder's last token has seen all others, and of an encoder's each has.
_POOLINGS: dict[Stack, tuple[Pooling, ...]] = {"decoder": ("last", "mean"), "encoder": ("mean", "last")}
_FOREIGN_IDS = (
    " Token ids must be this model's own: send text instead (in LangChain: check_embedding_ctx_length=False)."
)


async def embeddings(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    body, ignored = fields.read(await read_object(http, context), EmbeddingsBody)
    answer_id = http[ANSWER_ID] = new_id("hs-")
    info, model = context.engine.info, context.served_name(body.model)
    encoding = one_of(body.encoding_format, JSON_ENCODINGS, "encoding_format")
    length = _length(body.dimensions, info.hidden_size)
    stack: Stack = "decoder" if info.encoder is None else "encoder"
    pooling = one_of(body.pooling, _POOLINGS[stack], "pooling")
    positions: Positions = "last" if pooling == "last" else "all"
    layers = (info.num_layers_of(stack),)
    wish = StatesWish(HiddenStatesParams(layers, positions, pooling, "float32", stack=stack), encoding)
    completion = as_completion(body)
    terms = replace(terms_of(context, http, completion, default_tokens=None), keep_record=False)
    prompts = await plain_prompts(context, completion, body.input, "input", _FOREIGN_IDS)
    requests = engine_requests(context, completion, answer_id, prompts, NOTHING_SAMPLED, terms, wish)
    async with extracted(context, requests) as results:
        vectors = await _vectors(context, [result.states for result in results], length, body.normalize is not False)
        tokens = sum(result.usage.prompt_tokens for result in results)
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": GAP} for i in range(len(vectors))],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        json = JsonBody(answer, vectors, encoding)
        headers = fields.ignored_header(ignored)
        return await send_body(http, json, is_small(vectors), "application/json", headers, context.encoder)


def _length(dimensions: int | None, hidden_size: int) -> int:
    if dimensions is None:
        return hidden_size
    if not 1 <= dimensions <= hidden_size:
        raise invalid(
            f"`dimensions` must be from 1 to {hidden_size}, what this model has, not {shorten(str(dimensions))}.",
            "dimensions",
        )
    return dimensions


async def _vectors(context: Context, answers: list[States], length: int, normalize: bool) -> list[Assembled]:
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
