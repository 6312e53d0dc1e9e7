"""A kind of work that only the tests know: the engine runs it beside its own, and nothing else has to know it.

It walks through its prompt in strides of so many tokens at most, and answers with their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bequest.engine._C import BlockTable, TokenList
from bequest.engine.errors import InvalidRequest
from bequest.engine.state.output import Output
from bequest.engine.state.sequence import Applied, Group, Kind, Outcome, Room, Sequence, Wish
from bequest.engine.state.step import Stretch
from bequest.engine.types import ChoiceDelta, Lineage, ModelInfo, Request, Retain, SamplingParams, StepResult
from bequest.engine.work.desk import Desk
from bequest.engine.work.kinds import KINDS
from tests.engine.harness import Setup, ask, ask_all, request, running, until
from tests.engine.paged_fake import expected_tokens

EOS = 5


@dataclass
class Strides:
    """What a walk is asked for by, and what it tells of itself."""

    most: int  # tokens of each
    planned: list[int] = field(default_factory=list)  # tokens of those that were
    num_preempted: int = 0


def strides_of(request: Request) -> Strides:
    assert isinstance(request.terms.origin, Strides)
    return request.terms.origin


class Walk(Kind):
    def __init__(self, group: Group, desk: Desk) -> None:
        self.group = group
        self._desk = desk
        self._strides = strides_of(group.request)
        self._num_walked = 0

    @classmethod
    def takes(cls, request: Request) -> bool:
        return isinstance(request.terms.origin, Strides)

    @classmethod
    def check(cls, request: Request, info: ModelInfo, desk: Desk) -> None:
        if strides_of(request).most < 1:
            raise InvalidRequest("Nobody walks without a step.")

    def begin(self, output: Output) -> None:
        tokens = TokenList(self.group.request.prompt_token_ids)
        table = BlockTable(self._desk.pool, self.group.salt)
        self.group.sequences.append(Sequence(self.group, 0, tokens, table, output, self))

    @property
    def num_slots(self) -> int:
        return 1

    def slots(self, sequence: Sequence) -> int:
        return 1

    def num_ready(self, sequence: Sequence) -> int:
        return sequence.num_pending

    def wishes(self, sequence: Sequence, room: Room) -> Iterator[Wish]:
        count = min(self._strides.most, room.most_tokens(sequence))
        if count > 0:
            yield Stretch(sequence.num_computed, count)

    def note_planned(self, sequence: Sequence, stretch: Stretch) -> None:
        self._strides.planned.append(stretch.count)

    def gives_way(self, sequence: Sequence) -> bool:
        self._strides.num_preempted += 1
        return False

    def conclude(self, outcome: Outcome, sequence: Sequence, stretch: Stretch, start: int) -> None:
        outcome.expect(_Walked(self, is_last=stretch.begin + stretch.count == sequence.planned_len))

    def note_walked(self, is_last: bool, applied: Applied) -> None:
        if self.group.closed or self.group in applied.failed or self.group.finished:
            return
        self._num_walked += 1
        if is_last:
            self.group.sequences[0].output.finish("stop", None)
            self._desk.finish(self.group.sequences[0])
            applied.moved[self.group] = None

    def cut(self) -> None:
        raise AssertionError("nothing is sampled for it")

    def take_deltas(self, first: bool) -> tuple[ChoiceDelta, ...]:
        return (ChoiceDelta(0, f"{self._num_walked} strides", (self._num_walked,), None, "stop"),)


@dataclass(frozen=True, slots=True)
class _Walked:
    walk: Walk
    is_last: bool

    def apply(self, result: StepResult, applied: Applied) -> None:
        self.walk.note_walked(self.is_last, applied)


def walk(prompt: list[int], most: int, **fields: object) -> Request:
    return request(prompt, SamplingParams(max_tokens=0), origin=Strides(most), **fields)


def generation(number: int, count: int = 12) -> Request:
    return request([90 + number] * 9, SamplingParams(max_tokens=count, temperature=0))


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("most", [1, 4, 7, 100])
async def test_it_runs_beside_generations(most: int, pipelined: bool) -> None:
    walks = [walk([20 + i] * length, most) for i, length in enumerate([1, 4, 11, 30])]
    beside = [generation(i) for i in range(4)]
    async with running(Setup(chunk=200, pipelined=pipelined, kinds=(Walk, *KINDS))) as (engine, _):
        answers = await ask_all(engine, [*walks, *beside])
    for asked, answer in zip(walks, answers, strict=False):
        number = -(-len(asked.prompt_token_ids) // most)
        assert answer.token_ids == {0: [number]} and answer.finish == {0: ("stop", None)}
        assert answer.usage is not None and answer.usage.prompt_tokens == len(asked.prompt_token_ids)
        strides = strides_of(asked).planned
        assert max(strides) <= most and sum(strides) == len(asked.prompt_token_ids)
    for asked, answer in zip(beside, answers[len(walks) :], strict=True):
        assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 12, eos=EOS)


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_host_blocks", [1, 9], ids=["recomputed", "swapped"])
async def test_it_gives_way_in_a_tiny_cache_and_comes_to_its_end(num_host_blocks: int, pipelined: bool) -> None:
    sizes = {"max_model_len": 60, "num_host_blocks": num_host_blocks, "chunk": 16}
    setup = Setup(22, pipelined=pipelined, kinds=(Walk, *KINDS), **sizes)
    walks = [walk([20 + i] * 37, 3, priority=1) for i in range(3)]
    beside = [generation(i, 40) for i in range(4)]
    async with running(setup) as (engine, _):
        answers = await ask_all(engine, [*walks, *beside])
    assert sum(strides_of(asked).num_preempted for asked in walks) > 0
    for asked, answer in zip(walks, answers, strict=False):
        assert answer.token_ids[0][0] >= 13 and answer.finish == {0: ("stop", None)}
        assert max(strides_of(asked).planned) <= 3
    for asked, answer in zip(beside, answers[len(walks) :], strict=True):
        assert answer.token_ids[0] == expected_tokens(asked.prompt_token_ids, 40, eos=EOS)


async def test_it_is_aborted_while_it_runs_and_while_it_waits() -> None:
    async with running(Setup(max_num_seqs=1, kinds=(Walk, *KINDS))) as (engine, _):
        runs, waits = walk([20] * 300, 1), walk([21] * 300, 1)
        engine.submit(runs, lambda delta: None)
        engine.submit(waits, lambda delta: None)
        await until(lambda: len(strides_of(runs).planned) > 3)
        assert not strides_of(waits).planned
        engine.abort(waits.id)
        engine.abort(runs.id)
        engine.scheduler.check_idle()
        assert (await ask(engine, walk([22] * 9, 2))).token_ids == {0: [5]}


async def test_it_leaves_its_blocks_to_whoever_continues() -> None:
    async with running(Setup(num_lease_blocks=50, kinds=(Walk, *KINDS))) as (engine, _):
        asked = walk([30] * 22, 5, retain=Retain(60.0))
        assert (await ask(engine, asked)).retained is not None
        child = request([*asked.prompt_token_ids, 31], lineage=Lineage(asked.id, 0, 22))
        answer = await ask(engine, child)
        assert answer.inheritance is not None and answer.inheritance.inherited_tokens == 22
        assert answer.token_ids[0] == expected_tokens(child.prompt_token_ids, 8, eos=EOS)
        engine.forget("t", asked.id)


async def test_it_says_what_it_cannot_do() -> None:
    async with running(Setup(kinds=(Walk, *KINDS))) as (engine, _):
        with pytest.raises(InvalidRequest, match="without a step"):
            await ask(engine, walk([20], 0))


async def test_nobody_else_takes_it_for_more_than_a_prompt() -> None:
    async with running(Setup()) as (engine, _):
        assert (await ask(engine, walk([20] * 9, 2))).token_ids == {0: []}
