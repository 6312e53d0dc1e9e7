"""Filling in the middle: the tokens by which models mark what comes before and after the text they are to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Before the prefix, before the suffix, before the middle: as several families of models spell them.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """Ids of the three tokens."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, begin: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """`begin` (a BOS, or nothing), then the text before and after the gap; what is sampled fills it."""
        return [*begin, self.prefix, *before, self.suffix, *after, self.middle]


def fill_in_tokens(id_of: Callable[[str], int | None]) -> FillIn | None:
    """Those of a vocabulary; None if it has none."""
    for spelling in _SPELLINGS:
        ids = [token for name in spelling if (token := id_of(name)) is not None]
        if len(ids) == len(spelling):
            return FillIn(*ids)
    return None
