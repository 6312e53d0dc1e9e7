"""Steps at the device. Owned by the event-loop thread.

They come back in the order of their launches, but for those that yield: others pass them (engine/passing.py).
"""

from __future__ import annotations

import asyncio

from bequest.engine.state.launch import Launch


class LaunchedSteps:
    def __init__(self, depth: int) -> None:
        """`depth`: of steps that do not yield, so many are launched at once."""
        self._depth = depth
        self._steps: dict[int, Launch] = {}  # by number, in the order of their launches
        self.num_yielding = 0
        self._all_back = asyncio.Event()
        self._num_computed = 0  # of those that do not yield: the device is done with them

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        return self._num_ordered >= self._depth

    @property
    def behind(self) -> bool:
        """Whether a step that is launched now waits for another one."""
        return self._num_ordered > self._num_computed

    def add(self, launch: Launch) -> None:
        self._steps[launch.plan.step] = launch
        self._all_back.clear()
        self.num_yielding += launch.plan.yields

    def computed(self) -> None:
        """The device is done with the oldest that does not yield, and its result is being read."""
        self._num_computed += 1

    def take(self, step: int) -> tuple[Launch, bool]:
        """One has come back; whether it was known that the device is done with it. Of those that yield nobody is
        told."""
        launch = self._steps.pop(step)
        if not self._steps:
            self._all_back.set()
        if launch.plan.yields:
            self.num_yielding -= 1
            return launch, True
        earlier = next((number for number, other in self._steps.items() if not other.plan.yields), step)
        assert earlier >= step, "results come in the order of the plans"
        known = self._num_computed > 0
        self._num_computed -= known
        return launch, known

    def clear(self) -> None:
        self._steps.clear()
        self._all_back.set()
        self.num_yielding = self._num_computed = 0

    async def all_back(self) -> None:
        """Returns when none is at the device, or nobody waits for their results any more."""
        while self._steps:
            await self._all_back.wait()

    @property
    def _num_ordered(self) -> int:
        return len(self._steps) - self.num_yielding
