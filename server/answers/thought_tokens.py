"""How many tokens of an answer are thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from bequest.engine.dialects.reader import AnswerReader
from bequest.engine.types import ChoiceDelta
from bequest.server.interfaces import TokenizerLike


class ThoughtTokens:
    """Counts those of all choices. A token counts if it begins inside of a thought, marks included."""

    def __init__(self, tokenizer: TokenizerLike, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset[int]() if shows_special else tokenizer.special_ids
        self._texts: dict[int, list[str]] = {}
        self._ids: dict[int, list[int]] = {}
        self.total = 0

    def take(self, choice: ChoiceDelta, reader: AnswerReader) -> None:
        """What a choice gained; `reader` has read it."""
        self._texts.setdefault(choice.index, []).append(choice.text)
        self._ids.setdefault(choice.index, []).extend(choice.token_ids)
        if choice.finish_reason is not None:
            text, ids = "".join(self._texts.pop(choice.index)), self._ids.pop(choice.index)
            self.total += self._count(text, ids, reader.spans)

    def _count(self, text: str, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
        within = [(len(text[:begin].encode()), len(text[:end].encode())) for begin, end in spans]
        position = count = 0
        for token_id in token_ids:
            count += any(begin <= position < end for begin, end in within)
            position += 0 if token_id in self._hidden else len(self._tokenizer.token_bytes(token_id))
        return count
