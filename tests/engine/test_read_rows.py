"""Which tokens of a step are read, against the definition."""

from __future__ import annotations

import itertools
import random

import numpy as np
from msgspec.structs import replace

from bequest.engine.runner.read_rows import read_tokens
from bequest.engine.types import NO_ROW, PromptLogprobSpec, StepBatch, StepMoves, StepPlan, StepRows, StepSamples

_NONE = np.empty(0, np.int32)
_NO_PAIRS = np.empty((0, 2), np.int32)


def plan_of(lens: list[int], sampled: list[int], scored: list[tuple[int, int]]) -> StepPlan:
    """A step of sequences with so many tokens each; scored: (first token, count)."""
    starts = np.cumsum([0, *lens]).astype(np.int32)
    tokens = np.zeros(starts[-1], np.int32)
    specs = tuple(
        PromptLogprobSpec(request_id="r", first_token=first, targets=np.zeros(count, np.int32), top=0)
        for first, count in scored
    )
    batch = StepBatch(
        input_ids=tokens,
        input_rows=np.full_like(tokens, NO_ROW),
        positions=tokens,
        slot_mapping=tokens.astype(np.int64)[None],
        query_start=starts,
        seq_lens=np.array(lens, np.int32),
        block_tables=np.zeros((1, len(lens), 1), np.int32),
    )
    return StepPlan(
        step=0,
        batch=batch,
        moves=StepMoves(swaps_out=_NO_PAIRS, swaps_in=_NO_PAIRS, copies=_NO_PAIRS),
        rows=StepRows(),
        samples=samples_at(sampled),
        prompt_logprobs=specs,
    )


def samples_at(tokens: list[int]) -> StepSamples:
    return StepSamples(tokens=np.array(tokens, np.int32), rows=_NONE, positions=_NONE)


def test_decoding_reads_everything() -> None:
    assert read_tokens(plan_of([1, 1, 1], [0, 1, 2], []), 3) is None


def test_a_chunk_inside_a_prompt_reads_nothing() -> None:
    read = read_tokens(plan_of([5], [], []), 3)
    assert read is not None and read.rows.tolist() == [] and read.query_start.tolist() == [0, 0]


def test_from_the_first_token_that_is_sampled_or_scored_to_the_end_of_its_sequence() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lens = [draw.choice([1, 1, 2, 7]) for _ in range(draw.randint(1, 5))]
        starts = np.cumsum([0, *lens]).tolist()
        sampled = [end - 1 for end in starts[1:] if draw.random() < 0.5]
        scored = []
        for begin, end in itertools.pairwise(starts):
            if draw.random() < 0.3:
                first = draw.randrange(begin, end)
                scored.append((first, draw.randint(1, end - first)))
        wanted = {*sampled, *(token for first, count in scored for token in range(first, first + count))}
        expected = [
            token
            for begin, end in itertools.pairwise(starts)
            for token in range(min(wanted & set(range(begin, end)), default=end), end)
        ]
        plan = plan_of(lens, sampled * 2, scored)  # choices that part ways share their token
        read = read_tokens(plan, 3)
        if read is None:
            assert len(expected) == plan.num_tokens
            continue
        assert read.rows.tolist() == expected
        ends = [sum(token < end for token in expected) for end in starts]
        assert read.query_start.tolist() == ends
        places = read.places(np.array(sorted(wanted), np.int32))
        assert [expected[place] for place in places] == sorted(wanted)
        assert read_tokens(replace(plan, samples=samples_at(list(range(plan.num_tokens)))), 3) is None
