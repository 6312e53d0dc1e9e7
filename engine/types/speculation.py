"""What a request says about drafts. Frozen, complete when constructed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# off: nothing is drafted; ngram: what followed the same tokens before, in the request itself; suffix: there, or in
# what the tenant's records say
DraftMethod = Literal["off", "ngram", "suffix"]
_NUMBERED = ("ngram", "suffix")
MOST_DRAFTED = 16  # tokens of one sequence in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafts change no token of an answer, only how soon it is there."""

    method: DraftMethod | None = None  # None: the engine's own
    most: int | None = None  # tokens that are drafted at a time; None: as many as pay
    prediction: tuple[int, ...] = ()  # what the client expects of the answer

    def __post_init__(self) -> None:
        assert self.most is None or 1 <= self.most <= MOST_DRAFTED


def parse_speculative(value: str) -> tuple[str, int | None]:
    """`auto`, `off`, or a method with or without a number of tokens: `ngram:4`. Raises ValueError."""
    name, colon, count = value.partition(":")
    if name not in ("auto", "off", *_NUMBERED):
        raise ValueError(f"speculative must be auto, off, ngram, ngram:K, suffix or suffix:K, not {value!r}")
    if not colon:
        return name, None
    if name not in _NUMBERED or not count.isdecimal() or not 1 <= int(count) <= MOST_DRAFTED:
        raise ValueError(f"speculative: K of ngram:K or suffix:K is 1 to {MOST_DRAFTED} tokens, not {value!r}")
    return name, int(count)
