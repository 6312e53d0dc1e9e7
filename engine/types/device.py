"""What the device thread runs, and the channel that masks come on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bequest.engine.types.adapter import AdapterWeights
from bequest.engine.types.arrays import IntArray
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    KeptMemory,
    PendingBlocks,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.plan import StepPlan
from bequest.engine.types.result import StepResult


class PendingStep(Protocol):
    """A step that is queued on a device. Called from another thread than the one that launched it."""

    @property
    def slow_to_read(self) -> bool:
        """Whether reading its results takes so long that the device should not wait for that."""
        ...

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        ...

    def wait_computed(self) -> None:
        """Blocks until the device has done what later steps wait for."""

    def wait(self) -> StepResult:
        """Blocks until it is done. Called once."""


def mask_words(vocab_size: int) -> int:
    """Words of a token mask: bit i % 32 of word i / 32 says whether token i may come."""
    return -(-vocab_size // 32)


class ComingMasks(Protocol):
    """The token masks of one step, which may not be made yet."""

    def send_to(self, place: IntArray, then: Callable[[], None]) -> None:
        """Has them written to `place` [rows, words] and calls `then`, once: now, if they are there, or else on the
        thread that makes them."""

    def wait(self) -> IntArray:
        """[rows, words]; blocks until they are there."""
        ...


class MaskSource(Protocol):
    """Where a runner gets the masks that plans name."""

    def of(self, number: int) -> ComingMasks: ...


class Runner(Protocol):
    """What the device thread runs. The paged fake of the tests and the real runners implement it.

    `connect` is called once, before anything else. The other calls come one after the other.
    """

    def connect(self, masks: MaskSource) -> None: ...
    def register(self, handle: int, catalogue: Catalogue) -> None:
        """Plans from now on may name the catalogue by this handle."""

    def release(self, handle: int) -> None:
        """They do not any more. Rows that were opened under it keep it."""

    def register_adapter(self, handle: int, weights: AdapterWeights) -> None:
        """Plans from now on may name the adapter by this handle."""

    def release_adapter(self, handle: int) -> None:
        """They do not any more."""

    def launch(self, plan: StepPlan) -> StepResult | PendingStep: ...
    def is_quick(self, plan: StepPlan) -> bool:
        """Whether to launch it takes less time than to wake threads: `launch` gives a PendingStep, and soon."""
        ...

    @property
    def block_layout(self) -> BlockLayout: ...
    def read_blocks(self, read: BlockRead) -> BlockBytes | PendingBlocks: ...
    def write_blocks(self, write: BlockWrite) -> PendingBlocks | None:
        """None: it is done."""

    def read_states(self, read: StateRead) -> BlockBytes | PendingBlocks:
        """[N, bytes of a state]"""

    def write_states(self, write: StateWrite) -> PendingBlocks | None:
        """None: it is done."""

    def close(self) -> None: ...


@runtime_checkable
class SleepyRunner(Protocol):
    """A runner that can do without its memory for a while."""

    def sleep(self, kept: KeptMemory) -> int:
        """Gives memory back, that of weights too: so many bytes. Nothing is launched until it wakes."""

    def wake(self) -> None:
        """All of it is back, or nothing: raises MemoryError."""


@runtime_checkable
class YieldingRunner(Protocol):
    """A runner that can launch other steps in the midst of one."""

    def launch_yielding(self, plan: StepPlan, between: Callable[[], None]) -> PendingStep:
        """As `launch`. Calls `between`, which may call `launch`, whenever the device has little left to do of the step.

        REQUIRES: the plan yields, and what is launched between may pass it (engine/passing.py)"""
        ...


@runtime_checkable
class WatchedRunner(Protocol):
    """A runner that needs other processes, which may end."""

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        """Calls it, on any thread, when one has ended that was not told to."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A catalogue that plans behind this name by a handle."""

    handle: int
    catalogue: Catalogue

    def tell(self, runner: Runner) -> None:
        runner.register(self.handle, self.catalogue)


@dataclass(frozen=True, slots=True)
class Release:
    """A handle that no plan behind this names."""

    handle: int

    def tell(self, runner: Runner) -> None:
        runner.release(self.handle)


@dataclass(frozen=True, slots=True)
class AdapterRegistration:
    """An adapter that plans behind this name by a handle."""

    handle: int
    weights: AdapterWeights

    def tell(self, runner: Runner) -> None:
        runner.register_adapter(self.handle, self.weights)


@dataclass(frozen=True, slots=True)
class AdapterRelease:
    """The handle of an adapter that no plan behind this names."""

    handle: int

    def tell(self, runner: Runner) -> None:
        runner.release_adapter(self.handle)


Change = Registration | Release | AdapterRegistration | AdapterRelease
