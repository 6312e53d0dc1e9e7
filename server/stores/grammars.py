"""Compiled grammars: made in a worker thread within limits of time and size, kept for whoever asks for the same.

Each is tried first in a process of its own (engine/constraints/grammar_check.py), which also tells its size. Tenants
take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bequest.engine.constraints.grammar import Grammar, GrammarError, GrammarSource, Vocabulary
from bequest.engine.constraints.grammar_check import GrammarCheck
from bequest.engine.text import Tokenizer
from bequest.engine.types import ModelInfo
from bequest.server.access.turns import FairPool
from bequest.server.interfaces import TokenizerLike
from bequest.server.stores.kept_grammars import KeptGrammars
from bequest.server.wire.errors import ApiError, unsupported

_log = logging.getLogger("bequest.server")

MAX_CHARS = 1 << 18  # of a grammar's text
_PLACES = 2  # where grammars are tried and compiled at once
_MOST_LATE = 4  # that take longer, beside them: each has a process
_SHARE = 8  # of the memory for all of them, that one may hold
_ENTRY_BYTES = 1 << 16  # of a grammar beyond what its trial counts: its text, its tables for the model's tokens


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that a body asks for: its text, and how to speak of it in an error."""

    source: GrammarSource
    param: str  # the field that holds it
    complaint: str  # how the message of an error begins
    parts: tuple[Constraint, ...] = ()  # what it was put together from: the one at fault is told of

    def refused(self, error: GrammarError) -> ApiError:
        code = "grammar_too_large" if error.too_large else self._code
        return ApiError(400, code, f"{self.complaint}: {error}.", param=self.param)

    @property
    def _code(self) -> str:
        return "invalid_json_schema" if self.source.kind == "json_schema" else "invalid_value"


class Held(NamedTuple):
    """What an answer is held to, and the field of the body that says so. Grammars are shared, whatever their fields."""

    grammar: Grammar | None = None
    field: str = "grammar"


NOT_HELD = Held()


class _NoGrammars(GrammarError):
    """For this model there are none."""


class GrammarStore:
    """Used on the event loop; its work is done in threads of its own."""

    def __init__(self, tokenizer: TokenizerLike, info: ModelInfo, seconds: float, kept: KeptGrammars) -> None:
        """`seconds` that a grammar may take to compile."""
        self._tokenizer = tokenizer
        self._info = info
        self._pool = FairPool(_PLACES, "grammars", most_late=_MOST_LATE)
        self._check = GrammarCheck(seconds, info.vocab_size)
        self._vocabulary: asyncio.Future[Vocabulary] | None = None
        self._kept = kept
        self._compiling: dict[tuple[str, GrammarSource], asyncio.Future[Grammar]] = {}

    async def held(self, tenant: str, constraint: Constraint | None) -> Held:
        """What a body asks for, if anything. Raises as `compiled` does."""
        return NOT_HELD if constraint is None else Held(await self.compiled(tenant, constraint), constraint.param)

    async def compiled(self, tenant: str, constraint: Constraint) -> Grammar:
        """Raises 400 for a grammar that is none, or too large."""
        source = constraint.source
        grammar = self._kept.get(source)
        if grammar is not None:
            return grammar
        try:
            if len(source.text) > MAX_CHARS:
                raise GrammarError(f"it has {len(source.text)} characters, at most {MAX_CHARS}", too_large=True)
            # A client that leaves does not stop the work: others may want the same.
            return await asyncio.shield(self._compile_once(tenant, source))
        except _NoGrammars as error:
            raise unsupported(constraint.param, f"This model cannot follow a grammar: {error}.") from None
        except GrammarError as error:
            raise await self._refusal(tenant, constraint, error) from None

    def close(self) -> None:
        self._check.close()
        self._pool.shutdown()

    async def _refusal(self, tenant: str, constraint: Constraint, error: GrammarError) -> ApiError:
        for part in () if error.too_large else constraint.parts:
            try:
                await self._pool.run(tenant, partial(self._check.check, part.source))
            except GrammarError as fault:
                return part.refused(fault)
        return constraint.refused(error)

    def _compile_once(self, tenant: str, source: GrammarSource) -> asyncio.Future[Grammar]:
        """Once for each tenant: who waited for another's would wait for that one's turn."""
        compiling = self._compiling.get((tenant, source))
        if compiling is None:
            compiling = self._compiling[tenant, source] = asyncio.ensure_future(self._compile(tenant, source))
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
        return compiling

    async def _compile(self, tenant: str, source: GrammarSource) -> Grammar:
        try:
            if self._vocabulary is None:
                self._vocabulary = asyncio.ensure_future(self._pool.run(tenant, self._make_vocabulary))
            vocabulary = await asyncio.shield(self._vocabulary)
            checked = await self._pool.run(tenant, lambda: self._check.check(source))
            num_bytes = checked.num_bytes + _ENTRY_BYTES + len(source.text)
            self._check_size(num_bytes)
            self._kept.reserve(tenant, num_bytes)
            try:
                grammar = await self._pool.run(tenant, lambda: Grammar(checked.source, vocabulary))
            except BaseException:
                self._kept.release(tenant, num_bytes)
                raise
        finally:
            del self._compiling[tenant, source]
        self._kept.put(tenant, source, grammar, num_bytes)
        return grammar

    def _check_size(self, num_bytes: int) -> None:
        most = self._kept.most_bytes // _SHARE
        if num_bytes > most:
            message = f"it takes {num_bytes >> 20} MiB when it is compiled, at most {most >> 20} (--grammars-mb)"
            raise GrammarError(message, too_large=True)

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
