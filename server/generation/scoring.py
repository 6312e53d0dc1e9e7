"""`continuation_suffixes`: how likely each of several texts is behind one prompt, or behind a parent.

Nothing is sampled. The answer has a choice for each suffix, with its tokens, their log-probabilities and the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bequest.engine.errors import context_exceeded
from bequest.engine.types import ChoiceDelta, OutputMode
from bequest.server.answers.chunks import Chunks
from bequest.server.answers.logprobs import Offsets, Spelling, completion_logprobs, finite_sum
from bequest.server.answers.report import Report
from bequest.server.answers.running import Collector
from bequest.server.asks.ask import Ask, check_known, check_stream_options, params_of
from bequest.server.asks.call import Call
from bequest.server.asks.constraints import constraint_of
from bequest.server.asks.continued import text_prompts
from bequest.server.asks.inheriting import text_inheriting
from bequest.server.asks.lengths import Length, generation_length
from bequest.server.asks.prompt import Prompt, Truncation
from bequest.server.asks.prompts import TextSource, check_length, encode_behind
from bequest.server.asks.ranges import check_ids
from bequest.server.asks.sampling import Sampling, check_answer_size, check_logprobs, chosen_by, sampling_chars
from bequest.server.asks.terms import AskTerms, record_terms
from bequest.server.context import Context
from bequest.server.transport.work import apart, off_loop
from bequest.server.wire.bodies import CompletionBody
from bequest.server.wire.errors import from_engine, invalid, missing, unsupported

MAX_SUFFIXES = 1024
Suffixes = tuple[tuple[int, ...], ...]
_FIELD = "continuation_suffixes"
# What asks for something that scores have not, and the values that ask for nothing.
_NOT_WITH_SCORES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "use_beam_search": (False,),
    "catalogue": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "continuation_suffix": ("",),
    "continuation_token_ids": ([],),
}


async def score_ask(call: Call[CompletionBody], given: list[str | list[int]]) -> Ask:
    """`given` are the suffixes as the client sends them."""
    context, body = call.context, call.body
    check_stream_options(body)
    length = await apart(context, lambda: _check(body, given))
    logprobs = check_logprobs(body.logprobs, "logprobs") or 0
    chosen = await off_loop(context, sampling_chars(body), lambda: chosen_by(context, body, logprobs=logprobs))
    sampling = Sampling(chosen=chosen, length=length)
    terms = record_terms(call, open_ended=False)
    context.engine.check_room(terms.tenant)
    prompt = await _prompt(call, terms)
    suffixes = await _tokens(context, given, prompt.token_ids[-1])
    _check_room(context, prompt, suffixes)
    check_answer_size(sum(map(len, suffixes)) * (1 + logprobs), _FIELD)
    params = params_of(context, prompt, sampling, terms)
    return Ask(id=call.id, prompts=(prompt,), params=(params,), terms=terms, suffixes=suffixes, output=OutputMode.FINAL)


def _check(body: CompletionBody, given: list[str | list[int]]) -> Length:
    """Whether the other fields agree with it."""
    if not 1 <= len(given) <= MAX_SUFFIXES:
        raise invalid(f"`{_FIELD}` must hold 1 to {MAX_SUFFIXES} suffixes, not {len(given)}.", _FIELD)
    for name, idle in _NOT_WITH_SCORES.items():
        value = getattr(body, name)
        if value is not None and value not in idle:
            raise unsupported(name, f"`{name}` cannot be used with `{_FIELD}`, which are scored. Leave it out.")
    for name in ("prompt", "prompt_embeds"):
        if getattr(body, name) and body.continuation_of is not None:
            raise invalid(f"`{name}` and `{_FIELD}` both say what follows the parent: send one of them.", name)
    if (constraint := constraint_of(body)) is not None:
        raise unsupported(
            constraint.param, f"`{constraint.param}` cannot be used with `{_FIELD}`: nothing is generated."
        )
    length = generation_length(body, None)
    if length.asked is None:
        raise missing(
            "max_tokens", f"`max_tokens` is missing: send 0 with `{_FIELD}`, which are scored, not continued."
        )
    if length.asked != 0:
        raise invalid(
            f"`{length.field}` must be 0 with `{_FIELD}`, not {length.asked}: suffixes are scored, and nothing is "
            "generated behind them.",
            length.field,
        )
    return length


async def _prompt(call: Call[CompletionBody], terms: AskTerms) -> Prompt:
    body = call.body
    truncation = Truncation(body.truncate_prompt_tokens, side=body.truncation_side)
    source = TextSource(
        given=body.prompt, special=body.add_special_tokens, truncation=truncation, embeds=body.prompt_embeds
    )
    wanted = text_inheriting(body, source)
    prompts = await text_prompts(call.context, terms, source, wanted, body.continuation_fallback)
    if len(prompts) > 1:
        raise invalid(f"`prompt` must be a single one with `{_FIELD}`: send each in a request of its own.", "prompt")
    return prompts[0]


async def _tokens(context: Context, given: list[str | list[int]], last: int) -> Suffixes:
    """Texts are tokenised alone, without BOS or EOS, and all at once, as what goes on behind the token `last`."""
    await apart(context, lambda: _check_suffixes(context, given))
    texts = iter(await encode_behind(context, [one for one in given if isinstance(one, str)], last))
    suffixes = tuple(tuple(next(texts) if isinstance(one, str) else one) for one in given)
    for index, ids in enumerate(suffixes):
        param = f"{_FIELD}[{index}]"
        check_known(context, param, ids)
        if not ids:
            raise invalid(f"`{param}` is empty: there is no token to score.", param)
    return suffixes


def _check_suffixes(context: Context, given: list[str | list[int]]) -> None:
    for index, suffix in enumerate(given):
        param = f"{_FIELD}[{index}]"
        if isinstance(suffix, str):
            check_length(context, suffix, param)
        else:
            check_ids(suffix, context.engine.info.vocab_size, param)


def _check_room(context: Context, prompt: Prompt, suffixes: Suffixes) -> None:
    limit, longest = context.engine.info.max_model_len, max(map(len, suffixes))
    if len(prompt.token_ids) + longest > limit:
        raise from_engine(context_exceeded(len(prompt.token_ids), longest, limit), _FIELD)


class ScoreShape:
    """A choice for each suffix."""

    thought_tokens = None  # no chat, no thoughts

    def __init__(self, call: Call[CompletionBody]) -> None:
        self._body = call.body
        self._tokenizer = call.context.text.tokenizer
        self._spelling = Spelling(self._tokenizer, call.body.return_tokens_as_token_ids)

    def chunks(self, head: dict[str, Any], index: int, report: Report) -> Chunks:
        raise AssertionError("scores are not streamed")

    def choices(self, results: Sequence[Collector]) -> list[dict[str, Any]]:
        return [self._choice(choice) for _, choice in sorted(results[0].choices.items())]

    def extras(self, results: Sequence[Collector]) -> dict[str, Any]:
        return {}

    def _choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        assert choice.logprobs is not None and choice.cumulative_logprob is not None
        offsets = Offsets(self._tokenizer, self._body.skip_special_tokens is False).of_answer(choice.token_ids)
        top = self._body.logprobs or 0
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": completion_logprobs(choice.logprobs, choice.token_ids, offsets, top, self._spelling),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "cumulative_logprob": finite_sum(choice.cumulative_logprob),
            "token_ids": choice.token_ids,
        }
