"""Totals of records: exact where there are few, and a bounded price where there are many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from bequest.engine.inheritance.tallies import Tallies
from bequest.engine.state.record import Record
from bequest.engine.types import Grade, GradeLoad


@dataclass
class _Identity:
    num_choices: int


@dataclass(eq=False)
class _Record:
    """What a tally reads of a record, and how often it was looked at."""

    identity: _Identity
    num_tokens: int = 10
    blocks: int = 3
    looks: int = field(default=0)

    def grade(self, _: object) -> Grade:
        self.looks += 1
        return "warm" if self.blocks else "tokens"

    def num_left_blocks(self, _: object) -> int:
        return self.blocks


def _tallies(records: list[_Record]) -> Tallies:
    tallies = Tallies(cast(Any, None))
    for record in records:
        tallies.add(cast(Record, record))
    return tallies


def test_few_records_are_counted_as_they_are() -> None:
    records = [_Record(_Identity(choices)) for choices in (1, 8, 128)]
    tallies = _tallies(records)
    assert tallies.loads()["warm"] == GradeLoad(3, 30, 9)
    records[1].blocks = 0
    tallies.drop(cast(Record, records[0]))
    loads = tallies.loads()
    assert loads["warm"] == GradeLoad(1, 10, 3) and loads["tokens"] == GradeLoad(1, 10, 0)
    assert loads["running"] == loads["leased"] == GradeLoad(0, 0, 0)


def test_many_are_looked_at_in_turn() -> None:
    records = [_Record(_Identity(128)) for _ in range(1024)]
    tallies = _tallies(records)
    for record in records:
        record.looks, record.blocks = 0, 0
    for question in range(1, 129):
        loads = tallies.loads()
        assert sum(record.looks for record in records) == 8 * question, "a question looks at 1,024 choices"
    assert {record.looks for record in records} == {1} and loads["tokens"] == GradeLoad(1024, 10240, 0)
