"""Passes of what drafts beside a target on a GPU: arrays on their way to the device, and graphs of small passes. Device
thread only, on the runner's stream.

A pass is one copy of its arrays and one graph; large ones, which prompts have, run kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bequest.engine.kernels.cuda_attention import CudaAttentionWorkspace
from bequest.engine.kernels.cuda_capture import Pool, captured
from bequest.engine.models.config import DecoderConfig
from bequest.engine.runner.cuda_buffers import StepBuffers
from bequest.engine.runner.cuda_sizes import StepSize
from bequest.engine.runner.cuda_times import time_replays
from bequest.engine.runner.staging import Field
from bequest.engine.types import NO_ROW, NO_SLOT, NO_TOKEN, IntArray

_SMALL_PASS = 256  # tokens that have buffers of their own
_GRAPH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_SAMPLED = 64  # in a graph: larger steps draft nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    max_tokens: int
    max_blocks: int  # of a sequence
    num_rows: int  # of the sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PassArrays:
    """T tokens of S sequences, and N samples. `others`: fields of the buffers, by name."""

    ids: IntArray  # [T]; -(row + 1): what was heard of that sampler row
    positions: IntArray  # [T]
    slots: np.ndarray  # [T] int64
    query_start: IntArray  # [S + 1]
    lens: IntArray  # [S]
    tables: IntArray  # [S, MB]
    num_samples: int = 0
    others: Mapping[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def extent(self) -> int:
        """Of its longest field."""
        return max(self.num_tokens, *map(len, self.others.values()))


# Values of fields behind those of a pass.
_PADDING = {"sample_tokens": 0, "sample_rows": NO_ROW, "sample_positions": 0}

Compute = Callable[[StepSize, StepBuffers], None]


class CudaPasses:
    """Of one model or head, over its own cache."""

    def __init__(
        self, config: DecoderConfig, kv_cache: Tensor, dtype: torch.dtype, limits: PassLimits, padding: dict[str, int]
    ) -> None:
        """`padding`: int64 fields of its own, and the values behind those of a pass."""
        self._config = config
        self._kv_cache = kv_cache
        self._dtype = dtype
        self._limits = limits
        self._own = padding
        self._padding = _PADDING | padding
        self._large = self._buffers(limits.max_tokens)
        self._small = self._buffers(min(_SMALL_PASS, limits.max_tokens))
        self._small.workspaces[0].share_scratch(self._large.workspaces[0])
        self._graphs: dict[tuple[Compute, StepSize], torch.cuda.CUDAGraph] = {}

    def _buffers(self, max_tokens: int) -> StepBuffers:
        config = self._config
        workspace = CudaAttentionWorkspace(
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_sequences=max_tokens,
            max_tokens=max_tokens,
            dtype=self._dtype,
            kv_dtype=self._kv_cache.dtype,
            causal=True,
            window=config.strips.windows[0],
            block_size=self._kv_cache.shape[4],
            device=self._kv_cache.device,
        )
        own = [Field(name, (max_tokens,), torch.int64) for name in self._own]
        widths = self._limits.max_blocks, 0
        return StepBuffers({0: workspace}, max_tokens, max_tokens, widths, self._kv_cache.device, None, own)

    def _buffers_of(self, num_tokens: int) -> StepBuffers:
        return self._small if num_tokens <= self._small.max_tokens else self._large

    def run(self, compute: Compute, arrays: PassArrays) -> None:
        """Sends the arrays and computes. What is at fixed places stays there until the next pass."""
        decodes, extent = arrays.num_tokens == len(arrays.lens), arrays.extent
        buffers = self._buffers_of(extent)
        counts = self._write_list(buffers, arrays)
        size = StepSize(arrays.num_tokens, arrays.num_samples, prefill=not decodes or counts > 0)
        graph = None
        if not size.prefill and extent <= _GRAPH_TOKENS[-1]:
            padded = _GRAPH_TOKENS[bisect_left(_GRAPH_TOKENS, extent)]
            of_graph = StepSize(padded, padded if arrays.num_samples else 0, prefill=False)
            graph = self._graphs.get((compute, of_graph))
            size = size if graph is None else of_graph
        self._stage(arrays, size, buffers)
        if graph is None:
            compute(size, buffers)
        else:
            graph.replay()

    def _write_list(self, buffers: StepBuffers, arrays: PassArrays) -> int:
        """Tiles of prefill that it has."""
        into = buffers.staging.arrays()[buffers.list_of(0)]
        counts = buffers.workspaces[0].write_list(arrays.query_start, arrays.lens, arrays.tables, into)  # type: ignore[arg-type]
        return counts.prefill_items

    def _stage(self, of: PassArrays, size: StepSize, buffers: StepBuffers) -> None:
        arrays, num, most = buffers.staging.arrays(), of.num_tokens, size.num_tokens
        for name, values, padding in (
            ("input_ids", of.ids, NO_TOKEN),
            ("positions", of.positions, 0),
            *((name, values, self._padding[name]) for name, values in of.others.items()),
        ):
            arrays[name][: len(values)] = values
            if name in self._padding or num < most:
                arrays[name][len(values) : max(most, size.num_samples)] = padding
        arrays["slot_mapping"][0, :num] = of.slots
        arrays["slot_mapping"][0, num:most] = NO_SLOT
        arrays["block_tables"][: len(of.lens), : of.tables.shape[1]] = of.tables
        buffers.send(len(of.lens))

    def capture(self, pool: Pool, compute: Compute, most: int, *, samples: tuple[bool, ...]) -> None:
        """Graphs of passes of one token for each of up to `most` sequences, all of which sample or none."""
        for num in (tokens for tokens in reversed(_GRAPH_TOKENS) if tokens <= self._buffers_of(1).max_tokens):
            if num >= 2 * most:
                continue
            for sampled in samples:
                if sampled and num > _MOST_SAMPLED:
                    continue
                size = StepSize(num, num if sampled else 0, prefill=False)
                compute(size, self.pad(size))  # loads kernels, which a capture must not
                with captured(pool) as graph:
                    compute(size, self._buffers_of(num))
                self._graphs[compute, size] = graph

    def time(self, compute: Compute) -> float:
        """Seconds of a pass of one token that samples."""
        size = StepSize(1, 1, prefill=False)
        self.pad(size)
        return time_replays(self._graphs[compute, size].replay)

    def pad(self, size: StepSize) -> StepBuffers:
        """Stages a pass of `size` without one real token."""
        none, ints = np.empty(0, np.int64), np.empty(0, np.int32)
        arrays = PassArrays(
            ids=ints,
            positions=ints,
            slots=none,
            query_start=np.zeros(1, np.int32),
            lens=ints,
            tables=np.empty((0, 0), np.int32),
            others=dict.fromkeys(self._padding, none),
        )
        buffers = self._buffers_of(size.num_tokens)
        self._write_list(buffers, arrays)
        self._stage(arrays, size, buffers)
        return buffers
