"""Warm estates: what requests without a lease left, in files, as a prefix cache that outlives the process.

Nobody was promised them: they give way to leases, the least recently used one first, and one that is broken is computed
again. They are found by their tokens, which are compared. Owned by the event-loop thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from bequest.engine._C import TokenList
from bequest.engine.cache.salt import pack_salt
from bequest.engine.cache.tiers.files import Warm
from bequest.engine.state.record import Record
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.estate import Manifest

LEAST_TOKENS = 64  # that are worth a file
WARM_SECONDS = 7 * 86400.0  # that one is kept for which nobody asks
_Start = tuple[bytes, tuple[int, ...]]  # a salt, and the tokens of the first block


@dataclass(frozen=True, slots=True, eq=False)
class WarmEntry:
    id: str
    stored: Manifest
    starts: tuple[_Start, ...]  # of its choices
    tokens: tuple[TokenList, ...]  # likewise


class WarmEstates:
    def __init__(self, block_size: int, withdraw: Callable[[Manifest], None]) -> None:
        """`withdraw`: removes one from the disk and from the books."""
        self._block_size = block_size
        self._withdraw = withdraw
        self._entries: OrderedDict[WarmEntry, None] = OrderedDict()  # least recently used first
        self._by_start: dict[_Start, dict[WarmEntry, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def wants(self, record: Record) -> bool:
        """Whether a record that has just ended is worth a file, and nothing that is there says the same."""
        if record.failed or record.aborted or record.leased or record.encoder is not None or record.identity.images:
            return False
        return any(
            kept.computed >= max(LEAST_TOKENS, self._block_size)
            and self._most_alike(record.salt, kept.tokens) < kept.computed - LEAST_TOKENS
            for kept in record.kept.values()
        )

    def add(self, manifest: Manifest, adapter: AdapterRef | None) -> None:
        """It is on the disk."""
        deed = manifest.deed
        salt = pack_salt(deed.identity.tenant, deed.cache_salt, None, adapter)
        starts = tuple((salt, choice.token_ids[: self._block_size]) for choice in deed.choices)
        entry = WarmEntry(deed.id, manifest, starts, tuple(TokenList(choice.token_ids) for choice in deed.choices))
        self._entries[entry] = None
        for start in starts:
            self._by_start.setdefault(start, {})[entry] = None

    def find(self, salt: bytes, tokens: TokenList) -> Warm | None:
        """What has the most tokens in common with these."""
        best: Warm | None = None
        for entry in self._by_start.get(self._start(salt, tokens), ()):
            for choice, known in zip(entry.stored.deed.choices, entry.tokens, strict=True):
                alike = min(known.common_prefix(tokens), choice.computed)
                if best is None or alike > best.alike:
                    best = Warm(entry, choice, alike)
        return best

    def touch(self, entry: WarmEntry) -> None:
        if entry in self._entries:
            self._entries.move_to_end(entry)

    def give_way(self) -> bool:
        """The least recently used one goes; False: there is none."""
        if not self._entries:
            return False
        self.drop(next(iter(self._entries)))
        return True

    def drop(self, entry: WarmEntry) -> None:
        """Idempotent."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        for start in set(entry.starts):
            alike = self._by_start[start]
            del alike[entry]
            if not alike:
                del self._by_start[start]
        self._withdraw(entry.stored)

    def _start(self, salt: bytes, tokens: TokenList) -> _Start:
        return salt, tuple(tokens[: self._block_size])

    def _most_alike(self, salt: bytes, tokens: TokenList) -> int:
        found = self.find(salt, tokens)
        return 0 if found is None else found.alike
