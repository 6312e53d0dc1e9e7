"""Who collects garbage while a graph is captured. The graphs are nobody's here; tests/gpu has real ones."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from bequest.engine.kernels.cuda_capture import captured

POOL: Any = (1, 2)


class Graph:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.calls.append((pool, capture_error_mode, gc.isenabled()))

    def capture_end(self) -> None:
        self.calls.append(gc.isenabled())


def calls_of(graph: Any) -> list[object]:
    calls: list[object] = graph.calls
    return calls


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


def test_nobody_collects_meanwhile() -> None:
    with captured(POOL, "thread_local") as graph:
        assert not gc.isenabled()
    assert gc.isenabled()
    assert calls_of(graph) == [(POOL, "thread_local", False), False]


def test_a_failure_ends_the_capture_and_is_told() -> None:
    found = []
    with pytest.raises(ValueError, match="here"), captured(POOL) as graph:
        found.append(graph)
        raise ValueError("here")
    assert gc.isenabled()
    assert len(calls_of(found[0])) == 2


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with captured(POOL):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
