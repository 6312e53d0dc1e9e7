"""Matchers of grammars and the masks they make: csrc/constraints/matchers.h."""

from collections.abc import Callable, Sequence
from typing import Final

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

# Moves matchers by a token each, then fills the masks [rows, num_words] of others. The rows that have errors.
def fill_masks(
    moves: list[tuple[Matcher, int]], rows: list[tuple[Matcher, int]], masks: int, num_words: int, num_threads: int
) -> list[int]: ...

# Fills the masks behind the drafts of rows, as far as the grammars take them. The rows whose drafts run into a limit,
# and why; from there on their masks allow nothing.
def fill_ahead(
    rows: list[tuple[Matcher, int, tuple[int, ...]]], masks: int, num_words: int, num_threads: int
) -> list[tuple[int, str]]: ...
