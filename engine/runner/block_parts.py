"""Bytes of blocks and states of a whole model, of which each rank has a part.

What leaves the engine (estates, leases in files) has the layout of a whole model: an engine of any number of ranks can
go on with it. Dims: N blocks or states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.cutting import Cutting
from bequest.engine.types.blocks import BlockBytes, BlockLayout
from bequest.engine.types.recurrent import DeltaSizes

_STATE = np.dtype(np.float32)


class BlockParts:
    """The parts of all ranks, as one of them sees it."""

    def __init__(self, cutting: Cutting, part: BlockLayout) -> None:
        """`part`: the layout of the rank's own blocks."""
        self._cutting = cutting
        self._part = part
        num_layers, pair, num_heads, *of_head = part.shape
        self._of_head = part.num_bytes // (num_layers * pair * num_heads)  # bytes
        heads = cutting.heads.total
        self.whole = replace(
            part,
            shape=(num_layers, pair, heads, *of_head),
            num_bytes=part.num_bytes // num_heads * heads,
            state_bytes=0 if self._sizes is None else self._num_layers * self._sizes.state_size * _STATE.itemsize,
        )

    def join(self, parts: Sequence[BlockBytes]) -> BlockBytes:
        """[N, bytes of a whole block] of what each rank has of these blocks."""
        whole = np.empty((len(parts[0]), self.whole.num_bytes), np.uint8)
        for rank, part in enumerate(parts):
            heads = replace(self._cutting, rank=rank).heads
            self._by_head(whole)[:, :, heads.first : heads.first + heads.count] = self._by_head(part)
        return whole

    def cut(self, content: BlockBytes) -> BlockBytes:
        """The rank's part of it, [N, bytes of its block]."""
        heads = self._cutting.heads
        part = self._by_head(content)[:, :, heads.first : heads.first + heads.count]
        return np.ascontiguousarray(part).reshape(len(content), self._part.num_bytes)

    def join_states(self, parts: Sequence[BlockBytes]) -> BlockBytes:
        whole = np.empty((len(parts[0]), self.whole.state_bytes), np.uint8)
        for rank, part in enumerate(parts):
            self._by_layer(whole)[:, :, self._places(rank)] = self._by_layer(part)
        return whole

    def cut_states(self, content: BlockBytes) -> BlockBytes:
        part = self._by_layer(content)[:, :, self._places(self._cutting.rank)]
        return np.ascontiguousarray(part).view(np.uint8).reshape(len(content), self._part.state_bytes)

    def _by_head(self, content: BlockBytes) -> BlockBytes:
        """[N, 2 L, NKV, bytes of a head], the same memory"""
        return content.reshape(len(content), math.prod(self._part.shape[:2]), -1, self._of_head)

    def _by_layer(self, content: BlockBytes) -> npt.NDArray[np.float32]:
        """[N, LR, floats of a state], the same memory"""
        return content.view(_STATE).reshape(len(content), self._num_layers, -1)

    @property
    def _sizes(self) -> DeltaSizes | None:
        whole = self._cutting.whole
        return None if not isinstance(whole, DecoderConfig) or whole.recurrent is None else whole.recurrent.sizes

    @property
    def _num_layers(self) -> int:
        whole = self._cutting.whole
        return 0 if not isinstance(whole, DecoderConfig) else whole.state_shape[0]

    def _places(self, rank: int) -> npt.NDArray[np.int64]:
        """Of the floats of a rank's state among those of a whole one: as DeltaSizes.state_size has them."""
        sizes = self._sizes
        assert sizes is not None, "the model has no recurrent layers"
        cutting = replace(self._cutting, rank=rank)
        each = sizes.value_size * sizes.key_dim // cutting.size
        channels = np.concatenate([np.arange(part.start, part.stop) for part in cutting.channels(sizes)])
        inputs = np.arange(sizes.conv_width - 1)[:, None] * sizes.channels + channels
        return np.concatenate(
            [np.arange(rank * each, (rank + 1) * each), sizes.value_size * sizes.key_dim + inputs.ravel()]
        )
