"""A runner of a rank's part, as one of the whole model: blocks and states come and go whole, and lie in parts.

Every rank has one, and all are told the same. What is read is whole on the first rank, and nothing on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from bequest.engine.layers.ranks import Ranks
from bequest.engine.models.cutting import Cutting
from bequest.engine.runner.block_parts import BlockParts
from bequest.engine.types import MaskSource, PendingStep, Runner, StepPlan, StepResult
from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    PendingBlocks,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue

Join = Callable[[Sequence[BlockBytes]], BlockBytes]


def as_whole(runner: Runner, cutting: Cutting | None, ranks: Ranks) -> Runner:
    """A runner that `cutting` has made one of a part."""
    return runner if cutting is None else PartRunner(runner, BlockParts(cutting, runner.block_layout), ranks)


class PartRunner:
    def __init__(self, runner: Runner, parts: BlockParts, ranks: Ranks) -> None:
        self._runner = runner
        self._parts = parts
        self._ranks = ranks

    @property
    def block_layout(self) -> BlockLayout:
        return self._parts.whole

    def read_blocks(self, read: BlockRead) -> BlockBytes | PendingBlocks:
        return self._whole(self._runner.read_blocks(read), self._parts.join)

    def write_blocks(self, write: BlockWrite) -> PendingBlocks | None:
        return self._runner.write_blocks(replace(write, content=self._parts.cut(write.content)))

    def read_states(self, read: StateRead) -> BlockBytes | PendingBlocks:
        return self._whole(self._runner.read_states(read), self._parts.join_states)

    def write_states(self, write: StateWrite) -> PendingBlocks | None:
        return self._runner.write_states(replace(write, content=self._parts.cut_states(write.content)))

    def _whole(self, part: BlockBytes | PendingBlocks, join: Join) -> BlockBytes | PendingBlocks:
        pending = _PendingWhole(part, join, self._ranks)
        return pending.wait() if isinstance(part, np.ndarray) else pending

    # --- as the runner of the part -------------------------------------------------------------------------------

    def connect(self, masks: MaskSource) -> None:
        self._runner.connect(masks)

    def register(self, handle: int, catalogue: Catalogue) -> None:
        self._runner.register(handle, catalogue)

    def release(self, handle: int) -> None:
        self._runner.release(handle)

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        self._runner.register_adapter(handle, weights)

    def release_adapter(self, handle: int) -> None:
        self._runner.release_adapter(handle)

    def launch(self, plan: StepPlan) -> StepResult | PendingStep:
        return self._runner.launch(plan)

    def is_quick(self, plan: StepPlan) -> bool:
        return self._runner.is_quick(plan)

    def close(self) -> None:
        self._runner.close()


class _PendingWhole:
    """The parts of all ranks. They wait for them in the order in which they were told to read."""

    def __init__(self, part: BlockBytes | PendingBlocks, join: Join, ranks: Ranks) -> None:
        self._part, self._join, self._ranks = part, join, ranks

    def wait(self) -> BlockBytes:
        part = self._part if isinstance(self._part, np.ndarray) else self._part.wait()
        parts = self._ranks.bytes_of_all(part)
        return part[:0] if parts is None else self._join(parts)
