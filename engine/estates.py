"""Moves estates between this engine and whoever asks: bytes of blocks, in order with the plans. Event-loop thread.

Reading and writing happens on the device thread, a piece at a time, so that steps go on between two pieces. All or
nothing: an import that fails, is cancelled, or outlives its engine leaves neither a block nor a record behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bequest.engine.adapter_desk import AdapterDesk
from bequest.engine.cache.entries import host_block, is_on_host
from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.device import DeviceThread
from bequest.engine.errors import EngineError, EstateMismatch, InsufficientRetention, InvalidEstate
from bequest.engine.inheritance.estate_images import arrived, check_images
from bequest.engine.inheritance.estates import Coming, Estates, Leaving
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.state.record import KeptChoice, Record
from bequest.engine.state.recurrent import State
from bequest.engine.types import IntArray, ModelInfo, StepMoves
from bequest.engine.types.blocks import BlockBytes, BlockRead, BlockWrite, BytesMove, StateRead, StateWrite
from bequest.engine.types.encoder import check_encoder
from bequest.engine.types.estate import Deed, Estate, EstateIdentity, Notes
from bequest.engine.types.image import without_images

_PIECE_BYTES = 32 << 20  # of one transfer: a step waits for no more than that


class EstateDesk:
    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        device: DeviceThread,
        adapters: AdapterDesk,
        fingerprint: Callable[[], str],
        notes: Notes,
        clock: Callable[[], float],
    ) -> None:
        """`fingerprint`: of the weights; called in a worker thread, when it is needed first."""
        self._info = info
        self._cache = scheduler.cache
        self._contents = scheduler.retention.contents
        self._takes_embeds = scheduler.limits.takes_embeds
        self._estates = Estates(scheduler.cache, scheduler.retention)
        self._device = device
        self.adapters = adapters
        self._fingerprint = fingerprint
        self.notes = notes
        self._weights: str | None = None
        self._wake = scheduler.wake
        self._clock = clock
        self._open: set[asyncio.Future[BlockBytes]] = set()
        self._closed: EngineError | None = None
        self.piece_bytes = _PIECE_BYTES

    async def take_out(self, tenant: str, reference: str) -> Estate:
        identity = await self.identity(tenant)
        leaving = self._estates.leave(tenant, reference)
        try:
            await self._reach(leaving)
            pieces = await self.read(leaving.entries, self.piece_bytes)
            pieces += [await self.read_state(state) for state in leaving.states]
            content = pieces[0] if len(pieces) == 1 else await asyncio.to_thread(np.concatenate, pieces)
            return Estate(leaving.deed(identity, self.notes), content)
        finally:
            leaving.close()
            self._wake()

    async def bring_in(self, tenant: str, estate: Estate, ttl: float) -> str:
        adapter = self.adapters.find_identity(estate.deed.identity.adapter)
        identity = replace(await self.identity(tenant), adapter="" if adapter is None else adapter.identity)
        if differs := estate.deed.identity.differs(identity):
            message = f"The estate is of another engine: {', '.join(differs)}."
            raise EstateMismatch(
                message, reason="estate_mismatch", details={"differs": differs}, names=" and ".join(differs)
            )
        await asyncio.to_thread(self._check, estate.deed)
        here = arrived(estate.deed, self._contents)
        origin = self.notes.from_bytes(estate.deed.origin, here.ids)
        estate = Estate(here.deed, estate.content)
        coming = self._estates.come(estate, origin, adapter, here.images)
        try:
            await self._write(coming, estate.content)
            await self._write_states(coming, estate.content)
            self.adapters.check(adapter)
            return coming.grant(ttl, self._clock())
        finally:
            coming.close()
            self._wake()

    # --- for leases in files -------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return self._device.block_layout.num_bytes

    @property
    def block_size(self) -> int:
        return self._cache.pool.block_size

    @property
    def num_strips(self) -> int:
        return self._cache.pool.num_strips

    @property
    def rows_of_state(self) -> int:
        return self._device.block_layout.rows_of_state

    def num_left(self, kept: KeptChoice) -> int:
        """Blocks of a choice that are in memory."""
        return kept.num_left(self._cache.pool)

    def leave(self, record: Record) -> Leaving:
        """Holds its blocks. Raises what `take_out` raises."""
        return self._estates.leave_record(record, record.id)

    async def read(self, entries: list[int], piece_bytes: int) -> list[BlockBytes]:
        """Their bytes, a piece at a time. REQUIRES: they are held, and the bytes of the tier are at hand"""
        return [await self._read(piece) for piece in self._pieces(entries, piece_bytes)]

    async def read_state(self, state: State) -> BlockBytes:
        """In rows of the size of a block. REQUIRES: it is held"""
        layout = self._device.block_layout
        content = await self._transfer(StateRead(slots=_ints([state.slot]), moves=self._cache.states.take_moves()))
        rows = np.zeros((layout.rows_of_state, layout.num_bytes), np.uint8)
        rows.reshape(-1)[: layout.state_bytes] = content[0]
        return rows

    def state_in(self, rows: BlockBytes) -> BlockBytes:
        """The state in such rows."""
        return rows.reshape(-1)[: self._device.block_layout.state_bytes]

    def close(self, error: EngineError) -> None:
        """Nothing comes back from the device any more: those who wait are told."""
        self._closed = error
        for future in [future for future in self._open if not future.done()]:
            future.set_exception(error)

    # --- inside --------------------------------------------------------------------------------------------------

    async def identity(self, tenant: str) -> EstateIdentity:
        if self._weights is None:
            self._weights = await asyncio.to_thread(self._fingerprint)
        if self._closed is not None:
            raise self._closed
        return EstateIdentity(
            weights=self._weights, dtype=self._info.arithmetic, cache=self._device.block_layout, tenant=tenant
        )

    def _check(self, deed: Deed) -> None:
        """What only an engine of the same model can know."""
        said = (without_images(choice.token_ids) for choice in deed.choices)
        if any(max(ids, default=0) >= self._info.vocab_size for ids in said):
            raise InvalidEstate("The estate has tokens that the model does not know.")
        check_images(deed, self._info, takes_embeds=self._takes_embeds)
        check_encoder(None if deed.encoder is None else deed.encoder.as_input(), self._info.encoder)

    async def _reach(self, leaving: Leaving) -> None:
        """Waits until the bytes of the tier are at hand."""
        blocks = [host_block(entry) for entry in filter(is_on_host, leaving.entries)]
        ticket = self._cache.tier.read(blocks)
        if ticket.pending:
            await _settled(ticket)
        if ticket.failed:
            raise InsufficientRetention("The blocks of the estate are lost.", reason="estate_lost")

    async def _read(self, entries: list[int]) -> BlockBytes:
        device = [entry for entry in entries if not is_on_host(entry)]
        host = [host_block(entry) for entry in filter(is_on_host, entries)]
        return await self._transfer(BlockRead(moves=self._moves(), device=_ints(device), host=_ints(host)))

    async def _write(self, coming: Coming, content: BlockBytes) -> None:
        for rows, blocks in zip(
            self._pieces(coming.rows, self.piece_bytes), self._pieces(coming.blocks, self.piece_bytes), strict=True
        ):
            piece = await asyncio.to_thread(content.__getitem__, rows)
            await self._transfer(BlockWrite(moves=self._moves(), blocks=_ints(blocks), content=piece))

    async def _write_states(self, coming: Coming, content: BlockBytes) -> None:
        for state, rows in zip(coming.states, coming.state_rows, strict=True):
            numbers = self.state_in(content[list(rows)])
            moves = self._cache.states.take_moves()  # it may have moved since it was expected
            await self._transfer(StateWrite(slots=_ints([state.slot]), content=numbers[None], moves=moves))

    async def _transfer(self, move: BytesMove) -> BlockBytes:
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[BlockBytes] = asyncio.get_running_loop().create_future()
        self._open.add(future)
        self._device.transfer(move, lambda content: None if future.done() else future.set_result(content))
        try:
            return await future
        finally:
            self._open.discard(future)

    def _moves(self) -> StepMoves:
        """Swaps that wait for the next step come first: they empty the blocks that are written, fill those read."""
        out, into = self._cache.take_swaps()
        pairs = [np.asarray(moves, np.int32).reshape(-1, 2) for moves in (out, into, [])]
        return StepMoves(swaps_out=pairs[0], swaps_in=pairs[1], copies=pairs[2])

    def _pieces(self, numbers: list[int], piece_bytes: int) -> list[list[int]]:
        size = max(1, piece_bytes // self._device.block_layout.num_bytes)
        return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def _ints(numbers: list[int]) -> IntArray:
    return np.asarray(numbers, dtype=np.int32)


async def _settled(ticket: Ticket) -> None:
    settled = asyncio.get_running_loop().create_future()
    ticket.then(lambda: None if settled.done() else settled.set_result(None))
    await settled
