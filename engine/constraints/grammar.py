"""Grammars: what a constrained answer may look like, compiled for one vocabulary by llguidance.

A `Grammar` is made once, in a worker thread, and shared by all that asked for the same; each sequence has a matcher of
its own, which the mask thread moves (engine/constraints/masks.py). The end token is part of the grammar: it may come
where the answer is complete, and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import (
    consume_token_par,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import IntArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

GrammarKind = Literal["json_schema", "regex", "lark", "any"]

# A line that only Lark has. Blanks are looked for within the line, so that a page of empty lines is read once.
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
# A step of a grammar takes microseconds. These stop one that would hold all the others up: about 10 ms for a mask.
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=150_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# A thread has to be woken, and then takes cores and memory from those that launch steps: for fewer rows it costs more
# time than it saves. More threads wait for each other longer than they work.
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
        if not tokenizer.spelling.exact:
            raise GrammarError("the tokens of this model's tokenizer have no exact bytes")
        if not end_token_ids:
            raise GrammarError("this model has no end token")
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids)
        self._face = _Face(tokenizer, vocab_size, end_token_ids)
        self._special_texts = [
            self._face.tokens[token].decode("utf-8", "replace") for token in self._face.special_token_ids
        ]
        self._careful: llguidance.LLTokenizer | None = None
        self._quick = _native(tokenizer, self._face)

    def handle_for(self, source: GrammarSource) -> llguidance.LLTokenizer:
        """The one that tokenises by itself, without the interpreter lock; but it takes the spelling of a special token
        for that token, so that a grammar with one in it needs ours."""
        if self._quick is not None and not any(text and text in source.spelling for text in self._special_texts):
            return self._quick
        if self._careful is None:
            self._careful = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._face))
        return self._careful


class _Face:
    """What llguidance.TokenizerWrapper asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special = {*tokenizer.special_ids, *end_token_ids}
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text only")
        return self._encode(text)[0]

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Up to what cannot be spelled, and whether that is all: without special tokens, since a text that spells one
        is meant as text, and without those that the tokenizer knows and the model does not."""
        ids = self._tokenizer.encode_behind(text)
        if all(token < len(self.tokens) and token not in self._special for token in ids):
            return ids, True
        if len(text) < 2:
            return [], False
        middle = len(text) // 2
        left, whole = self._encode(text[:middle])
        if not whole:
            return left, False
        right, whole = self._encode(text[middle:])
        return left + right, whole


def _native(tokenizer: Tokenizer, face: _Face) -> llguidance.LLTokenizer | None:
    """llguidance's own reading of the tokenizer; None if it is not the same as ours in every token."""
    if tokenizer.vocab_size > len(face.tokens):
        return None  # it would use those that the model does not have
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write(tokenizer.backend.to_str())
            file.flush()
            native = llguidance.LLTokenizer(file.name, n_vocab=len(face.tokens), eos_token=face.eos_token_id)
    except Exception:  # of a kind that it does not know
        return None
    special = frozenset(face.special_token_ids)
    for token, spelled in enumerate(face.tokens):
        # Those without a spelling too: many a model has more rows than its tokenizer has tokens.
        if token in special or not spelled:
            if not native.is_special_token(token):
                return None
        # A byte 0xFF is how it marks special tokens.
        elif spelled[:1] != b"\xff" and native.decode_bytes([token]) != spelled:
            return None
    return native if native.vocab_size == len(face.tokens) else None


class Grammar:
    """A compiled grammar. Immutable; matchers are copies of its beginning."""

    def __init__(self, source: GrammarSource, vocabulary: Vocabulary) -> None:
        """Takes milliseconds to seconds, without the interpreter lock. Raises GrammarError."""
        self.source = source
        self.vocabulary = vocabulary
        self._start = compile_source(source, vocabulary.handle_for(source))

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.vocab_size

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self.vocabulary.end_token_ids)


def compile_source(source: GrammarSource, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """The beginning of a grammar. Raises GrammarError."""
    try:
        start = llguidance.LLMatcher(vocabulary, _serialised(source), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise _explained(str(error)) from None
    # The first masks too, up to where there is a choice: some limits are reached only there.
    trial = start.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
        trial.consume_tokens(trial.compute_ff_tokens())
        if not trial.is_stopped():
            trial.compute_bitmask()
    if trial.is_error():
        raise _explained(trial.get_error())
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


class GrammarMatcher:
    """One sequence's. The event loop counts what is sampled for it; the rest is the mask thread's."""

    __slots__ = ("_num_sampled", "end_token_ids", "ended", "failed", "failed_ahead", "handle", "num_seen")

    def __init__(self, handle: llguidance.LLMatcher, end_token_ids: tuple[int, ...]) -> None:
        self.handle = handle
        self.end_token_ids = end_token_ids
        self._num_sampled = 0
        self.num_seen = 0  # of those steps, by the mask thread
        self.ended = False  # nobody looks at what is sampled from now on
        self.failed: str | None = None  # why it cannot go on: a limit that its grammar ran into, or a stray token
        self.failed_ahead: str | None = None  # the same behind the drafts of the last step, if these are right

    @property
    def why_nothing(self) -> str | None:
        return self.failed or self.failed_ahead

    @property
    def done(self) -> bool:
        return self.ended or self.failed is not None

    def count_sampling(self) -> int:
        """A step is launched that samples for it; how many did before."""
        self._num_sampled += 1
        return self._num_sampled - 1


class GrammarMasks:
    """Moves matchers and fills masks, many at a time. Belongs to the mask thread."""

    def __init__(self, most_threads: int) -> None:
        self._most_threads = most_threads
        self._threads: dict[int, llguidance.LLExecutor] = {}  # by their number

    def advance(self, sampled: Sequence[tuple[GrammarMatcher, Sequence[int | None]]]) -> None:
        """By the tokens of a step; None: nothing could be sampled."""
        moves = []
        for matcher, tokens in sampled:
            matcher.num_seen += 1
            said = _before_end(matcher, tokens)
            if matcher.failed is not None or not said:
                continue
            if len(said) > 1:  # drafts were right
                matcher.handle.consume_tokens(said[:-1])
            moves.append((matcher.handle, said[-1]))
        if moves:
            # One call: each hands the interpreter over, and has to get it back.
            consume_token_par(self._threads_for(moves), moves)

    def fill(
        self, matchers: Sequence[GrammarMatcher], masks: IntArray, drafts: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        """`masks` [rows, words]: of each matcher, one for its next token and one behind each of its drafts."""
        rows = range(len(matchers)) if drafts is None else _first_rows(drafts)
        live = [(matcher.handle, row) for row, matcher in zip(rows, matchers, strict=True) if not matcher.done]
        if live:
            fill_next_token_bitmask_par(self._threads_for(live), live, masks)
        # The device may be waiting: of a row that is as usual nothing more is asked than this.
        for row, matcher in zip(rows, matchers, strict=True):
            if matcher.ended or matcher.failed is not None or matcher.handle.is_error():
                _fill_idle(matcher, masks[row])
        if drafts is not None:
            walks = [_Walk(*walk) for walk in zip(matchers, rows, drafts, strict=True) if walk[2]]
            self._fill_ahead(walks, masks)
        if matchers:
            _allow_every_end(masks.view(np.uint32), matchers[0].end_token_ids)

    def _fill_ahead(self, walks: Sequence[_Walk], masks: IntArray) -> None:
        """Behind drafts. A copy walks: one that runs into a limit stays there, and the draft may be wrong."""
        copies = []
        for matcher, row, drafts in walks:
            matcher.failed_ahead = None
            # Behind a token that cannot come, nothing counts. Who has ended is not listened to.
            masks[row + 1 : row + 1 + len(drafts)] = -1 if matcher.ended else 0
            if not matcher.done:
                copies.append((matcher.handle.deep_copy(), row, [*drafts]))
        if copies:
            fill_next_token_bitmask_par_with_draft_tokens(self._threads_for(copies), copies, masks)
        failed = {row for copy, row, _ in copies if copy.is_error()}
        for walk in walks:
            if walk.row in failed:
                _walk_to_the_limit(walk, masks)

    def _threads_for(self, rows: Sequence[object]) -> llguidance.LLExecutor:
        number = min(-(-len(rows) // _ROWS_PER_THREAD), self._most_threads)
        threads = self._threads.get(number)
        if threads is None:
            threads = self._threads[number] = llguidance.LLExecutor(number)
        return threads


class _Walk(NamedTuple):
    matcher: GrammarMatcher
    row: int  # of its next token
    drafts: tuple[int, ...]


def _first_rows(drafts: Sequence[tuple[int, ...]]) -> list[int]:
    return list(accumulate((1 + len(drafted) for drafted in drafts[:-1]), initial=0)) if drafts else []


def _before_end(matcher: GrammarMatcher, tokens: Sequence[int | None]) -> list[int]:
    """Those that move it. Behind an end, or where nothing could be sampled, it has ended."""
    said: list[int] = []
    for token in tokens:
        if matcher.ended:
            break
        if token is None or token in matcher.end_token_ids:
            matcher.ended = True
        else:
            said.append(token)
    return said


def _walk_to_the_limit(walk: _Walk, masks: IntArray) -> None:
    """Of a walk that ran into one: where it does, nothing may come."""
    copy = walk.matcher.handle.deep_copy()
    for row, token in enumerate(walk.drafts, walk.row + 1):
        if copy.try_consume_tokens([token]) == 1:
            fill_next_token_bitmask(copy, masks, row)
        if copy.is_error():
            masks[row : walk.row + 1 + len(walk.drafts)] = 0
            walk.matcher.failed_ahead = _first_line(copy.get_error())
            return


def _allow_every_end(masks: npt.NDArray[np.uint32], end_token_ids: tuple[int, ...]) -> None:
    """llguidance knows of one end token of the vocabulary: where that may come, the others may."""
    first, *others = end_token_ids
    if others:
        may_end = masks[:, first // 32] >> (first % 32) & 1  # [rows]
        for token in others:
            masks[:, token // 32] |= may_end << (token % 32)


def _fill_idle(matcher: GrammarMatcher, mask: IntArray) -> None:
    """Of one that has ended, or cannot go on: anything may come, or nothing."""
    if not matcher.done:
        matcher.failed = _first_line(matcher.handle.get_error())
    mask[:] = 0 if matcher.failed is not None else -1


def mask_threads() -> int:
    """How many make the masks of a step at most."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


def _serialised(source: GrammarSource) -> str:
    assert source.kind != "any", "it is made Lark first"
    if source.lead:
        return llguidance.LLMatcher.grammar_from_lark(f"start: lead answer\n{source.lead}\nanswer: {_nested(source)}\n")
    if source.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(source.text)
    return llguidance.LLMatcher.grammar_from_json_schema(source.text, overrides=_json_options(source))


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
    schema = json.loads(source.text)
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

# What llguidance says when a grammar is well-formed and runs into one of the limits.
_LIMIT_WORDS = ("fuel", "too many", "too large", "max is", "limit", "unable to determine if regex is empty")


def _explained(message: str) -> GrammarError:
    line = _first_line(message)
    return GrammarError(line, too_large=any(word in line.lower() for word in _LIMIT_WORDS))


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
