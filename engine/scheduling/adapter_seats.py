"""Which adapters have a seat on the device, where fewer have one than are loaded. Owned by the event-loop thread.

A sequence whose adapter has none waits, and others pass it. The adapter gets a free seat, or the seat of another that
no running sequence needs: first of those that no open request names, then of those that were used longest ago. One
that has just come keeps its seat until somebody has run with it, or whoever waited might never see it. Where every
seat is needed, the adapter that the fewest requests need lets no more of them in, until it can leave: requests that
never end to come do not keep the others out.
"""

from __future__ import annotations

from collections.abc import Callable

from bequest.engine.cache.tiers.ticket import Ticket
from bequest.engine.state.sequence import Group, Status
from bequest.engine.types.adapter import NO_ADAPTER


class AdapterSeats:
    """Adapters are known by their handles."""

    def __init__(self) -> None:
        self.most: int | None = None  # None: each one that is loaded has its own, always
        self.bring: Callable[[int], None] = lambda handle: None  # to a seat that is free; `came` or `left` follows
        self.dismiss: Callable[[int], None] = lambda handle: None  # its seat is free at once
        self._seated: dict[int, bool] = {}  # the least recently used first; whether somebody ran with it since it came
        self._coming: dict[int, Ticket] = {}
        self._wanted: dict[int, Ticket] = {}  # no seat is free for them yet; in the order of their wishes
        self._open: dict[int, set[Group]] = {}
        self._leaving: int | None = None  # of the seated: it lets nobody new in

    # --- requests ------------------------------------------------------------------------------------------------

    def open(self, group: Group) -> None:
        if self.most is not None and group.adapter != NO_ADAPTER:
            self._open.setdefault(group.adapter, set()).add(group)

    def close(self, group: Group) -> None:
        """Idempotent."""
        groups = self._open.get(group.adapter)
        if groups is not None:
            groups.discard(group)
            if not groups:
                del self._open[group.adapter]
                self._wanted.pop(group.adapter, None)

    def ask(self, group: Group) -> Ticket | None:
        """For a sequence of it that would run now. None: it may. A ticket: its adapter is on its way."""
        handle = group.adapter
        if self.most is None or handle == NO_ADAPTER:
            return None
        if handle in self._seated and (handle != self._leaving or group.times.admitted is not None):
            del self._seated[handle]
            self._seated[handle] = True
            return None
        if handle in self._coming:
            return self._coming[handle]
        ticket = self._wanted.setdefault(handle, Ticket())
        self.serve()
        return ticket

    def serve(self) -> None:
        """Gives seats to those that want one, as far as there are any. Whenever somebody may have stopped running."""
        while self._wanted:
            handle = next(iter(self._wanted))
            if handle in self._seated:  # it was to leave, and need not
                self._leaving = None
                self._wanted.pop(handle).settle()
                continue
            if not self._has_room() and not self._make_room():
                self._choose_leaving()
                return
            self._coming[handle] = self._wanted.pop(handle)
            self.bring(handle)
        self._leaving = None

    # --- adapters ------------------------------------------------------------------------------------------------

    def offer(self, handle: int) -> None:
        """One that was loaded: it gets a seat at once, if one is free."""
        if self.most is not None and self._has_room():
            self._coming[handle] = Ticket()
            self.bring(handle)

    def came(self, handle: int) -> None:
        self._seated[handle] = False
        self._coming.pop(handle).settle()

    def left(self, handle: int) -> None:
        """It did not come; whoever waits for it asks again."""
        self._coming.pop(handle).settle()

    def forget(self, handle: int) -> None:
        """It is loaded no more. One that is coming still has to `come` or to `leave`."""
        self._wanted.pop(handle, None)
        self._leaving = None
        if self._seated.pop(handle, None) is not None:
            self.dismiss(handle)

    # --- seats ---------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        assert self.most is not None
        return len(self._seated) + len(self._coming) < self.most

    def _make_room(self) -> bool:
        unneeded = (handle for handle in self._seated if handle not in self._open)
        resting = (handle for handle, was_used in self._seated.items() if was_used and not self._runs(handle))
        leaving = next(unneeded, None) or next(resting, None)  # no handle is 0
        if leaving is None:
            return False
        del self._seated[leaving]
        self._leaving = None
        self.dismiss(leaving)
        return True

    def _choose_leaving(self) -> None:
        if self._leaving is None:
            used = [handle for handle, was_used in self._seated.items() if was_used]
            self._leaving = min(used, key=lambda handle: len(self._open.get(handle, ())), default=None)

    def _runs(self, handle: int) -> bool:
        """Whether steps may name it: a request may run without a sequence that does, for a moment."""
        groups = self._open.get(handle, ())
        return any(any(s.status is not Status.WAITING for s in group.sequences) for group in groups)
