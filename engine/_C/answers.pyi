"""Answers that are told whole: csrc/bindings/bind_answers.cpp."""

from collections.abc import Sequence

# The text of each answer behind the bytes `begun` of a character; `hidden` tokens have none. What is no UTF-8 becomes
# U+FFFD.
def spell_answers(
    bytes_by_id: dict[int, bytes], hidden: frozenset[int], begun: bytes, answers: list[Sequence[int]]
) -> list[str]: ...

# A list of JSON with a row for each text: parts[0], its number, parts[1], the text, parts[2], its
# score, parts[3], its other score, parts[4]. Scores are lists of JSON already, without white space.
def write_rows(parts: tuple[str, str, str, str, str], texts: list[str], scores: bytes, others: bytes) -> bytes: ...
