"""From typed body to engine requests."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine.errors import EngineError
from bequest.engine.types import Request, SamplingParams
from bequest.server.asks import sampling
from bequest.server.asks.encoder_prompts import with_rules
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.terms import Terms
from bequest.server.asks.wish import StatesWish, check_states
from bequest.server.context import Context
from bequest.server.wire.bodies import GenerationBody
from bequest.server.wire.errors import from_engine, invalid
from bequest.server.wire.names import part_id


def engine_requests(
    context: Context,
    body: GenerationBody,
    answer_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    terms: Terms,
    wish: StatesWish | None = None,
) -> list[Request]:
    """One engine request per prompt, named after the answer. The client's own name belongs to the first."""
    if terms.retain is not None and len(prompts) > 1:
        raise invalid("`retain` needs a single prompt: send each prompt in a request of its own.", "retain")
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            sampling.check_prompt_len(len(prompt.token_ids), terms.max_prompt_tokens)
            fitted = sampling.with_room(params, body, len(prompt.token_ids), context.engine.info, terms.default_tokens)
        except EngineError as error:
            raise from_engine(error, prompt.param) from error
        if terms.retain is not None and wish is not None and wish.params.stack == "encoder" and fitted.max_tokens == 0:
            raise invalid("`retain` is of the decoder, which does not run for the encoder's states alone.", "retain")
        continues = prompt.lineage is not None and prompt.lineage.at > 0
        fitted = with_rules(fitted, context.engine.info.encoder, len(prompt.token_ids), continues)
        requests.append(
            Request(
                id=part_id(answer_id, index),
                tenant=terms.tenant,
                prompt_token_ids=prompt.token_ids,
                params=fitted,
                priority=terms.priority,
                deadline=terms.deadline,
                cache_salt=terms.cache_salt or prompt.cache_salt,
                name=terms.name if index == 0 else None,
                lineage=prompt.lineage,
                retain=terms.retain,
                keep_record=terms.keep_record,
                origin=prompt.origin,
                encoder=prompt.encoder,
                hidden_states=None if wish is None else wish.params,
            )
        )
    sampling.check_answer_size(body, requests)
    if wish is not None:
        check_states(wish, requests, context.engine.info, context.states_budget)
    return requests


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` needs `stream: true`.", "stream_options")
