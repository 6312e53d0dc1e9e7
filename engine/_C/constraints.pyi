"""Matchers of grammars and the masks they make: csrc/constraints."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from bequest.engine.types import IntArray

class GrammarTokens:  # a vocabulary as llguidance wants it
    # library: the path of llguidance's extension. A special token's bytes begin with 0xFF. encode: the tokens of a text
    # that a grammar forces; it is asked once for each of the last such texts, from any thread.
    def __init__(
        self, library: str, tokens: Sequence[bytes], end_token: int, encode: Callable[[str], list[int]]
    ) -> None: ...

class MatcherLimits:  # of what llguidance may do for a mask, and for a grammar
    def __init__(
        self, *, step_lexer_fuel: int, step_max_items: int, max_lexer_states: int, max_grammar_size: int
    ) -> None: ...

class Matcher:  # one answer's place in its grammar; one thread at a time
    # A grammar, in llguidance's JSON, that cannot be used makes a matcher with an error.
    def __init__(self, tokens: GrammarTokens, grammar: str, limits: MatcherLimits) -> None: ...
    is_error: Final[bool]  # and stays so
    is_stopped: Final[bool]
    is_accepting: Final[bool]
    error: Final[str]  # "": none
    def copy(self) -> Matcher: ...
    def consume(self, tokens: Sequence[int]) -> bool: ...  # False: it has an error now
    def count_valid(self, tokens: Sequence[int]) -> int: ...  # how many of the first ones it takes; it does not move
    def try_first_masks(self) -> None: ...  # up to where there is a choice; moves it

class GrammarMatcher:  # one answer: where it stands in its grammar, and whether anybody still looks at it
    def __init__(self, start: Matcher, ends: Sequence[int]) -> None: ...  # ends: the tokens that may end it
    num_seen: Final[int]  # steps that sampled for it
    ended: bool  # nobody looks at what is sampled from now on
    failed: str | None  # why it cannot go on: a limit that its grammar ran into, or a stray token
    failed_ahead: str | None  # the same behind the drafts of the last step, if these are right
    why_nothing: Final[str | None]  # one of these
    done: Final[bool]  # it has ended or failed
    error: Final[str]  # of its matcher; "": none
    # What a step has sampled; None: nothing could be. It moves when its next mask is made.
    def see(self, tokens: Sequence[int | None]) -> None: ...

class StepAnswers:  # those of a step that is about to be launched, which counts for each
    def __init__(self, answers: Sequence[GrammarMatcher]) -> None: ...
    ready: Final[bool]  # whether all that comes before the step is known
    # Samples of the step, one of each from number `first` on.
    def see(self, tokens: IntArray, bad_rows: npt.NDArray[np.bool_], first: int) -> None: ...
    # Fills the masks [rows, num_words] behind all tokens that were seen. The rows whose matchers have errors: nothing
    # may come there.
    def fill(self, masks: int, num_words: int, num_threads: int, flag: tuple[int, int] | None) -> list[int]: ...

# The same of some rows of other masks.
def fill_masks(rows: list[tuple[GrammarMatcher, int]], masks: int, num_words: int, num_threads: int) -> list[int]: ...

# Fills the masks behind the drafts of rows, as far as the grammars take them. The rows whose drafts run into a limit,
# and why; from there on their masks allow nothing.
def fill_ahead(
    rows: list[tuple[GrammarMatcher, int, tuple[int, ...]]], masks: int, num_words: int, num_threads: int
) -> list[tuple[int, str]]: ...
