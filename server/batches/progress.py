"""What a batch has come to: which lines are answered, how many failed, what the answers cost.

Only what is on the disk counts. Several answers that come at the same time are written together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from bequest.server.batches.answering import Outcome, not_run
from bequest.server.batches.lines import Lines
from bequest.server.stores.batches import Batch, Disk, Tokens
from bequest.server.stores.disk import LineLog
from bequest.server.stores.files import StoredFile

_AT_ONCE = 1000  # lines that were not run, written together


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    """As one or the other endpoint names them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    completion_tokens_details: _Details = _Details()
    input_tokens_details: _Details = _Details()
    output_tokens_details: _Details = _Details()


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()
    model: str | None = None


class _Response(msgspec.Struct, frozen=True):
    body: _Body = _Body()


class _Written(msgspec.Struct, frozen=True):
    """What is read again of a line that was written."""

    custom_id: str
    response: _Response | None = None

    @classmethod
    def of(cls, line: bytes) -> _Written:
        return msgspec.json.decode(line, type=cls)


_Waiting = tuple[int, Outcome, "asyncio.Future[None]"]


class Progress:
    """Of a batch whose input was checked."""

    def __init__(self, disk: Disk, batch: Batch, lines: Lines) -> None:
        self.batch = batch
        self.lines = lines
        self._disk = disk
        self._answers = disk.batches.answers(batch)
        self._failures = disk.batches.failures(batch)
        self._done = bytearray(len(lines))
        self._next = 0
        self._again: list[int] = []  # lines that could not be taken
        self._waiting: list[_Waiting] = []  # to be written
        self._writing: asyncio.Future[None] | None = None

    @classmethod
    async def recovered(cls, disk: Disk, batch: Batch, lines: Lines) -> Progress:
        """With what the logs tell of the time before a restart."""
        progress = cls(disk, batch, lines)
        found = await disk.files.off_loop(progress._recover)
        batch.total, batch.completed, batch.failed, batch.tokens = len(lines), 0, 0, Tokens()
        for index, written, failed in found:
            progress._count(index, written, failed)
        for log, file_id in ((progress._answers, batch.output_id), (progress._failures, batch.error_id)):
            if not disk.files.knows(file_id):
                disk.files.budget.add(batch.tenant, log.num_bytes)
        return progress

    @property
    def complete(self) -> bool:
        return self.batch.completed + self.batch.failed == len(self.lines)

    def take(self) -> int | None:
        """The next line to run; None: all have begun."""
        if self._again:
            return self._again.pop()
        while self._next < len(self.lines) and self._done[self._next]:
            self._next += 1
        if self._next == len(self.lines):
            return None
        self._next += 1
        return self._next - 1

    @property
    def has_more(self) -> bool:
        if (index := self.take()) is None:
            return False
        self._again.append(index)
        return True

    def put_back(self, index: int) -> None:
        self._again.append(index)

    async def keep(self, index: int, outcome: Outcome) -> None:
        """The line is answered when this returns: it will not be run again. Raises OSError, or 429 where the disk has
        no room."""
        self._disk.files.budget.take(self.batch.tenant, len(outcome.line) + 1)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((index, outcome, kept))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        await kept

    async def settled(self) -> None:
        """Nothing is being written any more."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def refuse_rest(self, code: str, message: str) -> None:
        """The lines that were not run get an error each. REQUIRES: no line runs."""
        await self.settled()
        left = [index for index, done in enumerate(self._done) if not done]
        for begin in range(0, len(left), _AT_ONCE):
            some = left[begin : begin + _AT_ONCE]
            num_bytes = await self._disk.files.off_loop(partial(self._refuse, some, code, message))
            self._disk.files.budget.add(self.batch.tenant, num_bytes)
            for index in some:
                self._count(index, None, failed=True)

    async def to_files(self) -> None:
        """Makes files of the logs. Repeating it changes nothing."""
        batch = self.batch
        for log, file_id, kind in (
            (self._answers, batch.output_id, "output"),
            (self._failures, batch.error_id, "error"),
        ):
            if log.num_bytes:
                await self._disk.files.keep(self._file(log, file_id, kind))
        batch.output_file_id = batch.output_id if self._answers.num_bytes else None
        batch.error_file_id = batch.error_id if self._failures.num_bytes else None

    async def _write(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting, []
            await self._write_to(self._answers, [one for one in some if not one[1].failed])
            await self._write_to(self._failures, [one for one in some if one[1].failed])
        self._writing = None

    async def _write_to(self, log: LineLog, some: Sequence[_Waiting]) -> None:
        if not some:
            return
        lines = [outcome.line for _, outcome, _ in some]
        try:
            found = await self._disk.files.off_loop(lambda: _appended(log, lines))
        except OSError as error:
            self._disk.files.budget.add(self.batch.tenant, -sum(len(line) + 1 for line in lines))
            for _, _, kept in some:
                if not kept.done():
                    kept.set_exception(error)
            return
        for (index, outcome, kept), written in zip(some, found, strict=True):
            self._count(index, written, outcome.failed)
            if not kept.done():
                kept.set_result(None)

    def _refuse(self, indices: Sequence[int], code: str, message: str) -> int:
        """Returns the bytes that it wrote."""
        before = self._failures.num_bytes
        self._failures.append([not_run(self.lines.read(index).custom_id, code, message) for index in indices])
        return self._failures.num_bytes - before

    def _recover(self) -> list[tuple[int, _Written, bool]]:
        numbers = {custom_id: index for index, custom_id in enumerate(self.lines.custom_ids())}
        found = []
        for log, failed in ((self._answers, False), (self._failures, True)):
            for line in log.recover():
                written = _Written.of(line)
                found.append((numbers[written.custom_id], written, failed))
        return found

    def _count(self, index: int, written: _Written | None, failed: bool) -> None:
        batch = self.batch
        self._done[index] = 1
        if failed:
            batch.failed += 1
            return
        batch.completed += 1
        if written is None or written.response is None:
            return
        body, tokens = written.response.body, batch.tokens
        usage = body.usage
        batch.model = body.model
        tokens.input += usage.prompt_tokens + usage.input_tokens
        tokens.output += usage.completion_tokens + usage.output_tokens
        tokens.cached += usage.prompt_tokens_details.cached_tokens + usage.input_tokens_details.cached_tokens
        tokens.reasoning += (
            usage.completion_tokens_details.reasoning_tokens + usage.output_tokens_details.reasoning_tokens
        )

    def _file(self, log: LineLog, file_id: str, kind: str) -> StoredFile:
        batch, now = self.batch, int(self._disk.files.clock())
        lasts = batch.output_expires_after
        return StoredFile(
            id=file_id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=log.num_bytes,
            created_at=now,
            path=str(log.path.relative_to(self._disk.files.directory)),
            expires_at=None if lasts is None else now + lasts,
        )


def _appended(log: LineLog, lines: Sequence[bytes]) -> list[_Written]:
    log.append(lines)
    return [_Written.of(line) for line in lines]
