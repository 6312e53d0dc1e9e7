"""How answers are sampled: what a body says of it, in range and complete but for what depends on each prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from bequest.engine.types import MAX_BEAM_WIDTH, BeamParams, ModelInfo, Request, SamplingParams
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.speculation import Speculation
from bequest.server.asks.beams import beam_params
from bequest.server.asks.encoder_prompts import rules_of
from bequest.server.asks.lengths import Length
from bequest.server.asks.prompt import Prompt
from bequest.server.asks.ranges import between, check_ids
from bequest.server.context import Context
from bequest.server.interfaces import TokenizerLike
from bequest.server.stores.catalogues import StoredCatalogue
from bequest.server.stores.grammars import NOT_HELD, Held
from bequest.server.wire.bodies import GenerationBody, SampledBody
from bequest.server.wire.errors import ApiError, invalid, unsupported
from bequest.server.wire.reading import shorten

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024  # of a bad word too
MAX_BAD_WORDS = 1024  # they are tokenised where others wait
MAX_ANSWER_BYTES = 2**30
_WORD_CHARS = 40  # that tokenising a short word, twice, takes as long as
_BYTES_PER_LOGPROB = 100  # as JSON, and as an object on its way there: about
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")  # spelled in one way: two biases of one token would be one too many
_SMALLEST_TOP_P = 1e-6  # top_p 0 keeps the most likely token alone
_SMALLEST_PENALTY = 1e-6  # a repetition_penalty below it says the same, and logits stay finite in float32


class Chosen(TypedDict):
    """The fields of SamplingParams that a body decides by itself."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    beams: BeamParams | None
    catalogue: Catalogue | None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of one HTTP request are sampled."""

    chosen: Chosen
    length: Length
    held: Held = NOT_HELD
    speculation: Speculation = Speculation()
    prompt_copies: int = 1  # choices of an answer in which the log-probabilities of their prompt are shown
    prompt_field: str = "logprobs"  # that asks for those

    def params(self, prompt: Prompt, info: ModelInfo) -> SamplingParams:
        """Behind a prompt."""
        chosen, length = self.chosen, self.length
        catalogue = chosen["catalogue"]
        self._check_asked()
        shortest = 1 if catalogue is None else catalogue.depth
        limit = length.within(len(prompt.token_ids), info.max_model_len, shortest)
        ends = not chosen["ignore_eos"] or catalogue is not None or self.held.grammar is not None
        rules = rules_of(info.encoder, prompt, ends=ends)
        grammar, field = self.held
        return SamplingParams(
            max_tokens=limit, min_tokens=length.least, grammar=grammar, grammar_field=field, rules=rules, **chosen
        )

    def _check_asked(self) -> None:
        """Where an answer must be something, it needs the tokens for it."""
        asked, name, catalogue = self.length.asked, self.length.field, self.chosen["catalogue"]
        if asked is None:
            return
        if self.chosen["beams"] is not None and asked == 0:
            raise invalid(f"`{name}` must be at least 1 with `use_beam_search`, not 0.", name)
        if catalogue is not None and asked < catalogue.depth:
            raise invalid(
                f"`{name}` is {asked}, but the catalogue has items of {catalogue.depth} tokens, and part of an item "
                "is none. Leave it out, or take at least as many.",
                name,
            )

    def check_size(self, requests: Sequence[Request]) -> None:
        """Refuses log-probabilities that would not fit into memory as JSON. A search holds those of all its beams."""
        sampled = prompts = 0
        for request in requests:
            params = request.params
            if params.logprobs is not None:
                choices = params.n if params.beams is None else params.beams.width
                sampled += choices * params.max_tokens * (1 + params.logprobs)
            if params.prompt_logprobs is not None:
                prompts += self.prompt_copies * len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
        check_answer_size(sampled + prompts, self.prompt_field if prompts > sampled else "logprobs")


def check_answer_size(num_logprobs: int, param: str) -> None:
    """`param` asks for most of them."""
    needed = num_logprobs * _BYTES_PER_LOGPROB
    if needed > MAX_ANSWER_BYTES:
        raise ApiError(
            400,
            "answer_too_large",
            f"The log-probabilities of this answer may take {needed} bytes, at most {MAX_ANSWER_BYTES}: ask for fewer "
            "of them, for fewer prompts, choices or beams, or set a smaller `max_tokens`.",
            param=param,
            details={"budget": MAX_ANSWER_BYTES, "needed": needed},
        )


NOTHING_CHOSEN = Chosen(
    n=1,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=None,
    logit_bias=(),
    allowed_token_ids=None,
    bad_words=(),
    stop=(),
    stop_token_ids=frozenset(),
    ignore_eos=False,
    include_stop_str_in_output=False,
    skip_special_tokens=True,
    logprobs=None,
    prompt_logprobs=None,
    beams=None,
    catalogue=None,
)
NOTHING_SAMPLED = Sampling(chosen=NOTHING_CHOSEN, length=Length(0))


def chosen_by(
    context: Context,
    body: SampledBody,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    catalogue: StoredCatalogue | None = None,
    shows_special: bool = False,
) -> Chosen:
    """`catalogue` is the body's, found; `shows_special`: special tokens have to be seen to be read."""
    info = context.engine.info
    beams = beam_params(body) if isinstance(body, GenerationBody) else None
    n = _choices(body, MAX_CHOICES if beams is None else MAX_BEAM_WIDTH) if isinstance(body, GenerationBody) else 1
    scale = _scale(body, info, samples=beams is None)
    # An item is shown as it is, whatever its tokens are.
    skip = catalogue is None if body.skip_special_tokens is None else body.skip_special_tokens
    return Chosen(
        n=n,
        **scale,
        seed=_seed(body.seed),
        logit_bias=_logit_bias(body.logit_bias, info.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, info.vocab_size),
        bad_words=_bad_words(body.bad_words, context.text.tokenizer, info.vocab_size),
        stop=_stop(body.stop, catalogue),
        stop_token_ids=_stop_ids(body.stop_token_ids or [], info.vocab_size, catalogue),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=skip and not shows_special,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        beams=beams,
        catalogue=None if catalogue is None else catalogue.tree,
    )


def sampling_chars(body: SampledBody) -> int:
    """Characters of a text that takes as long to tokenise as `chosen_by` takes."""
    words = body.bad_words or ()
    return 2 * sum(map(len, words)) + _WORD_CHARS * len(words)


class _Scale(TypedDict):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


def _scale(body: SampledBody, info: ModelInfo, samples: bool) -> _Scale:
    """How much is left to chance. The model's own defaults are for those who sample."""
    defaults = info.default_sampling if samples else {}
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
    return _Scale(
        temperature=temperature,
        top_p=max(top_p, _SMALLEST_TOP_P),
        top_k=min(max(top_k, 0), info.vocab_size),
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=max(repetition, _SMALLEST_PENALTY),
    )


def default_tokens(catalogue: StoredCatalogue | None, endpoints: int | None) -> int | None:
    """The endpoint's max_tokens for a body that has none; an item of a catalogue, and its end, are as long as they
    are."""
    return endpoints if catalogue is None else catalogue.tree.depth + 1


def check_logprobs(count: int | None, name: str) -> int | None:
    """Alternatives per token, asked for in the field `name`."""
    if count is not None:
        between(name, count, 0, MAX_LOGPROBS)
    return count


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
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
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
    """Each word as it is tokenised behind other text and after a space: most vocabularies hold both. One with
    a token that the model does not have cannot come."""
    sequences: dict[tuple[int, ...], None] = {}
    if words is not None and len(words) > MAX_BAD_WORDS:
        raise invalid(f"`bad_words` may hold {MAX_BAD_WORDS} words at most, not {len(words)}.", "bad_words")
    for index, word in enumerate(words or []):
        if not word.strip() or len(word) > MAX_STOP_CHARS:
            fault = "be empty" if not word.strip() else f"have more than {MAX_STOP_CHARS} characters"
            raise invalid(f"`bad_words[{index}]` must not {fault}.", f"bad_words[{index}]")
        for variant in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode_behind(variant))
            if ids and max(ids) < vocab_size:
                sequences[ids] = None
    return tuple(sequences)
