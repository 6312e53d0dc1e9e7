"""Captures of graphs on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import torch
from torch.cuda import _POOL_HANDLE

Pool = _POOL_HANDLE


@contextmanager
def captured(
    pool: Pool, capture_error_mode: Literal["global", "thread_local"] = "global"
) -> Iterator[torch.cuda.CUDAGraph]:
    """What the block launches becomes the graph, once the block has ended.

    The garbage collector waits until then. It might end graphs of an engine that is gone, and a capture during which a
    graph is destroyed is lost.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield graph
        except BaseException:
            with suppress(RuntimeError):  # of a capture that is lost already
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
