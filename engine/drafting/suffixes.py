"""What the records of a tenant said: the texts that `suffix` looks for the end of a sequence in.

Texts are divided as the prefix index is, by tenant and `cache_salt`: how fast an answer comes tells what is known, so
nobody is drafted for from the text of another. A record that is deleted or expires takes its text along. Memory is
bounded twice: each division keeps its latest tokens, and the least recently used division goes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from bequest.engine._C import SuffixIndex
from bequest.engine.state.record import Record
from bequest.engine.types import Request

SHORTEST_RUN = 4  # tokens that must be the same: in so much text, shorter runs are chance
TOKENS_KEPT = 1 << 16  # of a division, 16 bytes each
MOST_DIVISIONS = 32

_Key = tuple[str, str]  # tenant, cache_salt


@dataclass(slots=True)
class _Division:
    index: SuffixIndex
    spans: dict[Record, list[tuple[int, int]]] = field(default_factory=dict)  # where the text of a record lies


class RecordTexts:
    """A Corpus. Owned by the event-loop thread."""

    def __init__(self, tokens_kept: int = TOKENS_KEPT, most_divisions: int = MOST_DIVISIONS) -> None:
        self._tokens_kept = tokens_kept
        self._most_divisions = most_divisions
        self._divisions: OrderedDict[_Key, _Division] = OrderedDict()  # least recently used first

    def of(self, request: Request) -> SuffixIndex:
        return self._division((request.tenant, request.cache_salt)).index

    def learn(self, record: Record, begin: int) -> None:
        if record.kept_beams is not None:  # many answers that nobody may ever look at
            return
        division = self._division((record.tenant, record.identity.cache_salt))
        if record in division.spans:
            return
        spans = division.spans[record] = []
        for kept in record.kept.values():
            # A run reaches back into what is known already; choices have their prompt in common.
            start = max(0, (kept.num_prompt if spans else begin) - SHORTEST_RUN)
            spans.append(division.index.learn(kept.tokens, start))

    def forget(self, record: Record) -> None:
        division = self._divisions.get((record.tenant, record.identity.cache_salt))
        if division is not None:
            for begin, end in division.spans.pop(record, ()):
                division.index.forget(begin, end)

    def _division(self, key: _Key) -> _Division:
        division = self._divisions.get(key)
        if division is None:
            division = self._divisions[key] = _Division(SuffixIndex(SHORTEST_RUN, self._tokens_kept))
            if len(self._divisions) > self._most_divisions:
                self._divisions.popitem(last=False)
        self._divisions.move_to_end(key)
        return division
