"""The ladder of graph sizes: the smallest that holds a step, and little padding where rows cost time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from bequest.engine.runner.cuda_sizes import MOST_GRAPH_TOKENS, Ladder, StepSize
from bequest.engine.types import MAX_BEAM_WIDTH, StepPlan
from bequest.engine.types.image import ImageRows, StepImages
from tests.engine.test_read_rows import plan_of


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (7, 40), (256, 2048), (300, 512), (1024, 8192), (2048, 2048)])
def test_every_step_gets_the_smallest_size_that_holds_it(seqs: int, tokens: int) -> None:
    ladder = Ladder(seqs, tokens)
    sizes = ladder.sizes()
    assert len(set(sizes)) == len(sizes)
    for count in range(1, max(seqs, MAX_BEAM_WIDTH) + 1):
        holding = [size for size in sizes if not size.prefill and size.merges and size.num_tokens >= count]
        found = ladder.size_for(count, count, count, prefill=False, merges=True)
        assert found == min(holding, key=lambda size: size.num_tokens)
    for count in range(1, min(tokens, MOST_GRAPH_TOKENS) + 1):
        for num_samples in (0, min(count, seqs), min(count, MAX_BEAM_WIDTH + seqs)):
            found = ladder.size_for(count, 0, num_samples, prefill=False, merges=True)
            holding = [s for s in sizes if s.prefill and s.num_tokens >= count and s.num_samples >= num_samples]
            assert found == min(holding, key=lambda size: (size.num_tokens, size.num_samples), default=None)
            assert found is not None or num_samples > seqs
    assert ladder.size_for(MOST_GRAPH_TOKENS + 1, 1, 1, prefill=False, merges=True) is None


def test_a_step_of_single_tokens_may_have_prefill_tiles() -> None:
    """Where many sequences share a long prefix."""
    assert Ladder(256, 2048).size_for(32, 32, 32, prefill=True, merges=True) == StepSize(32, 32, prefill=True)


def test_many_choices_of_a_short_prompt_take_a_size_with_their_samples() -> None:
    ladder = Ladder(256, 2048)
    assert ladder.size_for(6, 1, 1, prefill=False, merges=True) == StepSize(8, 8, prefill=True)
    assert ladder.size_for(6, 1, 100, prefill=False, merges=True) == StepSize(128, 128, prefill=True)
    assert ladder.size_for(6, 1, 256, prefill=False, merges=True) == StepSize(256, 256, prefill=True)
    assert Ladder(256, 40).size_for(6, 1, 256, prefill=False, merges=True) == StepSize(40, 256, prefill=True)


@pytest.mark.parametrize("seqs", [1, 4, 256])
def test_a_step_that_checks_drafts_is_padded_to_a_few_tokens(seqs: int) -> None:
    """However few sequences may run: every token is sampled."""
    for count, padded in ((2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (33, 64)):
        found = Ladder(seqs, 2048).size_for(count, 1, count, prefill=True, merges=True)
        assert found == StepSize(padded, padded, prefill=True)


def test_padding_of_decode_steps_is_bounded() -> None:
    ladder = Ladder(512, 2048)
    for count in range(8, 513):
        size = ladder.size_for(count, count, count, prefill=False, merges=True)
        assert size is not None
        assert size.num_tokens - count < max(8, count // 4)


def test_steps_without_cut_tiles_launch_no_merge_while_that_is_worth_a_graph() -> None:
    ladder = Ladder(256, 2048)
    sizes = ladder.sizes()
    for count in range(1, 257):
        uncut = ladder.size_for(count, count, count, prefill=False, merges=False)
        cut = ladder.size_for(count, count, count, prefill=False, merges=True)
        assert uncut is not None and cut is not None and uncut in sizes and cut.merges
        assert uncut == (cut if cut.num_tokens > 64 else replace(cut, merges=False))
        if not uncut.merges:
            assert sizes.index(cut) < sizes.index(uncut)  # its kernels have been loaded


def test_the_default_limits_have_few_sizes() -> None:
    """Each costs a start some 25 ms, one without merges half of that."""
    sizes = Ladder(256, 2048).sizes()
    assert len([size for size in sizes if size.merges]) <= 52
    assert len([size for size in sizes if not size.merges]) <= 11
    assert StepSize(256, 256, prefill=False) in sizes
    assert len([size for size in Ladder(256, 2048, num_layers=3).sizes() if size.narrow]) <= 15


def size_of(plan: StepPlan, num_layers: int | None = 3) -> StepSize | None:
    """In a ladder of the default limits."""
    return Ladder(256, 2048, num_layers=num_layers).size_of(plan, prefill=True, merges=True)


def test_a_long_step_goes_on_with_its_samples_where_nobody_reads_other_rows() -> None:
    alone, scored = plan_of([1429, 1], [1428, 1429], []), plan_of([1429, 1], [1428, 1429], [(7, 3)])
    assert size_of(alone) == StepSize(1440, 64, prefill=True, narrow=True)
    assert size_of(scored) == size_of(alone, num_layers=None) == StepSize(1440, 256, prefill=True)
    assert size_of(plan_of([2000], [], [])) == StepSize(2048, 64, prefill=True, narrow=True)  # a chunk of a prompt
    assert size_of(plan_of([700], [699], [])) == StepSize(768, 256, prefill=True)


def test_a_long_step_with_many_samples_does_at_sizes_that_the_scheduler_aims_at() -> None:
    many = [*range(65)]
    assert size_of(plan_of([1] * 65 + [1900], many, [])) == StepSize(2048, 256, prefill=True, narrow=True)
    assert size_of(plan_of([1] * 65 + [1800], many, [])) == StepSize(1920, 256, prefill=True)
    assert size_of(plan_of([1] * 64 + [1800], many[:-1], [])) == StepSize(1920, 64, prefill=True, narrow=True)


@pytest.mark.parametrize("seqs", [1, 256])
def test_a_token_that_turns_elsewhere_than_its_place_has_company(seqs: int) -> None:
    """Behind an image, or of one: kernels of a step of one token know its position alone."""
    ladder = Ladder(seqs, 2048)

    def step(place: int, position: int, images: StepImages | None = None) -> StepPlan:
        plan = plan_of([1], [0], [])
        plan.batch.seq_lens[:], plan.batch.positions[:] = place + 1, position
        return structs.replace(plan, images=images)

    def sizes(plan: StepPlan) -> tuple[StepSize | None, StepSize]:
        return ladder.size_of(plan, prefill=False, merges=True), ladder.exact_size(plan)

    row = ImageRows(image=1 << 30, tokens=np.zeros(1, np.int32), rows=np.zeros(1, np.int32), turns=None)
    assert sizes(step(20, 20)) == (StepSize(1, 1, prefill=False), StepSize(1, 1, prefill=True))
    accompanied = StepSize(2, 2, prefill=True), StepSize(2, 1, prefill=True)
    assert sizes(step(20, 8)) == sizes(step(20, 20, StepImages(gathered=(row,)))) == accompanied


def test_eager_steps_go_on_with_their_samples_if_there_are_any() -> None:
    ladder = Ladder(256, 8192, num_layers=3)
    assert ladder.exact_size(plan_of([4000], [3999], [])) == StepSize(4000, 1, prefill=True, narrow=True)
    assert ladder.exact_size(plan_of([4000], [], [])) == StepSize(4000, 0, prefill=True)
    every = [*range(1024)]  # each token of a long draft, say
    assert ladder.exact_size(plan_of([1024], every, [])) == StepSize(1024, 1024, prefill=True)


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2048), (256, 2048), (300, 1500), (256, 512), (1024, 8192)])
def test_what_a_step_gets_has_a_graph_with_room_for_it(seqs: int, tokens: int) -> None:
    ladder = Ladder(seqs, tokens, num_layers=3)
    sizes = ladder.sizes()
    assert len(set(sizes)) == len(sizes)
    order = [size.narrow for size in sizes]
    assert order == sorted(order), "narrow ones are the last: others load their kernels"
    for count in range(1000, min(tokens, MOST_GRAPH_TOKENS) + 1, 7):
        for num_samples in (0, 1, min(64, seqs), min(65, seqs), seqs):
            if num_samples < count:
                found = ladder.size_of(plan_of([count], [*range(num_samples)], []), prefill=True, merges=True)
                assert found in sizes
                assert found.num_tokens >= count and found.num_samples >= num_samples
    assert not any(size.narrow for size in Ladder(seqs, tokens).sizes())
