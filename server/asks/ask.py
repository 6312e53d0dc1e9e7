"""`Ask`: what one HTTP request wants of the engine. Every endpoint makes one of its wire type, and an answer of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bequest.engine.errors import EngineError
from bequest.engine.types import OutputMode, Request, SamplingParams, Terms
from bequest.engine.types.image import without_images
from bequest.engine.types.speculation import Speculation
from bequest.server.asks.lengths import check_prompt_len
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.sampling import Sampling
from bequest.server.asks.terms import AskTerms
from bequest.server.asks.wish import StatesWish, check_states
from bequest.server.context import Context
from bequest.server.wire.bodies import SampledBody
from bequest.server.wire.errors import at_field, from_engine, invalid
from bequest.server.wire.names import part_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Prompts, how each is sampled, the terms, the states that are wished for. Complete when constructed."""

    id: str  # of the answer
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]  # one for each prompt
    terms: AskTerms
    states: StatesWish | None = None
    speculation: Speculation = Speculation()
    suffixes: tuple[tuple[int, ...], ...] = ()  # to be scored behind the prompt, which is then a single one
    output: OutputMode = OutputMode.DELTA
    requests: tuple[Request, ...] = field(init=False)  # one for each prompt

    def __post_init__(self) -> None:
        assert self.prompts, "at least one prompt"
        assert self.terms.record.retain is None or len(self.prompts) == 1, "a lease is of one prompt"
        assert not self.suffixes or len(self.prompts) == 1, "suffixes are of one prompt"
        pairs = enumerate(zip(self.prompts, self.params, strict=True))
        object.__setattr__(self, "requests", tuple(self._request(index, *pair) for index, pair in pairs))

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.params[0].n

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        """Named after the answer. The client's own name belongs to the first."""
        terms, record = self.terms, self.terms.record
        return Request(
            id=part_id(self.id, index),
            tenant=terms.tenant,
            prompt_token_ids=prompt.token_ids,
            params=params,
            priority=terms.priority,
            deadline=terms.deadline,
            cache_salt=terms.cache_salt or prompt.cache_salt,
            output=self.output,
            terms=Terms(
                lineage=prompt.lineage,
                name=record.name if index == 0 else None,
                keep_record=record.keep_record,
                retain=record.retain,
                origin=prompt.origin,
            ),
            encoder=prompt.encoder,
            images=prompt.images,
            adapter=prompt.adapter or terms.adapter,
            hidden_states=None if self.states is None else self.states.params,
            speculation=self.speculation,
            suffixes=self.suffixes,
        )


def ask_of(
    context: Context,
    answer_id: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    terms: AskTerms,
    states: StatesWish | None = None,
    output: OutputMode = OutputMode.DELTA,
) -> Ask:
    """Raises for what cannot be done with these prompts, or would not fit into an answer."""
    if terms.record.retain is not None and len(prompts) > 1:
        raise invalid("`retain` needs a single prompt: send each prompt in a request of its own.", "retain")
    params = tuple(params_of(context, prompt, sampling, terms) for prompt in prompts)
    encodes = states is not None and states.params.stack == "encoder" and params[0].max_tokens == 0
    if terms.record.retain is not None and encodes:
        raise invalid("`retain` is of the decoder, which does not run for the encoder's states alone.", "retain")
    ask = Ask(
        id=answer_id,
        prompts=tuple(prompts),
        params=params,
        terms=terms,
        states=states,
        speculation=sampling.speculation,
        output=output,
    )
    sampling.check_size(ask.requests)
    if states is not None:
        check_states(states, ask.requests, context.engine.info, context.states_budget)
    return ask


def check_stream_options(body: SampledBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` needs `stream: true`.", "stream_options")


def params_of(context: Context, prompt: Prompt, sampling: Sampling, terms: AskTerms) -> SamplingParams:
    """Behind one prompt, which must not be too long."""
    param = prompt.param or "prompt"
    try:
        check_prompt_len(len(prompt.token_ids), terms.max_prompt_tokens)
        params = sampling.params(prompt, context.engine.info)
    except EngineError as error:
        raise from_engine(error, param) from error
    start = 0 if prompt.lineage is None else prompt.lineage.at
    encoded = () if prompt.encoder is None else prompt.encoder.token_ids
    check_known(context, param, prompt.token_ids[start:], encoded)
    return params


def check_known(context: Context, param: str, *parts: Sequence[int]) -> None:
    """Tokens of a text that came in `param`: the engine looks as well, and cannot name the field. Most tokenizers know
    no more than their models do."""
    info = context.engine.info
    if context.text.tokenizer.token_string(info.vocab_size) is None:
        return
    try:
        info.check_tokens(*map(without_images, parts))
    except EngineError as error:
        raise at_field(error, param) from error
