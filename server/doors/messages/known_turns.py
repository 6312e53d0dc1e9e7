"""Which conversation goes on: the record of what was said last, by what was said.

A client sends its conversation whole each time, and names no parent. But its next request begins with the messages of
the one before. So each is remembered under a digest of its messages, and found by the digests of the next one's
beginnings. What it left in the engine is then inherited: its sampled tokens as they were sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from aiohttp import web

from bequest.engine.errors import EngineError
from bequest.engine.types import Parent
from bequest.server.asks.extension import Conversation
from bequest.server.interfaces import EngineLike

_MOST = 16384  # turns that are remembered, of all tenants: two hundred bytes each


class KnownTurns:
    """Owned by the event loop."""

    def __init__(self, most: int = _MOST) -> None:
        self._records: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._records)

    def put(self, tenant: str, digest: bytes, record_id: str) -> None:
        self._records[tenant, digest] = record_id
        self._records.move_to_end((tenant, digest))
        while len(self._records) > self._most:
            self._records.popitem(last=False)

    def parent(self, engine: EngineLike, tenant: str, digests: Sequence[bytes], cache_salt: str) -> Parent | None:
        """The record of the longest beginning that there still is one of."""
        for digest in reversed(digests):
            record_id = self._records.get((tenant, digest))
            if record_id is None:
                continue
            try:
                parent = engine.parent(tenant, record_id)
            except EngineError:
                del self._records[tenant, digest]
                continue
            if parent.cache_salt == cache_salt and isinstance(parent.origin, Conversation):
                return parent
        return None


KNOWN_TURNS: web.AppKey[KnownTurns] = web.AppKey("messages_known_turns", KnownTurns)
