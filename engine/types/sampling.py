"""How the tokens of a request are chosen. Frozen, complete when constructed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.encoder import TokenRules

MAX_BEAM_WIDTH = 1024


MAX_BEAM_CANDIDATES = 4096  # of one request in one step: see BeamSearch.num_candidates


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Who moves it is the mask maker's matter."""

    @property
    def why_nothing(self) -> str | None:
        """Where nothing could be sampled: why it cannot go on, if that is why."""


class Grammar(Protocol):
    """What an answer is held to (engine/constraints/grammar.py)."""

    @property
    def vocab_size(self) -> int: ...

    def matcher(self) -> Matcher: ...


class BeamParams(msgspec.Struct, frozen=True):
    """Beam search instead of sampling: the best `n` of `width` beams are returned."""

    width: int
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Ranges are the server's to check; the engine asserts them."""

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: the engine draws one
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never sampled
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per sampled token; 0: the sampled one alone
    prompt_logprobs: int | None = None
    beams: BeamParams | None = None
    catalogue: Catalogue | None = None  # only its items, then an end token
    grammar: Grammar | None = None  # only what it describes, then an end token; not with beams or a catalogue
    grammar_field: str = "grammar"  # where the client sent it, which errors name: many fields hold grammars
    rules: TokenRules | None = None  # of the model's own

    def __post_init__(self) -> None:
        assert self.beams is None or self.n <= self.beams.width
        assert self.grammar is None or (self.beams is None and self.catalogue is None)
        assert self.n >= 1 and self.max_tokens >= 0 and 0 <= self.min_tokens <= self.max_tokens
        assert self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1
        assert self.repetition_penalty > 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def ends_at_eos(self) -> bool:
        """The end of a catalogue's item or of what a grammar describes is always an end: nothing can follow it."""
        return not self.ignore_eos or self.catalogue is not None or self.grammar is not None
