"""Handles of catalogues: what plans name them by. Owned by the event-loop thread.

A catalogue is registered with the device before the first plan that names it. When another one comes, those that were
deleted or replaced since are released, and the least recently used ones if there are too many: who still runs under one
holds it himself. A release goes out behind the plan that is being made, which may name the handle.
"""

from __future__ import annotations

from collections import OrderedDict

from bequest.engine.types import Registration, Release
from bequest.engine.types.catalogue import Catalogue

_MOST_BYTES = 1 << 30


class CatalogueHandles:
    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._handles: OrderedDict[Catalogue, int] = OrderedDict()  # the least recently used ones first
        self._last = 0
        self._registered: list[Registration] = []
        self._released: list[Release] = []  # by this plan
        self._to_release: list[Release] = []  # by the plans before

    def handle_of(self, catalogue: Catalogue) -> int:
        handle = self._handles.get(catalogue)
        if handle is None:
            self._make_room(catalogue.num_bytes)
            self._last += 1
            handle = self._handles[catalogue] = self._last
            self._registered.append(Registration(handle, catalogue))
        self._handles.move_to_end(catalogue)
        return handle

    def take_changes(self) -> tuple[Registration | Release, ...]:
        """What the device has to be told before the plan that was made since the last call."""
        changes: tuple[Registration | Release, ...] = (*self._to_release, *self._registered)
        self._to_release, self._released, self._registered = self._released, [], []
        return changes

    def _make_room(self, num_bytes: int) -> None:
        for other in [other for other in self._handles if other.retired]:
            self._release(other)
        while self._handles and num_bytes + sum(c.num_bytes for c in self._handles) > self._most_bytes:
            self._release(next(iter(self._handles)))

    def _release(self, catalogue: Catalogue) -> None:
        self._released.append(Release(self._handles.pop(catalogue)))

    def __len__(self) -> int:
        return len(self._handles)
