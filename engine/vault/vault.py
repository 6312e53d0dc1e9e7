"""Leases that outlive the process: written behind their requests, found again at the start, read when a child comes.

Event-loop thread; the disk is waited for in threads of its own, one that writes and some that read. Nobody waits for
them who holds a slot, a block of the device or the loop. A promise is kept or it is not made: `retained.durable` is
true only when the manifest is on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from bequest.engine.cache.tiers.files import Stored
from bequest.engine.cache.tiers.ticket import Ticket, failed
from bequest.engine.errors import EngineDraining, EngineError, InvalidEstate, ParentLost
from bequest.engine.estates import EstateDesk
from bequest.engine.inheritance.estate_images import arrived
from bequest.engine.inheritance.estates import Leaving
from bequest.engine.inheritance.retention import Retention
from bequest.engine.inheritance.warm import WARM_SECONDS, WarmEntry, WarmEstates
from bequest.engine.state.record import Record
from bequest.engine.types import Delta, Retain
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.estate import NO_BLOCK, ChoiceBytes, Estate, Manifest, StoredBlock
from bequest.engine.vault.borrowing import blocks_of_parent
from bequest.engine.vault.ends import HeldBack
from bequest.engine.vault.manifest import mark_of, new_segment
from bequest.engine.vault.reading import Reader
from bequest.engine.vault.shelving import BrokenBlocks, Found, Keep, Shelving, Unwanted
from bequest.engine.vault.waiting import WaitingLeases

log = logging.getLogger("bequest.estates")

_PIECE_BYTES = 4 << 20  # that the device thread copies between two steps
_MOST_BACKLOG = 512 << 20  # bytes that wait for the disk
_MOST_LOADED = 512 << 20  # bytes that were read and may be wanted again
_Key = tuple[Record | WarmEntry, int]  # a choice
_Send = Callable[[Delta], None]


class Vault:
    def __init__(
        self,
        shelf: Shelving,
        desk: EstateDesk,
        retention: Retention,
        *,
        wait: float,
        clock: Callable[[], float],
        on_lost: Callable[[Record, ParentLost], None],
        warm: bool = False,
    ) -> None:
        """`wait`: seconds that the end of an answer waits for the disk. `on_lost`: ends the children of a record.
        `warm`: what requests without a lease leave goes to files, too."""
        self._shelf = shelf
        self._desk = desk
        self._retention = retention
        self._wait = wait
        self._clock = clock
        self._on_lost = on_lost
        self._writer = ThreadPoolExecutor(1, "bequest-estates-write")
        self._reader = Reader(shelf, desk)
        self._backlog = 0
        self._storing: dict[Record, asyncio.Task[str | None]] = {}
        self._held_back = HeldBack(wait)
        self._reading: dict[_Key, Ticket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: EngineError | None = None
        self._loaded: OrderedDict[_Key, ChoiceBytes] = OrderedDict()  # least recently used first
        self._num_loaded = 0  # bytes
        self._waiting = WaitingLeases(desk.adapters.find_identity)
        self._keeps_warm = warm
        self._warm = WarmEstates(desk.block_size, self._withdraw)
        self.find = self._warm.find
        retention.on_discard = self._discard
        retention.awaited_adapter = self._waiting.adapter_of
        retention.books.give_way = self._warm.give_way

    # --- the start -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Lists the leases of earlier processes."""
        keep = await self._keep()
        scanned = await asyncio.get_running_loop().run_in_executor(self._writer, self._shelf.scan, keep)
        self._retention.is_torn = lambda tenant, reference: mark_of(tenant, reference) in scanned.torn
        for one in scanned.found:
            self._restore(one)
        for manifest in scanned.waiting:
            self._retention.books.enter(manifest)
            self._waiting.add(manifest)
        if scanned.found:
            log.info("%d leases of earlier processes are here", len(scanned.found) - len(self._warm))

    async def seek(self, tenant: str, reference: str) -> None:
        """A lease that another server has put into the store since then is known from now on, if there is one; and one
        whose adapter was loaded since then."""
        if self._retention.get(tenant, reference) is not None:
            return
        if (waiting := self._waiting.get(tenant, reference)) is not None:
            keep = await self._keep()
            if keep(waiting) is None and self._waiting.take(waiting):
                self._adopt(Found(waiting, lost=False))
                self._retention.books.strike(waiting)  # which the record holds from now on
        if self._shelf.is_shared:
            await self._seek_elsewhere(tenant, reference)

    async def _seek_elsewhere(self, tenant: str, reference: str) -> None:
        keep = await self._keep()
        try:
            found = await self._reader.find(tenant, reference, keep)
        except OSError as error:
            log.warning("%s was not asked for %s: %s", self._shelf.name, reference, error.strerror)
            return
        if found is not None and self._retention.get(tenant, found.manifest.deed.id) is None:
            self._adopt(found)

    def _adopt(self, found: Found) -> None:
        """As one of an earlier process. Who has its name here keeps it."""
        deed = found.manifest.deed
        if deed.name is not None and self._retention.get(deed.identity.tenant, deed.name) is not None:
            found = replace(found, manifest=replace(found.manifest, deed=replace(deed, name=None)))
        self._restore(found)

    async def _keep(self) -> Keep:
        """Leases of this engine's model that have not expired."""
        identity, wall = await self._desk.identity(""), self._retention.wall()
        adapters = {ref.identity: ref for ref in self._desk.adapters.refs}

        def why_not(manifest: Manifest) -> Unwanted | None:
            theirs = manifest.deed.identity
            adapter = adapters.get(theirs.adapter)
            ours = replace(identity, tenant=theirs.tenant, adapter="" if adapter is None else adapter.identity)
            if manifest.expires_at <= wall:
                return Unwanted("it has expired")
            differs = manifest.deed.identity.differs(ours)
            if differs == ["adapter"] and not manifest.warm:
                return Unwanted("its adapter is not loaded", yet=True)
            return Unwanted(f"it is of another model: {', '.join(differs)}") if differs else None

        return why_not

    def _restore(self, one: Found) -> None:
        here = arrived(one.manifest.deed, self._retention.contents)
        one = replace(one, manifest=replace(one.manifest, deed=here.deed))
        try:
            origin = self._desk.notes.from_bytes(one.manifest.deed.origin, here.ids)
        except InvalidEstate as error:
            log.warning("the conversation of %s is lost: %s", one.manifest.deed.id, error)
            origin = None
        if here.images:  # its notes name them
            deed = replace(here.deed, origin=self._desk.notes.to_bytes(origin))
            one = replace(one, manifest=replace(one.manifest, deed=deed))
        adapter = self._desk.adapters.find_identity(one.manifest.deed.identity.adapter)
        if one.manifest.warm:
            self._restore_warm(one, adapter)
        else:
            self._retention.restore(one.manifest, origin, adapter, here.images, lost=one.lost, now=self._clock())

    def _restore_warm(self, one: Found, adapter: AdapterRef | None) -> None:
        self._retention.books.enter(one.manifest)
        if one.lost or not self._keeps_warm:
            self._withdraw(one.manifest)
        else:
            self._warm.add(one.manifest, adapter)

    # --- what nobody was promised --------------------------------------------------------------------------------

    async def _store_warm(self, record: Record, leaving: Leaving) -> str | None:
        """Why it is not on the disk; None: it is. Until then it does not count: leases need not wait for it."""
        segment, books = self._new_segment(record), self._retention.books
        num_blocks = len(leaving.entries) + len(leaving.states) * self._desk.rows_of_state
        try:
            if not books.reserve(record, num_blocks + self._size_of_images(record)):
                raise _NoRoomError("files have no room for it")
            deed = leaving.deed(await self._desk.identity(record.tenant), self._desk.notes)
            blocks = tuple(await self._write(record, leaving, leaving.entries, segment))
            manifest = Manifest(deed=deed, expires_at=self._retention.wall() + WARM_SECONDS, blocks=blocks, warm=True)
            await asyncio.get_running_loop().run_in_executor(self._writer, self._shelf.publish, manifest)
        except (OSError, _NoRoomError, EngineError) as error:
            self._remove([segment])
            return str(error)
        finally:
            leaving.close()
            books.settle(record)
        books.enter(manifest, {segment: num_blocks})
        self._warm.add(manifest, record.identity.adapter)
        books.trim()
        return None

    def _keep_warm(self, record: Record) -> None:
        """Its blocks are held at once: somebody may need the room."""
        if record in self._storing or not self._warm.wants(record):
            return
        try:
            leaving = self._desk.leave(record)
        except EngineError:
            return  # they are gone
        task = self._storing[record] = asyncio.ensure_future(self._store_warm(record, leaving))
        task.add_done_callback(lambda _: self._storing.pop(record, None))

    def _withdraw(self, manifest: Manifest) -> None:
        free = self._retention.books.strike(manifest)
        with suppress(RuntimeError):  # at the end of the process: the next start removes it
            self._writer.submit(self._shelf.withdraw, manifest, free)

    # --- writing -------------------------------------------------------------------------------------------------

    def deliver(self, record: Record | None, delta: Delta, retain: Retain | None, send: _Send) -> None:
        """The last delta of a request whose lease shall last waits until that is on the disk, or for a while."""
        if record is None or delta.retained is None or retain is None or not retain.durable:
            send(delta)
            if self._keeps_warm and record is not None and delta.finished:
                self._keep_warm(record)
        else:
            # The task is there at once: who asks whether anybody reads from the device must hear of it.
            self._held_back.add(record, delta, delta.retained, self._store_soon(record), send)

    def abort(self, request_id: str) -> None:
        """Nobody waits for the end of its answer any more, nor hears of its lease; another may have its name."""
        record = self._held_back.drop(request_id)
        if record is not None and not record.gone:
            self._retention.set_ttl(record, None, self._clock())
            self._retention.free_name(record)

    async def flush(self, end: float) -> None:
        """Writes what is leased and fits, before the process ends; until `end`, on the clock."""
        for record in self.unwritten():
            self._store_soon(record)
        while (waiting := {*self._storing.values(), *self._held_back.waiting()}) and self._clock() < end:
            await asyncio.wait(waiting, timeout=end - self._clock())

    def unwritten(self) -> list[Record]:
        """What is leased and in memory alone."""
        return [record for record in self._retention.leases.holders() if record.leased and record.stored is None]

    async def settled(self) -> None:
        """Returns when no lease is read from the device."""
        while self._storing:
            await asyncio.wait(set(self._storing.values()))

    def update(self, record: Record) -> None:
        """Its lease ends at another time."""
        wall, before = record.lease.expires_at_wall, record.stored
        if before is None or wall is None:
            return
        record.stored = replace(before, expires_at=wall)
        with suppress(RuntimeError):  # at the end of the process: `written` tells whoever asks for more
            self._writer.submit(self._publish_quietly, record.stored)

    async def written(self) -> None:
        """Returns when files say what was decided before, or the disk is too slow for the end of an answer, too. Raises
        EngineDraining if nobody asks the disk any more."""
        for _ in range(2):  # what is published while its lease ends is withdrawn behind that
            if self._closed is not None:
                raise self._closed
            passed = asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)
            await asyncio.wait({passed}, timeout=self._wait / 2)

    def close(self) -> None:
        """Nobody waits for files any more: answers end as they are, and who waits for bytes is told that none come."""
        for task in (*self._storing.values(), *self._tasks):
            task.cancel()
        self._held_back.tell_all("the server ended meanwhile; it may still have come true")
        self._closed = EngineDraining("The engine stopped before the request was finished.", reason="stopped")
        for ticket in self._reading.values():
            ticket.settle(self._closed)
        self._reading.clear()
        self._writer.submit(self._shelf.close)
        self._writer.shutdown(wait=False)
        self._reader.close()

    def _store_soon(self, record: Record) -> asyncio.Task[str | None]:
        if record not in self._storing:
            task = self._storing[record] = asyncio.ensure_future(self._store(record))
            task.add_done_callback(lambda _: self._storing.pop(record, None))
        return self._storing[record]

    async def _store(self, record: Record) -> str | None:
        """Why the lease is not on the disk; None: it is."""
        try:
            identity = await self._desk.identity(record.tenant)
            leaving = self._desk.leave(record)
        except EngineError as error:
            self._retention.books.settle(record)
            return error.message
        segments = list[str]()  # of its parent
        try:
            parent, desk = self._parent_of(record), self._desk
            borrowed = blocks_of_parent(record, parent, leaving, desk.block_size, desk.num_strips)
            segments += dict.fromkeys(block.segment for block in borrowed.values())
            self._retention.books.hold(segments)
            if not await self._share(record, segments):
                borrowed = {}
            fresh = [entry for entry in leaving.entries if entry not in borrowed]
            deed = leaving.deed(identity, self._desk.notes)
            segment = self._new_segment(record)
            written = await self._write(record, leaving, fresh, segment)
            blocks = borrowed | dict(zip(fresh, written, strict=False))
            states = written[len(fresh) :]
            manifest = Manifest(
                deed=deed,
                expires_at=record.lease.expires_at_wall or 0.0,  # one that has ended meanwhile is not published
                blocks=(*(blocks[entry] for entry in leaving.entries), *states),
            )
            return await self._publish(record, manifest, {segment: len(written)} if written else {})
        except OSError as error:
            return f"{self._shelf.name} failed: {error.strerror}"
        except (_NoRoomError, EngineError) as error:
            return str(error)
        except Exception:  # the answer's end waits for a word
            log.exception("the lease of %s could not be written", record.id)
            return "it could not be written, for a reason that is in the server's log"
        finally:
            leaving.close()
            self._retention.books.settle(record)
            self._remove(self._retention.books.let_go(segments))

    async def _share(self, record: Record, segments: list[str]) -> bool:
        """Whether the segments of its parent stay for it. Raises OSError."""
        parent = self._parent_of(record)
        if not segments or parent is None or parent.stored is None:
            return not segments
        mark = mark_of(record.tenant, record.id)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._shelf.share, segments, parent.stored, mark)

    def _parent_of(self, record: Record) -> Record | None:
        lineage = record.identity.lineage
        return None if lineage is None else self._retention.get(record.tenant, lineage.parent)

    def _size_of_images(self, record: Record) -> int:
        return self._retention.books.size_of_images(image.content.nbytes for image in record.identity.images)

    def _new_segment(self, record: Record) -> str:
        return new_segment(mark_of(record.tenant, record.id), self._retention.wall())

    async def _write(self, record: Record, leaving: Leaving, entries: list[int], segment: str) -> list[StoredBlock]:
        """The blocks of a new segment: of entries, then of the states."""
        num_blocks = len(entries) + len(leaving.states) * self._desk.rows_of_state
        if not num_blocks:
            leaving.close()
            return []
        num_bytes = num_blocks * self._desk.block_bytes
        if not self._retention.books.fits(record, num_blocks + self._size_of_images(record)):
            raise _NoRoomError("files have no room for it")
        if self._backlog and self._backlog + num_bytes > _MOST_BACKLOG:
            raise _NoRoomError(f"{self._shelf.name} is too slow for what is written")
        self._backlog += num_bytes
        try:
            pieces = await self._desk.read(entries, _PIECE_BYTES)
            pieces += [await self._desk.read_state(state) for state in leaving.states]
            leaving.close()  # the bytes are here
            loop = asyncio.get_running_loop()
            sums = await loop.run_in_executor(self._writer, self._shelf.put, segment, pieces)
        finally:
            self._backlog -= num_bytes
        return [StoredBlock(segment=segment, index=i, checksum=crc) for i, crc in enumerate(sums)]

    async def _publish(self, record: Record, manifest: Manifest, sizes: dict[str, int]) -> str | None:
        self._retention.books.enter(manifest, sizes)
        try:
            if not record.leased:
                raise _NoRoomError("the lease ended while it was written")
            await asyncio.get_running_loop().run_in_executor(self._writer, self._shelf.publish, manifest)
            if not record.leased:
                raise _NoRoomError("the lease ended while it was written")
        except BaseException:
            self._withdraw(manifest)
            raise
        record.stored = manifest
        if record.lease.expires_at_wall != manifest.expires_at:
            self.update(record)
        return None

    # --- the end of a lease --------------------------------------------------------------------------------------

    def _discard(self, record: Record) -> None:
        manifest, record.stored = record.stored, None
        if manifest is None:
            return
        for choice in record.kept:
            self._unload((record, choice))
        self._withdraw(manifest)

    def _remove(self, segments: list[str]) -> None:
        with suppress(RuntimeError):  # as above
            if segments:
                self._writer.submit(self._shelf.remove, segments)

    def _publish_quietly(self, manifest: Manifest) -> None:
        try:
            self._shelf.publish(manifest)
        except OSError as error:
            log.warning("the new end of %s is not in %s: %s", manifest.deed.id, self._shelf.name, error.strerror)

    # --- reading -------------------------------------------------------------------------------------------------

    def content(self, holder: Stored, choice: int) -> ChoiceBytes | Ticket:
        assert isinstance(holder, Record | WarmEntry)
        key = holder, choice
        if isinstance(holder, WarmEntry):
            self._warm.touch(holder)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        if self._closed is not None:
            return failed(self._closed)
        if key not in self._reading:
            self._reading[key] = Ticket()
            assert holder.stored is not None
            task = asyncio.ensure_future(self._read(key, holder.stored))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._reading[key]

    def prefetch(self, record: Record) -> None:
        for choice in record.kept if record.stored is not None and not record.lost else ():
            self.content(record, choice)

    async def take_out(self, record: Record) -> Estate | None:
        """All that is in files. None: it is not. Raises ParentLost."""
        manifest = record.stored
        if manifest is None:
            return None
        try:
            content = await self._reader.rows(manifest, range(len(manifest.blocks)))
        except (OSError, BrokenBlocks) as error:
            self._lose(record, error)
            raise lost(record) from None
        return Estate(manifest.deed, content)

    async def reach(self, record: Record, choice: int) -> None:
        """Returns when the bytes of a choice of a lease in files are at hand. Raises ParentLost."""
        if record.stored is None or choice not in record.kept or self._is_in_memory(record, record.stored, choice):
            return
        if record.lost:
            raise lost(record)
        found = self.content(record, choice)
        if isinstance(found, Ticket):
            settled = asyncio.get_running_loop().create_future()
            found.then(lambda: None if settled.done() else settled.set_result(None))
            await settled
        if record.lost:
            raise lost(record)

    def _is_in_memory(self, record: Record, manifest: Manifest, index: int) -> bool:
        kept = record.kept[index]
        rows = next((c.rows for c in manifest.deed.choices if c.index == index), ())
        present = sum(row != NO_BLOCK for row in rows)
        return kept.table is not None or (record.encoder is None and self._desk.num_left(kept) >= present)

    async def _read(self, key: _Key, manifest: Manifest) -> None:
        """The lease may end meanwhile."""
        holder, choice = key
        error: Exception | None = None
        try:
            content = await self._reader.choice(manifest, choice)
            if holder.stored is not None:  # else nobody wants it any more
                self._load(key, content)
        except (OSError, BrokenBlocks) as failed:
            error = failed
        ticket = self._reading.pop(key)
        if error is not None and isinstance(holder, WarmEntry):
            log.warning("what %s left in files is lost: %s", holder.id, error)
            self._warm.drop(holder)
        elif error is not None and isinstance(holder, Record) and holder.stored is not None and not holder.gone:
            self._lose(holder, error)  # else its files went with its lease
        ticket.settle(error)

    def _lose(self, record: Record, error: Exception) -> None:
        log.error("the lease %s is lost: %s", record.id, error)
        record.lost = True
        self._on_lost(record, lost(record))

    def _load(self, key: _Key, content: ChoiceBytes) -> None:
        self._loaded[key] = content
        self._num_loaded += content.nbytes
        while self._num_loaded > _MOST_LOADED and len(self._loaded) > 1:
            self._unload(next(iter(self._loaded)))

    def _unload(self, key: _Key) -> None:
        if (content := self._loaded.pop(key, None)) is not None:
            self._num_loaded -= content.nbytes


class _NoRoomError(Exception):
    """Why a lease cannot be written."""


def lost(record: Record) -> ParentLost:
    message = f"The lease '{record.id}' was in files, which are lost or broken."
    return ParentLost(message, reason="parent_lost", id=record.id)
