"""What the device thread runs."""

from __future__ import annotations

from typing import Protocol

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


class Runner(Protocol):
    """What the device thread runs. The paged fake of the tests and the real runners implement it."""

    def launch(self, plan: StepPlan) -> StepResult | PendingStep: ...
    def is_quick(self, plan: StepPlan) -> bool:
        """Whether to launch it takes less time than to wake threads: `launch` gives a PendingStep, and soon."""
        ...

    def close(self) -> None: ...
