"""AsyncEngine: admit → schedule → launch → apply → deliver. Everything here runs on the event-loop thread.

There is no task: the engine moves when a request comes (`_pump`) or a result comes (`_on_result`). On a result it
applies, plans and launches first and then delivers, so that the device never waits for JSON. With `depth` 2 a step is
planned and launched while the one before it runs, towards its end if that takes long (policy/clock.py); with 1 the
loop is plain (plan, run, apply), which gives the same tokens and is the oracle of the pipelined one.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Literal

from bequest.engine.adapter_desk import AdapterDesk
from bequest.engine.constraints.mask_maker import MaskMaker
from bequest.engine.constraints.masks import MaskChannel
from bequest.engine.device import DeviceThread, post
from bequest.engine.errors import DeadlineExceeded, EngineDead, EngineDraining, EngineError, InternalError
from bequest.engine.estates import EstateDesk
from bequest.engine.inheritance.retention import Settlement
from bequest.engine.kept import Keeper
from bequest.engine.launched import LaunchedSteps
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.admission import check_admissible, check_room, seed_of
from bequest.engine.scheduling.limits import ExtractionLimits
from bequest.engine.scheduling.policy.pace import Pace
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.sleep import Sleep
from bequest.engine.state.contents import Contents
from bequest.engine.state.record import Record
from bequest.engine.state.sequence import Applied, Group, Lane
from bequest.engine.states.memory import StatesMemory
from bequest.engine.text.outlets import outlet_of, pass_on, quoted_texts
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import (
    Delta,
    ModelInfo,
    OutputMode,
    Request,
    Runner,
    Sink,
    StepResult,
)
from bequest.engine.types.adapter import NO_ADAPTERS, AdapterSource
from bequest.engine.types.blocks import BlockLayout
from bequest.engine.types.estate import NO_NOTES, Notes
from bequest.engine.types.image import Image
from bequest.engine.types.listening import CrossHeads, FloatRows, ListeningRunner
from bequest.engine.watching.observation import EngineLoad, Observer
from bequest.engine.watching.snapshot import Snapshot, load_of, take_snapshot
from bequest.engine.watching.stats import stats_of_request, stats_of_step, usage_of
from bequest.engine.watching.watchdog import StepWatchdog

log = logging.getLogger("bequest.engine")

State = Literal["ready", "draining", "dead"]


class AsyncEngine(Keeper):
    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        pipelined: bool = True,
        max_queued: int = 4096,
        seed: int = 0,
        step_timeout: float = 0.0,
        idle_sleep: float = 0.0,
        observer: Observer | None = None,
        fingerprint: Callable[[], str] = lambda: "",
        notes: Notes = NO_NOTES,
        adapters: AdapterSource = NO_ADAPTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Must be made inside a running event loop: it starts the device thread. `idle_sleep`: as in Sleep.
        `fingerprint`: of the weights.
        `notes`: how what the server keeps with records leaves with an estate."""
        super().__init__(scheduler, clock)
        self.info = info
        self.state: State = "ready"
        self.observer = observer
        self._tokenizer = tokenizer
        self._texts = quoted_texts(tokenizer)
        self._max_queued = max_queued
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        channel = MaskChannel(info.vocab_size)
        runner.connect(channel)
        self._masks = MaskMaker(channel)
        told = self._masks.take, self._on_result, self._on_computed, self._die, self._pump
        self._device = DeviceThread(runner, self._loop, *told)
        scheduler.wake = self._pump_soon
        scheduler.carry = lambda write: self._device.transfer(write, lambda content: None)
        self._groups: dict[str, Group] = {}
        self.adapters = AdapterDesk(self._device, scheduler, self._groups, adapters)
        self._estates = EstateDesk(info, scheduler, self._device, self.adapters, fingerprint, notes, clock)
        self._watchdog = StepWatchdog(self._loop, step_timeout, self._die)
        self._launched = LaunchedSteps(2 if pipelined else 1)
        self._wake_up: asyncio.TimerHandle | None = None  # to plan the step behind the one that runs
        self.num_steps = 0  # that came back
        self._arrivals = 0
        self._paces = {lane: Pace(scheduler.limits.tuning) for lane in Lane}
        self._deadlines: list[tuple[float, str]] = []  # heap
        self._pump_pending = self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._sleep = Sleep(
            scheduler,
            self._device,
            after=idle_sleep,
            is_idle=lambda: not self._groups,
            settled=self._settled,
            on_awake=self._pump_soon,
            on_stuck=self._fail_all,
        )

    @property
    def extraction_limits(self) -> ExtractionLimits:
        return self.scheduler.limits.extraction

    @property
    def contents(self) -> Contents:
        return self.scheduler.retention.contents

    @property
    def takes_embeds(self) -> bool:
        return self.scheduler.limits.takes_embeds

    @property
    def block_layout(self) -> BlockLayout:
        return self._device.block_layout

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, *, goes_on: bool = False) -> None:
        """Admits a request; `sink` gets its Deltas, the last one finished. or raises EngineError. `goes_on`: with a
        long answer, which began before others were refused."""
        self._check_open(goes_on)
        self._sleep.disturb()
        if request.id in self._groups:
            raise InternalError(f"request id {request.id} is in use")
        check_admissible(request, self.info, self.scheduler, self._max_queued, self._paces, self._clock())
        self.adapters.check(request.adapter)
        self._arrivals += 1
        seed, number = seed_of(request, self._seed), self._arrivals
        group = self.scheduler.new_group(request, sink, seed=seed, arrival_number=number, now=self._clock())
        self._states_memory.charge(group, self.info)
        try:
            self.retention.open(group)
        except EngineError:
            self._states_memory.release(group)
            raise
        self._groups[request.id] = group
        self._idle.clear()
        self._sleep.busy()
        self.scheduler.add(group, ChoiceOutput(request, 0, self._tokenizer, outlet_of(sink)))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
            self._timer.arm()
        self._pump_soon()

    def _check_open(self, goes_on: bool = False) -> None:
        if self.state == "draining" and (self._stopped or not goes_on):
            raise EngineDraining("The engine takes no new requests.", reason="closed")
        if self.state == "dead":
            raise EngineDead("The engine has failed.", reason="dead")

    def look_ahead(self, image: Image) -> None:
        """A request with this image is about to come. Where the device has nothing to do its tower looks at it now."""
        idle = self.state == "ready" and not self._launched and self._sleep.awake
        if idle and self.scheduler.images.look_ahead(image):
            self._pump()

    def abort(self, request_id: str) -> None:
        """Stops the work of a request at once; no Delta follows. Unknown and finished ids are fine."""
        group = self._groups.get(request_id)
        if group is not None:
            self._close(group, "abort")
        self._vault.abort(request_id)

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """The Deltas of a request as they come. Leaving the loop early aborts it. Raises the Delta's error."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self.submit(request, deltas.put_nowait)
        try:
            while True:
                delta = await deltas.get()
                if delta.error is not None:
                    raise delta.error
                yield delta
                if delta.finished:
                    return
        finally:
            self.abort(request.id)

    @property
    def _states_memory(self) -> StatesMemory:
        return self.scheduler.extractions.memory

    @property
    def num_open(self) -> int:
        return len(self._groups)

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.scheduler, self._groups.values(), self._clock(), self.block_layout)

    def expect_tenants(self, count: int) -> None:
        """So many may come: slots are kept for those who have not yet."""
        self.scheduler.waiting.expected_tenants = count

    def num_waiting(self, tenant: str) -> int:
        return self.scheduler.num_waiting_of(tenant)

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull if a generation of the tenant would not be let into the queue now."""
        lane = Lane.GENERATION
        check_room(tenant, lane, self.scheduler, self._max_queued, self._paces[lane], self._clock())

    def load(self) -> EngineLoad:
        return load_of(self.scheduler, self.adapters.load_now())

    # --- life ----------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - part of the contract, not a cancellation scope
        """Takes no new work and waits for the open requests; False if some were still open after `timeout`."""
        if self.state == "ready":
            self.state = "draining"
        end = self._clock() + timeout
        try:
            await asyncio.wait_for(self._nothing_open(), timeout)
        except TimeoutError:
            return False
        await self._write_leases(end)
        return True

    async def stop(self, grace: float = 10.0) -> None:
        """Ends at once: open requests get an error; what is launched gets `grace` seconds."""
        if self.state == "ready":
            self.state = "draining"
        self._stopped = True
        self._launched.clear()
        stopped = EngineDraining("The engine stopped before the request was finished.", reason="stopped")
        self._fail_all(stopped)
        self._vault.close()
        self._estates.close(stopped)
        self._timer.stop()
        self._sleep.stop()
        self._device.give_up(stopped)
        self._watchdog.stop()
        self._masks.stop()
        await self._device.stop(grace)
        # Results of the last launched steps may still be queued on the loop.
        await asyncio.sleep(0)

    async def probe(self) -> None:
        """Returns when the device has passed everything that was launched before. Never, if it hangs or has failed."""
        await self._device.probe()

    async def cross_weights(self, asked: CrossHeads) -> FloatRows:
        """Where heads of an encoder-decoder model look, as ListeningRunner has it; between two steps."""

        def work(runner: Runner) -> FloatRows:
            assert isinstance(runner, ListeningRunner)
            return runner.cross_weights(asked)

        async with self._sleep.kept_awake():
            return await self._device.errand(work)

    async def wait_dead(self) -> BaseException:
        """Returns when the engine has died, with the reason."""
        return await asyncio.shield(self._death)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pump_pending:
            self._pump_pending = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_pending = False
        if self.state == "dead" or self._stopped:
            return
        try:
            self._launch_steps()
        except Exception as error:
            self._die(error)

    def _launch_steps(self) -> None:
        launched = self._launched
        while not launched.full and self._sleep.awake:
            now = self._clock()
            if (seconds := self.scheduler.clock.seconds_until_due(now)) > 0:
                self._plan_later(now + seconds)
                return
            launch = self.scheduler.plan(now, launched.behind, launched.num_yielding, self._device.loop_is_busy)
            if launch is None:
                return
            idle = not launched
            launched.add(launch)
            self._masks.add(launch.plan, launch.masked)
            self.scheduler.clock.launched(launch.plan, now)
            self._device.launch(launch.plan, idle, launch.changes)
            self._watchdog.launched()

    def _plan_later(self, due: float) -> None:
        def wake() -> None:
            self.scheduler.clock.woken(self._clock() - due)
            self._pump()

        if self._wake_up is not None:
            self._wake_up.cancel()
        self._wake_up = self._loop.call_later(due - self._clock(), wake)

    def _on_computed(self, _: None) -> None:
        self._launched.computed()
        self.scheduler.clock.computed(self._clock())
        self._pump()

    def _on_result(self, result: StepResult) -> None:
        if self.state == "dead" or self._stopped:
            return
        try:
            now = self._clock()
            launch, known = self._launched.take(result.step)
            if not known:
                self.scheduler.clock.computed(now)
            self._watchdog.returned(len(self._launched))
            self.num_steps += 1
            applied = self.scheduler.apply(launch, result, now)
            # Before the next plan: drafts of a failed group may count as accepted, and nobody has taken their tokens.
            for group, error in applied.failed.items():
                self._fail(group, error)
            self._launch_steps()
            self._pass_on(applied)
            for group in applied.moved:
                if not group.closed:
                    self._deliver(group)
            if self.observer is not None:
                self.observer.on_step(stats_of_step(launch, result, applied))
        except Exception as error:
            self._die(error)

    def _pass_on(self, applied: Applied) -> None:
        """Tokens that are nothing but their own text, to where their sinks take them. Those that an outlet does not
        take are delivered like all others."""
        passed, tokens = applied.passed, applied.passed_tokens
        if not passed:
            return
        assert self._texts is not None, "a token has a text of its own"
        for number in pass_on(self._texts, passed, tokens):
            passed[number].output.push(tokens[number], None, True)
            applied.moved[passed[number].group] = None

    def _deliver(self, group: Group) -> None:
        finished = group.finished
        if not finished and group.request.output is OutputMode.FINAL:
            return
        first = not group.delivered
        choices = group.kind.take_deltas(first)
        if not finished and not first:  # nearly always
            if choices:
                self._send(group, Delta(group.request.id, choices))
            return
        told = group.prompt.logprobs if first else None
        prompt_logprobs = None if told is None else tuple(told.told)
        usage = usage_of(group) if finished else None
        group.delivered = True
        settlement, states = Settlement(), None
        retain, record = group.request.terms.retain, group.ties.record
        if finished:
            states = self._states_memory.take_states(group, self.info, self._give_back_states)
            settlement = self._close(group, "length" if group.kind.cut_short else "stop")
        delta = Delta(
            group.request.id,
            choices,
            first,
            prompt_logprobs,
            group.ties.cached_tokens if first else 0,
            usage,
            inheritance=group.ties.inheritance if first else None,
            retained=settlement.retained,
            retention_lost=settlement.lost if retain is not None else None,
            hidden_states=states,
        )
        self._vault.deliver(record, delta, retain, partial(self._send, group))

    def _send(self, group: Group, delta: Delta) -> None:
        try:
            group.sink(delta)
        except Exception:
            told = {"request_id": group.request.id}
            log.exception("the sink of a request failed; the request is dropped", extra=told)
            self._close(group, "error")

    def _give_back_states(self, num_bytes: int) -> None:
        """Whoever drops an answer may do so in another thread."""

        def give_back() -> None:
            self._states_memory.give_back(num_bytes)
            self._pump_soon()

        post(self._loop, give_back)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _close(self, group: Group, reason: Literal["stop", "length", "abort", "error"]) -> Settlement:
        """The one way out of the engine. Idempotent."""
        if group.closed:
            return Settlement()
        self.scheduler.close(group)
        settlement = self.retention.close(group, reason in ("stop", "length"), self._clock())
        if settlement.retained is not None:
            self._timer.arm()
        del self._groups[group.request.id]
        self._paces[group.kind.lane].departed(self._clock())
        if not self._groups:
            self._idle.set()
            self._sleep.idle()
        if self.observer is not None:
            self.observer.on_finish(stats_of_request(group, reason, self._clock()))
        # Both refer to the group: it would stay until a collector of cycles finds it, and every request would.
        group.sequences = []
        del group.kind
        if self.scheduler.num_waiting:
            # What it held may let a waiting request in, though no step is running.
            self._pump_soon()
        return settlement

    def _fail(self, group: Group, error: EngineError) -> None:
        if not group.closed:
            self._close(group, "error")
            self._send(group, Delta(group.request.id, error=error))

    def _fail_children(self, record: Record, error: EngineError) -> None:
        """Of those that wait: what they were promised is lost."""
        for group in list(self._groups.values()):
            if group.ties.parent is record and group.times.admitted is None:
                self._fail(group, error)

    def _fail_all(self, error: EngineError) -> None:
        for group in list(self._groups.values()):
            self._fail(group, error)

    def _die(self, error: BaseException) -> None:
        if self.state == "dead":
            return
        log.critical("the engine died: %r", error, exc_info=error)
        self.state = "dead"
        self._launched.clear()
        self._masks.stop()
        died = EngineDead("The engine has failed.", reason="died")
        self._estates.close(died)
        self._device.give_up(died)
        if not self._death.done():
            self._death.set_result(error)
        for group in list(self._groups.values()):
            try:
                self._close(group, "error")
            except Exception:
                log.exception("a request could not give back what it held", extra={"request_id": group.request.id})
            self._send(group, Delta(group.request.id, error=died))
        self._groups.clear()
        self._idle.set()

    def _next_due(self) -> float | None:
        due = [self.retention.leases.next_expiry(), *(deadline for deadline, _ in self._deadlines[:1])]
        return min((moment for moment in due if moment is not None), default=None)

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._groups.get(heapq.heappop(self._deadlines)[1])
            if group is not None and not group.closed:
                self._expire_group(group)
        self.retention.expire(now)
        if self.scheduler.num_waiting:
            self._pump_soon()

    def _expire_group(self, group: Group) -> None:
        """Nothing sampled yet: an error. Else what there is, as if it had reached its length."""
        if group.times.first_token is None:
            reason = "late_in_queue" if group.times.admitted is None else "late_in_prompt"
            message = "The deadline passed before anything was generated."
            self._fail(group, DeadlineExceeded(message, reason=reason, field="deadline"))
            return
        group.kind.cut()
        self._deliver(group)
        self._pump_soon()  # hidden states may be owed
