"""How much can be continued from, by grade. Owned by the event-loop thread.

Blocks of a record that has no lease go without a word, so the totals are true only for whoever looks. To look at every
choice of every record takes a second where there are many. So each question looks again at some records, those that
were looked at longest ago, and the others count as they were. As long as there are no more than
_CHOICES choices in all, the totals are exact.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import get_args

from bequest.engine._C import BlockPool
from bequest.engine.state.record import Record
from bequest.engine.types import Grade, GradeLoad

_CHOICES = 1024  # that a question looks at
_Tally = tuple[Grade, int, int]  # grade, tokens, blocks


class Tallies:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._seen: OrderedDict[Record, _Tally] = OrderedDict()  # looked at longest ago first
        self._totals: dict[Grade, list[int]] = {grade: [0, 0, 0] for grade in get_args(Grade)}

    def add(self, record: Record) -> None:
        """A new one, or one that has changed."""
        self.drop(record)
        blocks = record.num_left_blocks(self._pool)
        grade, tokens = record.grade(blocks), record.num_tokens
        self._seen[record] = grade, tokens, blocks
        self._count(grade, 1, tokens, blocks)

    def drop(self, record: Record) -> None:
        tally = self._seen.pop(record, None)
        if tally is not None:
            grade, tokens, blocks = tally
            self._count(grade, -1, -tokens, -blocks)

    def loads(self) -> dict[Grade, GradeLoad]:
        left = _CHOICES
        for record in list(islice(self._seen, _CHOICES)):
            if left <= 0:
                break
            left -= record.identity.num_choices
            self.add(record)
        return {grade: GradeLoad(*total) for grade, total in self._totals.items()}

    def _count(self, grade: Grade, records: int, tokens: int, blocks: int) -> None:
        total = self._totals[grade]
        total[0] += records
        total[1] += tokens
        total[2] += blocks
