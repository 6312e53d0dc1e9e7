"""Where the states of an encoder batch lie while its layers attend: one after another, in blocks of a scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Of the scratch: a multiple of what every attention kernel walks keys in.
SCRATCH_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """Host arrays of a batch of B inputs with E states in all; what an attention plan and EncoderInputs are made of."""

    query_start: npt.NDArray[np.int32]  # [B + 1]
    lens: npt.NDArray[np.int32]  # [B]
    positions: npt.NDArray[np.int32]  # [E]
    slots: npt.NDArray[np.int64]  # [E]
    tables: npt.NDArray[np.int32]  # [B, MB]
    num_blocks: int  # of the scratch

    @property
    def num_states(self) -> int:
        return len(self.slots)


def lay_out(lens: Sequence[int], block_size: int = SCRATCH_BLOCK_SIZE) -> EncoderLayout:
    """Inputs of so many states each, in blocks of their own."""
    counts = np.asarray(lens, np.int32)
    blocks = -(-counts // block_size)
    first_block = np.cumsum(blocks) - blocks  # [B]
    columns = np.arange(blocks.max(initial=1))
    tables = np.where(columns < blocks[:, None], first_block[:, None] + columns, 0)
    query_start = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    slots = np.repeat(first_block.astype(np.int64) * block_size, counts) + positions
    return EncoderLayout(
        query_start=query_start.astype(np.int32),
        lens=counts,
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int64),
        tables=np.ascontiguousarray(tables, np.int32),
        num_blocks=max(1, int(blocks.sum())),
    )
