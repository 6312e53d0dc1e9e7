"""What earlier answers left to ask for: ids by kind and tenant."""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque

_KEPT = 200  # of a kind and tenant; older ones are gone from the server as well, mostly
_ID = re.compile(rb'"id": ?"((?:cmpl-|chatcmpl-|resp_|hs-)[\w-]+)"')
_KINDS = {"cmpl": "completion", "chat": "chat", "resp": "response", "hs-0": "states"}


class Harvest:
    def __init__(self, tenants: list[str]) -> None:
        self.tenants = tenants
        self._ids: dict[tuple[str, str], deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def take(self, tenant: str, answer: bytes) -> None:
        """The id of an answer, whole or a stream's first event."""
        if found := _ID.search(answer[:4096]):
            self.keep(tenant, found[1].decode())

    def keep(self, tenant: str, name: str, kind: str | None = None) -> None:
        self._ids[tenant, kind or _KINDS.get(name[:4], "states")].append(name)

    def draw(self, random_: random.Random, tenant: str, *kinds: str) -> str | None:
        """Mostly a young one: the old ones have left their caches."""
        known = [name for kind in kinds for name in list(self._ids[tenant, kind])[-40:]]
        return random_.choice(known) if known else None

    def is_foreign(self, tenant: str, name: str) -> bool:
        """Whether the server made this id for another tenant."""
        owners = {owner for (owner, kind), names in self._ids.items() if kind in _KINDS.values() and name in names}
        return bool(owners) and tenant not in owners
