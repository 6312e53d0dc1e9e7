"""The ladder of graph sizes: the smallest that holds a step, and little padding where rows cost time."""

from __future__ import annotations

import pytest

from engine.runner.cuda_sizes import MOST_GRAPH_TOKENS, Ladder, StepSize


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (7, 40), (256, 2048), (300, 512), (1024, 8192)])
def test_every_step_gets_the_smallest_size_that_holds_it(seqs: int, tokens: int) -> None:
    ladder = Ladder(seqs, tokens)
    sizes = ladder.sizes()
    assert len(set(sizes)) == len(sizes)
    for count in range(1, seqs + 1):
        holding = [size for size in sizes if not size.prefill and size.num_tokens >= count]
        assert ladder.size_for(count, count, count) == min(holding, key=lambda size: size.num_tokens)
    for count in range(1, min(tokens, MOST_GRAPH_TOKENS) + 1):
        holding = [size for size in sizes if size.prefill and size.num_tokens >= count]
        assert ladder.size_for(count, 0, 0) == min(holding, key=lambda size: size.num_tokens)
        assert min(size.num_samples for size in holding) >= seqs
    assert ladder.size_for(MOST_GRAPH_TOKENS + 1, 1, 1) is None


def test_padding_of_decode_steps_is_bounded() -> None:
    ladder = Ladder(512, 2048)
    for count in range(8, 513):
        size = ladder.size_for(count, count, count)
        assert size is not None
        assert size.num_tokens - count < max(8, count // 4)


def test_the_default_limits_have_few_sizes() -> None:
    """Each costs a start some 25 ms."""
    sizes = Ladder(256, 2048).sizes()
    assert len(sizes) <= 33
    assert StepSize(256, 256, prefill=False) in sizes
