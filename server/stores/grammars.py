"""Compiled grammars: made in a worker thread within limits of time and size, kept for whoever asks for the same."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bequest.engine.constraints.grammar import Grammar, GrammarError, GrammarSource, Vocabulary
from bequest.engine.constraints.grammar_check import GrammarCheck
from bequest.engine.text import Tokenizer
from bequest.engine.types import ModelInfo
from bequest.server.interfaces import TokenizerLike
from bequest.server.wire.errors import ApiError, unsupported

_log = logging.getLogger("bequest.server")

MAX_CHARS = 1 << 18  # of a grammar's text
MAX_SECONDS = 10.0  # that a grammar may take to compile
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that a body asks for: its text, and how to speak of it in an error."""

    source: GrammarSource
    param: str  # the field that holds it
    complaint: str  # how the message of an error begins

    def refused(self, error: GrammarError) -> ApiError:
        code = "grammar_too_large" if error.too_large else self._code
        return ApiError(400, code, f"{self.complaint}: {error}.", param=self.param)

    @property
    def _code(self) -> str:
        return "invalid_json_schema" if self.source.kind == "json_schema" else "invalid_value"


class _NoGrammars(GrammarError):
    """For this model there are none."""


class GrammarStore:
    """Used on the event loop; its work is done in threads of its own."""

    def __init__(self, tokenizer: TokenizerLike, info: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        self._check = GrammarCheck(MAX_SECONDS)
        self._vocabulary: asyncio.Future[Vocabulary] | None = None
        self._compiled: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._compiling: dict[GrammarSource, asyncio.Future[Grammar]] = {}

    async def compiled(self, constraint: Constraint) -> Grammar:
        """Raises 400 for a grammar that is none, or too large."""
        source = constraint.source
        grammar = self._compiled.get(source)
        if grammar is not None:
            self._compiled.move_to_end(source)
            return grammar
        try:
            if len(source.text) > MAX_CHARS:
                raise GrammarError(f"it has {len(source.text)} characters, at most {MAX_CHARS}", too_large=True)
            # A client that leaves does not stop the work: others may want the same.
            return await asyncio.shield(self._compile_once(source))
        except _NoGrammars as error:
            raise unsupported(constraint.param, f"This model cannot follow a grammar: {error}.") from None
        except GrammarError as error:
            raise constraint.refused(error) from None

    def close(self) -> None:
        self._check.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile_once(self, source: GrammarSource) -> asyncio.Future[Grammar]:
        compiling = self._compiling.get(source)
        if compiling is None:
            compiling = self._compiling[source] = asyncio.ensure_future(self._compile(source))
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
        return compiling

    async def _compile(self, source: GrammarSource) -> Grammar:
        loop = asyncio.get_running_loop()
        try:
            if self._vocabulary is None:
                self._vocabulary = asyncio.ensure_future(loop.run_in_executor(self._pool, self._make_vocabulary))
            vocabulary = await asyncio.shield(self._vocabulary)
            await loop.run_in_executor(self._pool, self._check.check, source)
            grammar = await loop.run_in_executor(self._pool, Grammar, source, vocabulary)
        finally:
            del self._compiling[source]
        self._compiled[source] = grammar
        if len(self._compiled) > _MOST_KEPT:
            self._compiled.popitem(last=False)
        return grammar

    def _make_vocabulary(self) -> Vocabulary:
        """Takes a second or so; servers that never see a grammar do without."""
        began = time.perf_counter()
        if not isinstance(self._tokenizer, Tokenizer):
            raise _NoGrammars("it has no tokenizer of a known kind")
        try:
            vocabulary = Vocabulary(self._tokenizer, self._info.vocab_size, self._info.eos_token_ids)
        except GrammarError as error:
            raise _NoGrammars(str(error)) from None
        _log.info("vocabulary for grammars: %.2f s", time.perf_counter() - began)
        return vocabulary
