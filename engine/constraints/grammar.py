"""Grammars: what a constrained answer may look like, compiled for one vocabulary by llguidance.

A `Grammar` is made once, in a worker thread, and shared by all that asked for the same; each sequence has a matcher of
its own, which the mask thread moves (engine/constraints/masks.py). The end token is part of the grammar: it may come
where the answer is complete, and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from bequest.engine._C import (
    GrammarMatcher,
    GrammarTokens,
    Matcher,
    MatcherLimits,
    StepAnswers,
    address,
    fill_ahead,
    fill_masks,
)
from bequest.engine.constraints.schemas import UnfollowedError, followed, reworded
from bequest.engine.kernels.flag import Flag
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import IntArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = [
    "UNSPELLABLE",
    "Grammar",
    "GrammarError",
    "GrammarKind",
    "GrammarMasks",
    "GrammarMatcher",
    "GrammarSource",
    "StepAnswers",
    "Vocabulary",
    "byte_tokens",
    "compile_source",
    "grammar_tokens",
    "is_stray",
    "lark_of_any",
    "mask_threads",
]

GrammarKind = Literal["json_schema", "regex", "lark", "any"]

# A line that only Lark has. Blanks are looked for within the line, so that a page of empty lines is read once.
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
# A step of a grammar takes microseconds. These stop one that would hold all the others up: about 10 ms for a mask.
_LIMITS = MatcherLimits(
    step_lexer_fuel=150_000, step_max_items=50_000, max_lexer_states=50_000, max_grammar_size=200_000
)
# A thread has to be woken, and then takes cores and memory from those that launch steps: for fewer rows it costs more
# time than it saves.
_ROWS_PER_THREAD = 64
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text: a JSON schema, a regular expression, or llguidance's dialect of Lark.

    "any" is what a client calls a grammar, Lark or BNF: it is made Lark where it is tried (grammar_check.py).
    """

    kind: GrammarKind
    text: str
    # Of a JSON schema: a pattern for the whitespace between its tokens; None: at most one space after "," and ":", so
    # that no answer can go on in blanks for ever.
    whitespace: str | None = None
    # What comes before an answer of this grammar: Lark with a rule `lead`, whose names begin with it. "": nothing.
    lead: str = ""

    @property
    def spelling(self) -> str:
        """All of its text."""
        return self.lead + self.text


class GrammarError(Exception):
    """A grammar that cannot be used; the message says why."""

    def __init__(self, message: str, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


class Vocabulary:
    """A model's tokens as llguidance wants them. `end_token_ids`: any of them may end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Takes a second, most of it without the interpreter lock."""
        if not tokenizer.spelling.exact:
            raise GrammarError("the tokens of this model's tokenizer have no exact bytes")
        if not end_token_ids:
            raise GrammarError("this model has no end token")
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids)
        special = {*tokenizer.special_ids, *end_token_ids}
        spelled = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        encode = _Encoder(tokenizer, vocab_size, frozenset(special))
        self.tokens = grammar_tokens(spelled, special, self.end_token_ids[0], encode)


def grammar_tokens(
    spelled: Sequence[bytes], special: Collection[int], end_token: int, encode: Callable[[str], list[int]]
) -> GrammarTokens:
    """`spelled`: of each token. `encode`: the tokens of a text, called from any thread."""
    marked = [
        b"\xff" + text if token in special and text[:1] != b"\xff" else text for token, text in enumerate(spelled)
    ]
    library = llguidance._lib.__file__
    assert library is not None
    return GrammarTokens(library, marked, end_token, encode)


def byte_tokens(size: int) -> GrammarTokens:
    """The smallest vocabulary, of bytes and an end token, or one of `size` tokens: the others stand for no text."""
    end = 256
    spelled = [*(bytes([byte]) for byte in range(end)), b"<end>", *[b""] * (size - end - 1)]
    return grammar_tokens(spelled, {end}, end, lambda text: list(text.encode()))


class _Encoder:
    """The tokens of a text that a grammar forces."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special = special

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)[0]

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Up to what cannot be spelled, and whether that is all: without special tokens, since a text that spells one
        is meant as text, and without those that the tokenizer knows and the model does not."""
        ids = self._tokenizer.encode_behind(text)
        if all(token < self._vocab_size and token not in self._special for token in ids):
            return ids, True
        if len(text) < 2:
            return [], False
        middle = len(text) // 2
        left, whole = self._encode(text[:middle])
        if not whole:
            return left, False
        right, whole = self._encode(text[middle:])
        return left + right, whole


class Grammar:
    """A compiled grammar. Immutable; matchers are copies of its beginning."""

    def __init__(self, source: GrammarSource, vocabulary: Vocabulary) -> None:
        """Takes milliseconds to seconds, without the interpreter lock. Raises GrammarError."""
        self.source = source
        self.vocabulary = vocabulary
        self._start = compile_source(source, vocabulary.tokens)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.vocab_size

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start, self.vocabulary.end_token_ids)


def compile_source(source: GrammarSource, tokens: GrammarTokens) -> Matcher:
    """The beginning of a grammar. Raises GrammarError."""
    try:
        start = Matcher(tokens, _serialised(source), _LIMITS)
    except ValueError as error:
        raise _explained(str(error)) from None
    # The first masks too, up to where there is a choice: some limits are reached only there.
    trial = start.copy()
    trial.try_first_masks()
    if trial.is_error:
        raise _explained(trial.error)
    return start


def lark_of_any(text: str) -> str:
    """A grammar in Lark, or in the BNF that llama.cpp and others take, as Lark. Raises GrammarError.

    Takes a microsecond for each character: not for the event loop.
    """
    if _LARK.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter has several of its own
        raise GrammarError(_first_line(str(error)) or type(error).__name__) from None


class GrammarMasks:
    """Fills masks, many at a time. Belongs to the mask thread."""

    def __init__(self, most_threads: int) -> None:
        self._most_threads = most_threads

    def fill_step(
        self, answers: StepAnswers, matchers: Sequence[GrammarMatcher], masks: IntArray, flag: Flag | None = None
    ) -> bool:
        """`masks` [rows, words]: of each matcher, for its next token. Sets the flag before this thread waits for the
        interpreter; whether it has. It has not where a matcher failed, which the event loop must know before."""
        self._check(masks, len(matchers))
        told = None if flag is None else (flag.address, flag.value)
        failed = answers.fill(address(masks), masks.shape[1], self._threads_for(matchers), told)
        for row in failed:
            _fail(matchers[row])
        return flag is not None and not failed

    def fill(
        self, matchers: Sequence[GrammarMatcher], masks: IntArray, drafts: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        """`masks` [rows, words]: of each matcher, one for its next token and one behind each of its drafts."""
        rows = list(range(len(matchers)) if drafts is None else _first_rows(drafts))
        self._check(masks, rows[-1] + 1 if rows else 0)
        named = list(zip(matchers, rows, strict=True))
        failed = set(fill_masks(named, address(masks), masks.shape[1], self._threads_for(named)))
        for matcher, row in named:
            if row in failed:
                _fail(matcher)
        if drafts is not None:
            walks = [_Walk(*walk) for walk in zip(matchers, rows, drafts, strict=True) if walk[2]]
            self._fill_ahead(walks, masks)

    def _check(self, masks: IntArray, num_rows: int) -> None:
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and len(masks) >= num_rows

    def _fill_ahead(self, walks: Sequence[_Walk], masks: IntArray) -> None:
        """Behind drafts."""
        live = {}
        for matcher, row, drafts in walks:
            matcher.failed_ahead = None
            # Behind a token that cannot come, nothing counts. Who has ended is not listened to.
            masks[row + 1 : row + 1 + len(drafts)] = -1 if matcher.ended else 0
            if not matcher.done:
                live[row] = matcher, drafts
        drafted = [(matcher, row, drafts) for row, (matcher, drafts) in live.items()]
        for row, why in fill_ahead(drafted, address(masks), masks.shape[1], self._threads_for(drafted)):
            live[row][0].failed_ahead = _first_line(why)

    def _threads_for(self, rows: Sequence[object]) -> int:
        return max(1, min(-(-len(rows) // _ROWS_PER_THREAD), self._most_threads))


class _Walk(NamedTuple):
    matcher: GrammarMatcher
    row: int  # of its next token
    drafts: tuple[int, ...]


def _first_rows(drafts: Sequence[tuple[int, ...]]) -> list[int]:
    return list(accumulate((1 + len(drafted) for drafted in drafts[:-1]), initial=0)) if drafts else []


def _fail(matcher: GrammarMatcher) -> None:
    matcher.failed = _first_line(matcher.error)


def mask_threads() -> int:
    """How many make the masks of a step at most."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


def _serialised(source: GrammarSource) -> str:
    """As llguidance's JSON."""
    assert source.kind != "any", "it is made Lark first"
    if source.lead:
        return _lark_json(f"start: lead answer\n{source.lead}\nanswer: {_nested(source)}\n")
    if source.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return _lark_json(source.text)
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_schema(source)), overrides=_json_options(source))


def _schema(source: GrammarSource) -> Any:
    try:
        return followed(json.loads(source.text))
    except json.JSONDecodeError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    except UnfollowedError as error:
        raise GrammarError(str(error)) from None


def _lark_json(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json_options(source: GrammarSource) -> JsonCompileOptions:
    if source.whitespace is None:
        return {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    return {"whitespace_flexible": True, "whitespace_pattern": source.whitespace}


def _nested(source: GrammarSource) -> str:
    """A grammar as a part of another."""
    if source.kind == "lark":
        return f"%lark {{\n{source.text}\n}}"
    if source.kind == "regex":
        return f"/{_lark_regex(source.text)}/"
    schema = _schema(source)
    options = _json_options(source)
    return "%json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema)


def _lark_regex(pattern: str) -> str:
    """A regular expression between slashes: those in it are escaped, unless they are."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


# What llguidance says when no token continues what has been said.
_DEAD_END = "NoExtension"
UNSPELLABLE = "it wants text that no token of this model spells"
# What it says of a token that its own mask excludes: no limit, but a mask that was not the sampler's.
_STRAY = "doesn't satisfy the grammar"

# What it says when it has failed itself, behind which are places in its source.
_PANIC = re.compile(r"(?s).*\bpanic: .*")
# What llguidance says when a grammar is well-formed and runs into one of the limits.
_LIMIT_WORDS = ("fuel", "too many", "too large", "max is", "limit", "unable to determine if regex is empty")


def _explained(message: str) -> GrammarError:
    line = _PANIC.sub("what compiles grammars cannot read it", _first_line(message))
    return GrammarError(reworded(line), too_large=any(word in line.lower() for word in _LIMIT_WORDS))


def is_stray(why: str) -> bool:
    """Whether a matcher failed at a token that does not match, rather than at a limit."""
    return _STRAY in why


def _first_line(message: str) -> str:
    """Without the state of the parser, which no client can use."""
    if message.startswith(_DEAD_END):
        return UNSPELLABLE
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = lines[0].removeprefix("Parser Error: ").partition("; consider making your grammar")[0] if lines else ""
    # A regular expression's error is told over several lines, the reason in the last of them.
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return f"{first} {reason}".strip()[:500]
