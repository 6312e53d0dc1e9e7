"""Runs batches beside everything else: lines begin where there is room, tenants in turn, each one's oldest batch first.

All tasks are made by the runner's own. A handler only leaves word, so no task inherits the request that it came with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from bequest.server.access.keys import Caller
from bequest.server.batches.answering import ENDPOINTS, NotNow, outcome_of
from bequest.server.batches.lines import LineLimits, Lines, WrongLines, checked_lines
from bequest.server.batches.objects import why_unkept
from bequest.server.batches.progress import Progress
from bequest.server.context import Context
from bequest.server.operation.batch_figures import BatchLoad
from bequest.server.stores.batches import Batch, Disk, Status
from bequest.server.wire.errors import ApiError

_log = logging.getLogger("bequest.server")

_PATIENCE = 5.0  # seconds that the ends of batches get when the server ends
_LOOK = 1.0  # seconds between looks at what expires, and behind a full queue
_BESIDE_OTHERS = 8  # part of the places that lines have while other requests are open
_CANCELLED = ("batch_cancelled", "The batch was cancelled before this request was executed.")
_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_KEY_GONE = ("invalid_api_key", "The API key that made this batch is not valid any more.")
_NOT_KEPT = ("batch_failed", "The batch failed before this request was executed.")


class Running:
    """A batch whose lines run, or wait to."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.progress: Progress | None = None  # None: its input is being checked
        self.tasks: set[asyncio.Task[None]] = set()
        self.ending: asyncio.Task[None] | None = None

    @property
    def has_more(self) -> bool:
        return self.progress is not None and self.ending is None and self.progress.has_more


class BatchRunner:
    def __init__(self, context: Context, disk: Disk) -> None:
        self._context = context
        self._disk = disk
        self._running: dict[str, Running] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()  # tenants, the one whose turn is next first
        self._new = disk.batches.unfinished()
        self._wake = asyncio.Event()
        self._rest_until = 0.0  # time.monotonic: the queue was full
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.num_lines = 0  # that run
        context.metrics.batches.load = self._load

    def _load(self) -> BatchLoad:
        batches = [running.batch for running in self._running.values()]
        left = sum(batch.total - batch.completed - batch.failed for batch in batches)
        return BatchLoad(len(batches) + len(self._new), self.num_lines, left - self.num_lines)

    # --- called by handlers

    async def add(self, batch: Batch) -> None:
        """It is on the disk when this returns. It runs even if the caller leaves meanwhile: it may be there."""
        await asyncio.shield(asyncio.ensure_future(self._add(batch)))

    async def _add(self, batch: Batch) -> None:
        await self._disk.batches.create(batch)
        self._new.append(batch)
        self._wake.set()

    def look(self) -> None:
        """A batch's status was changed."""
        self._wake.set()

    # --- life

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Lines that run are given up: they begin anew after a restart. What is answered stays answered."""
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping.set()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for running in list(self._running.values()):
            await self._give_up(running)
        endings = [running.ending for running in self._running.values() if running.ending is not None]
        if endings:
            await asyncio.wait(endings, timeout=_PATIENCE)

    async def _run(self) -> None:
        swept = 0.0
        while True:
            self._wake.clear()
            self._admit()
            self._end_some()
            self._begin_lines()
            if time.monotonic() - swept > 60:
                swept = time.monotonic()
                await self._sweep()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._wake.wait()

    async def _sweep(self) -> None:
        try:
            for file in self._disk.files.expired():
                if self._disk.batches.reader_of(file.id) is None:
                    await self._disk.files.delete(file)
            await self._disk.batches.forget_old()
        except OSError:
            _log.exception("expired files could not be removed")

    def _admit(self) -> None:
        for batch in self._new:
            running = self._running[batch.id] = Running(batch)
            self._turns.setdefault(batch.tenant)
            self._spawn(running, self._prepare(running))
        self._new = []

    # --- lines

    def _begin_lines(self) -> None:
        if time.monotonic() < self._rest_until or self._context.engine.state != "ready":
            return
        most = self._most_lines()
        while self.num_lines < most and (running := self._next()) is not None:
            assert running.progress is not None
            caller = self._context.gate.named(running.batch.key, running.batch.tenant)
            if caller is None:
                self._end(running, "failed", *_KEY_GONE)
                continue
            index = running.progress.take()
            assert index is not None
            self.num_lines += 1
            self._spawn(running, self._line(running, running.progress, caller, index))

    def _most_lines(self) -> int:
        """What waits in the queue waits for room, and lines would wait behind it."""
        most = self._context.config.batch_concurrency
        if self.num_lines and self._context.engine.load().waiting:
            return 0
        return max(1, most // _BESIDE_OTHERS) if self._context.admission.total_open else most

    def _next(self) -> Running | None:
        """The oldest batch with lines of the tenant whose turn it is."""
        for tenant in list(self._turns):
            self._turns.move_to_end(tenant)
            for running in self._running.values():
                if running.batch.tenant == tenant and running.has_more:
                    return running
        return None

    async def _line(self, running: Running, progress: Progress, caller: Caller, index: int) -> None:
        try:
            line = await self._disk.files.off_loop(lambda: progress.lines.read(index))
            outcome = await outcome_of(self._context, caller, ENDPOINTS[running.batch.endpoint], line)
            await progress.keep(index, outcome)
            self._context.metrics.batches.on_line(failed=outcome.failed)
        except NotNow:
            progress.put_back(index)
            self._rest_until = time.monotonic() + _LOOK
        except Exception as error:
            _log.error("batch %s cannot keep its answers: %s", running.batch.id, error)
            running.batch.errors = [why_unkept(error)]
            self._end(running, "failed", *_NOT_KEPT)
        finally:
            self.num_lines -= 1
            self._wake.set()

    def _spawn(self, running: Running, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        running.tasks.add(task)
        task.add_done_callback(lambda done: self._done(running, done))

    def _done(self, running: Running, task: asyncio.Task[None]) -> None:
        running.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("batch %s: %r", running.batch.id, error, exc_info=error)

    # --- beginnings and ends

    async def _prepare(self, running: Running) -> None:
        """Checks the input, again after a restart: where its lines begin is not written down."""
        batch, disk = running.batch, self._disk
        try:
            lines = await disk.files.off_loop(lambda: self._lines(batch))
            progress = await Progress.recovered(disk, batch, lines)
        except WrongLines as wrong:
            await self._refuse(running, wrong.errors)
        except (OSError, ValueError, KeyError, ApiError) as error:
            _log.error("batch %s cannot be read: %r", batch.id, error)
            message = "The batch's file or its answers cannot be read any more."
            await self._refuse(running, [{"code": "disk_error", "message": message, "param": None, "line": None}])
        else:
            if not await self._persist(batch, lambda: self._begin(batch)):
                return
            running.progress = progress
            told = f", {batch.completed + batch.failed} of them answered before" if batch.completed else ""
            _log.info("batch %s: %d lines for %s%s", batch.id, batch.total, batch.endpoint, told)
        finally:
            self._wake.set()

    def _lines(self, batch: Batch) -> Lines:
        """One that was taken goes on, whatever this server would take."""
        config, limits = self._context.config, LineLimits()
        if batch.status == "validating":
            limits = LineLimits(config.max_batch_lines, int(config.max_body_mb * 2**20))
        path = self._disk.files.path_of(self._disk.files.input_of(batch.tenant, batch.input_file_id))
        return checked_lines(path, batch.endpoint, limits)

    async def _refuse(self, running: Running, errors: list[dict[str, Any]]) -> None:
        """Nothing of it can run."""
        batch = running.batch
        batch.errors = errors
        if await self._persist(batch, lambda: self._enter(batch, "failed")):
            self._context.metrics.batches.on_end(batch.status)
            self._forget(running)
            _log.info("batch %s failed: %s", batch.id, errors[0]["message"])

    def _end_some(self) -> None:
        """Those that are complete, cancelled or out of time."""
        now = self._disk.files.clock()
        for running in self._running.values():
            progress = running.progress
            if progress is None:
                continue
            if running.batch.status == "cancelling":
                self._end(running, "cancelled", *_CANCELLED)
            elif progress.complete:
                self._end(running, "completed")
            elif now >= running.batch.expires_at:
                self._end(running, "expired", *_EXPIRED)

    def _end(self, running: Running, status: Status, code: str = "", message: str = "") -> None:
        if running.ending is None:
            running.ending = asyncio.create_task(self._ended(running, status, code, message))

    async def _ended(self, running: Running, status: Status, code: str, message: str) -> None:
        batch = running.batch
        await self._give_up(running)
        if await self._persist(batch, lambda: self._write_end(running, status, code, message)):
            self._context.metrics.batches.on_end(batch.status)
            self._forget(running)
            _log.info("batch %s %s: %d answered, %d failed", batch.id, batch.status, batch.completed, batch.failed)

    async def _write_end(self, running: Running, status: Status, code: str, message: str) -> None:
        """Raises OSError. What was written stays so: it can be called again."""
        batch, progress = running.batch, running.progress
        assert progress is not None
        if not progress.complete:
            await progress.refuse_rest(code, message)
        if status == "completed":
            await self._enter(batch, "finalizing")
        if code == _KEY_GONE[0]:
            batch.errors = [{"code": code, "message": message, "param": None, "line": None}]
        await progress.to_files()
        await self._enter(batch, status)

    async def _begin(self, batch: Batch) -> None:
        if batch.status == "validating":  # it may be cancelled already
            await self._enter(batch, "in_progress")

    async def _enter(self, batch: Batch, status: Status) -> None:
        """It has this status on the disk when this returns. Raises OSError, and then it has the one from before."""
        before = batch.status, batch.times
        batch.enter(status, self._disk.files.clock())
        try:
            await self._disk.batches.save(batch)
        except OSError:
            if batch.status == status:  # it was not cancelled meanwhile
                batch.status, batch.times = before
            raise

    async def _persist(self, batch: Batch, write: Callable[[], Awaitable[None]]) -> bool:
        """Repeats `write` until the disk takes it: a disk that is full has room again some day, and its clients wait
        for the batch. False: the server ends before."""
        told = False
        while True:
            try:
                await write()
                return True
            except OSError as error:
                if not told:
                    _log.error("batch %s cannot be written: %s; it is tried again", batch.id, error)
                told = True
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._stopping.wait()
                return False

    async def _give_up(self, running: Running) -> None:
        """Its lines do not run any more, and what they came to is on the disk."""
        tasks = list(running.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if running.progress is not None:
            await running.progress.settled()

    def _forget(self, running: Running) -> None:
        del self._running[running.batch.id]
        tenant = running.batch.tenant
        if not any(other.batch.tenant == tenant for other in self._running.values()):
            self._turns.pop(tenant, None)
        self._wake.set()


BATCH_RUNNER: web.AppKey[BatchRunner] = web.AppKey("batch_runner", BatchRunner)
