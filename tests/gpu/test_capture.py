"""A graph that becomes garbage while another one is captured."""

from __future__ import annotations

import gc

import pytest
import torch

from bequest.engine.kernels.cuda_capture import captured

pytestmark = pytest.mark.gpu


def test_garbage_does_not_end_a_capture() -> None:
    pool, x = torch.cuda.graph_pool_handle(), torch.ones(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x + 1  # loads its kernel
        with captured(pool) as first:
            x + 1
        before = gc.get_threshold()
        try:
            with captured(pool) as second:
                cycle: list[object] = [first]
                cycle.append(cycle)
                del first, cycle  # not earlier: a pool ends with its last graph
                gc.set_threshold(1)
                made = x + 1
                assert len([[] for _ in range(1000)]) == 1000  # enough for a collection
        finally:
            gc.set_threshold(*before)
        second.replay()
    torch.cuda.synchronize()
    assert made.tolist() == [2.0] * 8
