"""The device thread: launches plans in order; results go back to the event loop. It owns everything on the device.

The threads exchange StepPlan and StepResult, which are data, registrations of what plans name by handles, and the
bytes of blocks; so there are no locks. A CPU runner has computed its result when `launch` returns. A GPU runner has
only queued the work: a second thread waits for it, so that the next plan can be queued meanwhile.

A step that yields lets others pass: the runner asks between its layers who wants to (engine/passing.py). Its result has
many hidden states, so a third thread reads it, and the results of those behind it do not wait for that.

A quick step of a device that had nothing to do is not handed around: to wake two threads would take a good part of the
time that it needs. The event loop, to which the runner is lent while nothing is launched, launches it and looks for its
result whenever it comes around, until something else is launched. Beams wait for the results of their steps, and where
many search, the loop is what all of them wait for: a thread that launches would take turns with it at the interpreter.
So the loop launches a step of beams behind another one that it has launched itself. Where it only looks for the result
it says so: nobody comes who could join a step, and the next one can be launched.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from bequest.engine.errors import EngineError
from bequest.engine.passing import Footprint, Queue
from bequest.engine.types import PendingStep, Registration, Release, Runner, StepPlan, StepResult
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    BytesMove,
    PendingBlocks,
    StateRead,
    StateWrite,
)
from bequest.engine.types.device import Change, SleepyRunner, WatchedRunner, YieldingRunner

T = TypeVar("T")

_PATIENCE = 0.02  # seconds that the event loop looks for a result before a thread waits for it
_QUIET = 5e-5  # seconds between two looks of a loop that does nothing else
_QUIET_LOOKS = 3  # in a row, until it is taken for quiet: a request passes it in several turns
_LOOK = 0.002  # seconds between looks whether a thread has ended
_LOOK_PASSING = 0.0003  # the same of a step that has passed another
_MOST_PASSING = 8  # steps between two parts of one that yields


@dataclass(frozen=True, slots=True)
class Probe:
    """Goes the way of a plan and does nothing."""

    passed: Callable[[None], None]


@dataclass(frozen=True, slots=True)
class Errand(Generic[T]):
    """Something that the runner does between two plans, which may take seconds and may fail."""

    work: Callable[[Runner], T]
    settle: Callable[[T | MemoryError], None]  # on the event loop

    def run(self, runner: Runner) -> T | MemoryError:
        try:
            return self.work(runner)
        except MemoryError as error:
            return error


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of blocks or states that are read or written between two plans."""

    move: BytesMove
    settle: Callable[[BlockBytes], None]  # on the event loop, with what was read

    def begin(self, runner: Runner) -> BlockBytes | PendingBlocks:
        match self.move:
            case BlockRead():
                return runner.read_blocks(self.move)
            case StateRead():
                return runner.read_states(self.move)
            case BlockWrite():
                pending = runner.write_blocks(self.move)
            case StateWrite():
                pending = runner.write_states(self.move)
        return self.move.content[:0] if pending is None else pending


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    transfer: Transfer
    blocks: PendingBlocks


@dataclass(frozen=True, slots=True)
class _Yielded:
    """A step that yielded, all of which is queued on the device."""

    step: PendingStep


_Item = Change | Probe | Transfer | Errand[Any]  # beside plans
_Launched = PendingStep | PendingTransfer | Probe | _Yielded


class DeviceThread:
    """Runs a Runner. What it is told to call is called on the event loop, results in the order of the plans; but
    `on_arrival` on the thread that has the result, with what tells the event loop where that is all it has to do."""

    def __init__(
        self,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        on_arrival: Callable[[StepResult, Callable[[], None] | None], None],
        on_result: Callable[[StepResult], None],
        on_computed: Callable[[None], None],
        on_failure: Callable[[BaseException], None],
        on_quiet: Callable[[], None],
    ) -> None:
        """`on_computed`: the device is done with the oldest step, whose result takes a while to read. `on_quiet`: the
        loop has nothing to do but to look for a result."""
        self._runner = runner
        self._loop = loop
        self._on_arrival = on_arrival
        self._on_result = on_result
        self._on_computed = on_computed
        self._on_failure = on_failure
        self._on_quiet = on_quiet
        self._plans: Queue[_Item] = Queue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()  # that yielded, and are to be read
        self._num_transfers = 0  # that the thread may be at, though no plan is launched
        self._errands: set[asyncio.Future[Any]] = set()  # that somebody waits for
        self._given_up: EngineError | None = None
        self._watched: deque[PendingStep] = deque()  # by the event loop; nothing else is launched
        self._patient_until = 0.0
        self._looked_at = 0.0
        self._quiet_looks = 0  # in a row, at the oldest of them
        self._thread = threading.Thread(target=self._launch_all, name="bequest-device", daemon=True)
        self._waiter = threading.Thread(target=self._wait_all, name="bequest-results", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="bequest-states", daemon=True)
        self._thread.start()
        self._waiter.start()
        self._reader.start()
        if isinstance(runner, WatchedRunner):
            runner.watch(partial(self._post, on_failure))

    def launch(self, plan: StepPlan, idle: bool, changes: Iterable[Registration | Release] = ()) -> None:
        """`idle`: every plan before has come back. `changes`: of what the plan may name, before it."""
        told = False
        for change in changes:
            self._put(change)
            told = True
        lent = idle or (len(self._watched) > 0 and plan.is_awaited)
        if told or not lent or self._num_transfers or not self._runner.is_quick(plan):
            self._put(plan)
            return
        step = self._runner.launch(plan)
        assert not isinstance(step, StepResult)
        self._watched.append(step)
        if len(self._watched) == 1:
            self._look_soon()

    @property
    def loop_is_busy(self) -> bool:
        """Whether the loop looks for a result and has other things to do meanwhile, as far as it can tell."""
        return len(self._watched) > 0 and self._quiet_looks < _QUIET_LOOKS

    def tell(self, change: Change) -> None:
        """Behind everything launched before, and before everything launched later."""
        self._put(change)

    @property
    def can_sleep(self) -> bool:
        return isinstance(self._runner, SleepyRunner)

    @property
    def block_layout(self) -> BlockLayout:
        return self._runner.block_layout

    def transfer(self, move: BytesMove, then: Callable[[BlockBytes], None]) -> None:
        """Behind everything launched before, and before everything launched later."""

        def settle(content: BlockBytes) -> None:
            self._num_transfers -= 1
            then(content)

        self._num_transfers += 1
        self._put(Transfer(move, settle))

    async def errand(self, work: Callable[[Runner], T]) -> T:
        """Behind everything launched before. Raises MemoryError if it does; any other error ends the engine. Raises
        what it was given up with."""
        if self._given_up is not None:
            raise self._given_up
        settled: asyncio.Future[T | MemoryError] = self._loop.create_future()

        def settle(value: T | MemoryError) -> None:
            self._num_transfers -= 1
            if not settled.done():
                settled.set_result(value)

        self._errands.add(settled)
        self._num_transfers += 1  # the runner is not the event loop's meanwhile, even if the caller leaves
        self._put(Errand(work, settle))
        try:
            result = await settled
        finally:
            self._errands.discard(settled)
        if isinstance(result, MemoryError):
            raise result
        return result

    def give_up(self, error: EngineError) -> None:
        """Nothing comes back any more: who waits for an errand is told."""
        self._given_up = error
        for errand in [errand for errand in self._errands if not errand.done()]:
            errand.set_exception(error)

    async def probe(self) -> None:
        """Returns when everything launched before has come back."""
        passed: asyncio.Future[None] = self._loop.create_future()
        self._put(Probe(lambda value: None if passed.done() else passed.set_result(value)))
        await passed

    async def stop(self, timeout: float) -> None:  # noqa: ASYNC109 - a join, not a task, is bounded
        """Lets the launched plans finish and ends the threads. One that hangs is left behind: it is a daemon."""
        self._put(None)
        await _ended(self._thread, timeout)
        await _ended(self._waiter, 1.0)  # it has nothing left when the other one has ended
        await _ended(self._reader, 1.0)

    def _put(self, plan: StepPlan | _Item | None) -> None:
        """Its result comes behind that of the watched step, which the thread that waits for results has to know."""
        self._look_no_more()
        self._plans.put(plan)

    def _look_no_more(self) -> None:
        while self._watched:
            self._launched.put(self._watched.popleft())

    def _look_soon(self) -> None:
        self._patient_until = self._loop.time() + _PATIENCE
        self._quiet_looks, self._looked_at = 0, 0.0
        self._loop.call_soon(self._look, self._watched[0])

    def _look(self, step: PendingStep) -> None:
        """Takes the result of the watched step, if it is there; else comes back when the loop has been around."""
        if not self._watched or self._watched[0] is not step:
            return  # a thread waits for it
        try:
            if not step.done:
                if self._loop.time() < self._patient_until:
                    self._loop.call_soon(self._look, step)
                    self._note_look(time.perf_counter())
                else:
                    self._look_no_more()
                return
            result = step.wait()
            self._on_arrival(result, None)
        except BaseException as error:
            self._on_failure(error)
            return
        self._watched.popleft()
        if self._watched:
            self._look_soon()
        self._on_result(result)

    def _note_look(self, now: float) -> None:
        is_quiet, self._looked_at = now - self._looked_at < _QUIET, now
        self._quiet_looks = self._quiet_looks + 1 if is_quiet else 0
        if self._quiet_looks == _QUIET_LOOKS:
            self._on_quiet()

    def _launch_all(self) -> None:
        try:
            while (plan := self._plans.get()) is not None:
                if isinstance(plan, Change):
                    plan.tell(self._runner)
                    continue
                if isinstance(plan, Transfer):
                    self._transfer(plan)
                    continue
                if isinstance(plan, Errand):
                    self._post(plan.settle, plan.run(self._runner))
                    continue
                if isinstance(plan, Probe):
                    self._launched.put(plan)
                else:
                    self._launch(plan)
        except BaseException as error:
            self._post(self._on_failure, error)
        finally:
            self._launched.put(None)
            self._waiter.join()
            self._reader.join()
            self._runner.close()

    def _launch(self, plan: StepPlan) -> None:
        if plan.yields and isinstance(self._runner, YieldingRunner):
            ahead = Footprint(plan, self._block_size)
            self._launched.put(_Yielded(self._runner.launch_yielding(plan, partial(self._let_pass, ahead))))
            return
        step = self._runner.launch(plan)
        if isinstance(step, StepResult):
            self._on_arrival(step, None)
            self._post(self._on_result, step)
        else:
            self._launched.put(step)

    def _let_pass(self, ahead: Footprint) -> None:
        """Launches steps that may pass one that is launched in part. Streams have a step after the other, so the device
        is left to them until one has ended and no other has come; but now and then it goes on with the part."""
        last: PendingStep | None = None
        for _ in range(_MOST_PASSING):
            while (plan := self._plans.take_passing(ahead, self._block_size)) is None:
                if last is None or not self._hears_before(last):
                    return
            step = self._runner.launch(plan)
            assert not isinstance(step, StepResult), "who yields has queued its steps"
            self._launched.put(step)
            last = step

    def _hears_before(self, end: PendingStep) -> bool:
        """Whether it is told something before a step has ended."""
        while not end.done:
            if self._plans.wait(_LOOK_PASSING):
                return True
        return False

    @property
    def _block_size(self) -> int:
        return self._runner.block_layout.shape[-2]

    def _transfer(self, transfer: Transfer) -> None:
        blocks = transfer.begin(self._runner)
        if isinstance(blocks, np.ndarray):
            self._post(transfer.settle, blocks)
        else:
            self._launched.put(PendingTransfer(transfer, blocks))

    def _wait_all(self) -> None:
        try:
            while (step := self._launched.get()) is not None:
                if isinstance(step, Probe):
                    self._post(step.passed, None)
                    continue
                if isinstance(step, PendingTransfer):
                    self._post(step.transfer.settle, step.blocks.wait())
                    continue
                if isinstance(step, _Yielded):
                    step.step.wait_computed()
                    self._computed.put(step.step)
                    continue
                if step.slow_to_read:
                    step.wait_computed()
                    self._post(self._on_computed, None)
                result = step.wait()
                self._on_arrival(result, partial(self._post, self._on_result, result))
        except BaseException as error:
            self._post(self._on_failure, error)
        finally:
            self._computed.put(None)

    def _read_all(self) -> None:
        try:
            while (step := self._computed.get()) is not None:
                self._post(self._on_result, step.wait())
        except BaseException as error:
            self._post(self._on_failure, error)

    def _post(self, callback: Callable[[T], None], value: T) -> None:
        post(self._loop, partial(callback, value))


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls it on the loop, from whichever thread. A loop that is closed: the process is going down, and nobody waits
    for this."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


async def _ended(thread: threading.Thread, timeout: float) -> None:  # noqa: ASYNC109 - a join, not a task, is bounded
    """Joins it. Not in another thread: at the end of the interpreter none can be started any more."""
    end = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < end:  # noqa: ASYNC110 - a thread sets no asyncio.Event
        await asyncio.sleep(_LOOK)
