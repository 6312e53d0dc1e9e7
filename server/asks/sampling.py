"""Body → SamplingParams: ranges, defaults and the room that the context window leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from bequest.engine.errors import ContextLengthExceeded
from bequest.engine.types import MAX_BEAM_WIDTH, ModelInfo, Request, SamplingParams
from bequest.server.asks.beams import beam_params
from bequest.server.interfaces import TokenizerLike
from bequest.server.stores.catalogues import StoredCatalogue
from bequest.server.wire.bodies import ChatBody, CompletionBody, GenerationBody
from bequest.server.wire.errors import ApiError, invalid, unsupported
from bequest.server.wire.reading import shorten

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024  # of a bad word too
MAX_BAD_WORDS = 1024  # they are tokenised where others wait
MAX_ANSWER_BYTES = 2**30
MAX_TIMEOUT = 7 * 86400.0
COMPLETION_DEFAULT_TOKENS = 16
_BYTES_PER_LOGPROB = 100  # as JSON, and as an object on its way there: about
_MOST_TOKENS = 2**31  # far beyond any window; larger numbers need not be told apart
_SMALLEST_TOP_P = 1e-6  # top_p 0 keeps the most likely token alone
_SMALLEST_PENALTY = 1e-6  # a repetition_penalty below it says the same, and logits stay finite in float32


def sampling_params(
    body: CompletionBody | ChatBody,
    info: ModelInfo,
    tokenizer: TokenizerLike,
    catalogue: StoredCatalogue | None = None,
) -> SamplingParams:
    """Everything but max_tokens, which depends on each prompt: see `with_room`. `catalogue` is the body's, found."""
    beams = beam_params(body)
    defaults = info.default_sampling if beams is None else {}  # a search does not sample
    temperature = _default(body.temperature, defaults.get("temperature"), 1.0)
    top_p = _default(body.top_p, defaults.get("top_p"), 1.0)
    top_k = int(_default(body.top_k, defaults.get("top_k"), 0))
    min_p = _default(body.min_p, defaults.get("min_p"), 0.0)
    repetition = _default(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0)
    presence = _default(body.presence_penalty, None, 0.0)
    frequency = _default(body.frequency_penalty, None, 0.0)
    between("temperature", temperature, 0, 2)
    between("top_p", top_p, 0, 1)
    between("min_p", min_p, 0, 1)
    between("presence_penalty", presence, -2, 2)
    between("frequency_penalty", frequency, -2, 2)
    if not 0 < repetition <= 10:
        raise invalid(
            f"`repetition_penalty` must be above 0 and at most 10, not {repetition:g}; 1 is neutral.",
            "repetition_penalty",
        )
    if top_k < -1:
        raise invalid(f"`top_k` must be at least 1, or 0 or -1 for all tokens, not {top_k}.", "top_k")
    return SamplingParams(
        max_tokens=0,
        n=_choices(body, MAX_CHOICES if beams is None else MAX_BEAM_WIDTH),
        temperature=temperature,
        top_p=max(top_p, _SMALLEST_TOP_P),
        top_k=min(max(top_k, 0), info.vocab_size),
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=max(repetition, _SMALLEST_PENALTY),
        seed=_seed(body.seed),
        logit_bias=_logit_bias(body.logit_bias, info.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, info.vocab_size),
        bad_words=_bad_words(body.bad_words, tokenizer, info.vocab_size),
        stop=_stop(body.stop, catalogue),
        stop_token_ids=_stop_ids(body.stop_token_ids or [], info.vocab_size, catalogue),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        # An item is shown as it is, whatever its tokens are.
        skip_special_tokens=catalogue is None if body.skip_special_tokens is None else body.skip_special_tokens,
        logprobs=_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
        beams=beams,
        catalogue=None if catalogue is None else catalogue.tree,
    )


def default_tokens(params: SamplingParams, endpoints: int | None) -> int | None:
    """The endpoint's max_tokens for a body that has none; an item of a catalogue, and its end, are as long as they
    are."""
    return endpoints if params.catalogue is None else params.catalogue.depth + 1


def with_room(
    params: SamplingParams, body: GenerationBody, prompt_len: int, info: ModelInfo, default_tokens: int | None
) -> SamplingParams:
    """The parameters with max_tokens: as asked for, or `default_tokens` (None: all the room there is)."""
    room = info.max_model_len - prompt_len
    asked = max_tokens(body)
    if asked is not None:
        _check_asked(params, asked, _max_tokens_field(body))
    if asked is None:
        needed = 1 if params.catalogue is None else params.catalogue.depth
        limit = room if default_tokens is None else min(default_tokens, room)
    else:
        needed = limit = asked
    if needed > room:
        raise context_exceeded(info.max_model_len, prompt_len, needed)
    least = body.min_tokens or 0
    if not 0 <= least <= limit:
        raise invalid(f"`min_tokens` must be from 0 to `max_tokens` ({limit}), not {least}.", "min_tokens")
    return dataclasses.replace(params, max_tokens=limit, min_tokens=least)


def max_tokens(body: GenerationBody) -> int | None:
    """What the client asked for."""
    name = _max_tokens_field(body)
    asked: int | None = getattr(body, name)
    if asked is not None and asked < 0:
        raise invalid(f"`{name}` must be at least 0, not {asked}; leave it out for the default.", name)
    return None if asked is None else min(asked, _MOST_TOKENS)


def _max_tokens_field(body: GenerationBody) -> str:
    """The younger name wins."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _check_asked(params: SamplingParams, asked: int, name: str) -> None:
    """Where an answer must be something, it needs the tokens for it."""
    if params.beams is not None and asked == 0:
        raise invalid(f"`{name}` must be at least 1 with `use_beam_search`, not 0.", name)
    if params.catalogue is not None and asked < params.catalogue.depth:
        raise invalid(
            f"`{name}` is {asked}, but the catalogue has items of {params.catalogue.depth} tokens, and part of an item "
            "is none. Leave it out, or take at least as many.",
            name,
        )


def check_answer_size(body: GenerationBody, requests: Iterable[Request]) -> None:
    """Refuses log-probabilities that would not fit into memory as JSON. A search holds those of all its beams; those of
    a prompt stand in each choice of a completion, and once in a chat."""
    sampled = prompts = 0
    for request in requests:
        params = request.params
        if params.logprobs is not None:
            choices = params.n if params.beams is None else params.beams.width
            sampled += choices * params.max_tokens * (1 + params.logprobs) * _BYTES_PER_LOGPROB
        if params.prompt_logprobs is not None:
            copies = params.n if isinstance(body, CompletionBody) else 1
            prompts += copies * len(request.prompt_token_ids) * (1 + params.prompt_logprobs) * _BYTES_PER_LOGPROB
    needed = sampled + prompts
    if needed > MAX_ANSWER_BYTES:
        raise ApiError(
            400,
            "answer_too_large",
            f"The log-probabilities of this answer may take {needed} bytes, at most {MAX_ANSWER_BYTES}: ask for fewer "
            "of them, for fewer prompts, choices or beams, or set a smaller `max_tokens`.",
            param="prompt_logprobs" if prompts > sampled and body.prompt_logprobs is not None else "logprobs",
            details={"budget": MAX_ANSWER_BYTES, "needed": needed},
        )


def context_exceeded(max_model_len: int, prompt_len: int, completion: int) -> ContextLengthExceeded:
    """Clients know this error by both halves of its sentence."""
    return ContextLengthExceeded(
        "The prompt is too long.",
        reason="context_length",
        details={"max_model_len": max_model_len, "prompt_tokens": prompt_len, "max_tokens": completion},
        total=prompt_len + completion,
    )


def check_ids(ids: Sequence[int], vocab_size: int, param: str, hint: str = "") -> Sequence[int]:
    """The ids, if all are in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise invalid(
            f"`{param}[{index}]` is {shorten(str(wrong))}, which is not a token id of this model (0 to "
            f"{vocab_size - 1}).{hint}",
            f"{param}[{index}]",
        )
    return ids


def between(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise invalid(f"`{param}` must be between {low:g} and {high:g}, not {value:g}.", param)


def timeout_seconds(value: float | None, keys: float | None) -> float | None:
    """What a request asks for, or its key's own: the most that the key may have."""
    most = MAX_TIMEOUT if keys is None else keys
    if value is not None and not 0 < value <= most:
        where = "" if keys is None else " with this key"
        raise invalid(f"`timeout` must be above 0 and at most {most:g} seconds{where}, not {value:g}.", "timeout")
    return keys if value is None else value


def check_prompt_len(prompt_len: int, keys: int | None) -> None:
    """The key's own limit, told as the model's is."""
    if keys is not None and prompt_len > keys:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {keys} prompt tokens with this key; the prompt is too long: "
            f"{prompt_len} tokens.",
            details={"max_prompt_tokens": keys, "prompt_tokens": prompt_len},
        )


def priority(value: int | None, least: int) -> int:
    """`least` is what the key may claim; who claims nothing gets the default, or that if it comes later."""
    number = max(0, least) if value is None else value
    if not least <= number < 2**31:
        raise invalid(
            f"`priority` must be at least {least} for this key and below {2**31}, not {shorten(str(number))}; "
            "lower is earlier.",
            "priority",
        )
    return number


def _default(asked: float | None, models: float | None, ours: float) -> float:
    if asked is not None:
        return asked
    return ours if models is None else models


def _choices(body: GenerationBody, most: int) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= most:
        raise invalid(f"`n` must be between 1 and {most}, not {shorten(str(n))}.", "n")
    return n


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise invalid("`seed` must fit 64 bits.", "seed")
    return None if seed is None else seed % 2**64


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        name, count = "logprobs", body.logprobs
    else:
        name, count = "top_logprobs", body.top_logprobs
        if count and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
        count = (count or 0) if body.logprobs else None
    if count is not None:
        between(name, count, 0, MAX_LOGPROBS)
    return count


def _prompt_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """`echo` with `logprobs` shows the prompt's log-probabilities too."""
    if body.prompt_logprobs is not None:
        between("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    counts = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(counts, default=None)


def _stop(stop: str | list[str] | None, catalogue: StoredCatalogue | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if strings and catalogue is not None:
        raise unsupported("stop", "`stop` cannot be used with `catalogue`: an answer ends with its item. Leave it out.")
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"`stop` may hold {MAX_STOP_STRINGS} strings at most, not {len(strings)}.", "stop")
    for index, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise invalid(f"`{param}` must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}.", param)
    return tuple(strings)


def _stop_ids(ids: list[int], vocab_size: int, catalogue: StoredCatalogue | None) -> frozenset[int]:
    for index, token in enumerate(check_ids(ids, vocab_size, "stop_token_ids")):
        if catalogue is not None and catalogue.has_token(token):
            raise invalid(
                f"`stop_token_ids[{index}]` is {token}, part of items of the catalogue, which it would cut off.",
                f"stop_token_ids[{index}]",
            )
    return frozenset(ids)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (bias or {}).items():
        param = f"logit_bias.{shorten(key)}"
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise invalid(
                f"`logit_bias` has the key {shorten(repr(key))}, which is not a token id of this model "
                f"(0 to {vocab_size - 1}, as a string).",
                param,
            )
        between(param, value, -100, 100)
        pairs.append((int(key), value))
    return tuple(pairs)


def _allowed(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise invalid("`allowed_token_ids` must not be empty: nothing could be sampled.", "allowed_token_ids")
    return tuple(check_ids(ids, vocab_size, "allowed_token_ids"))


def _bad_words(words: list[str] | None, tokenizer: TokenizerLike, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the beginning of a text and after a space: most vocabularies hold both. One with
    a token that the model does not have cannot come."""
    sequences: dict[tuple[int, ...], None] = {}
    if words is not None and len(words) > MAX_BAD_WORDS:
        raise invalid(f"`bad_words` may hold {MAX_BAD_WORDS} words at most, not {len(words)}.", "bad_words")
    for index, word in enumerate(words or []):
        if not word.strip() or len(word) > MAX_STOP_CHARS:
            fault = "be empty" if not word.strip() else f"have more than {MAX_STOP_CHARS} characters"
            raise invalid(f"`bad_words[{index}]` must not {fault}.", f"bad_words[{index}]")
        for variant in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(variant, add_special_tokens=False))
            if ids and max(ids) < vocab_size:
                sequences[ids] = None
    return tuple(sequences)
