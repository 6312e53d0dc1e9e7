"""Catalogues that clients uploaded, by tenant and name, within a budget of bytes. Owned by the event-loop thread.

A request that uses one holds it itself, so a catalogue may be deleted or replaced at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from bequest.engine.types.catalogue import Catalogue
from bequest.server.wire.errors import ApiError
from bequest.server.wire.reading import shorten

_ENTRY_BYTES = 1024  # of an entry beyond its arrays, about
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class StoredCatalogue:
    name: str
    tree: Catalogue
    token_bits: bytes  # bit i: token i is in some item
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_bytes(self) -> int:
        return self.tree.num_bytes + len(self.token_bits) + _ENTRY_BYTES

    def has_token(self, token: int) -> bool:
        return bool(self.token_bits[token // 8] >> (token % 8) & 1)


def stored(name: str, tree: Catalogue) -> StoredCatalogue:
    """Looks at every node: not for the event loop."""
    seen = np.zeros(tree.vocab_size, np.bool_)
    tokens = tree.tree.tokens
    for begin in range(1, tokens.size, _CHUNK):  # the root has none; in pieces, since each holds the interpreter
        seen[tokens[begin : begin + _CHUNK]] = True
    return StoredCatalogue(name, tree, np.packbits(seen, bitorder="little").tobytes())


class CatalogueStore:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0  # by catalogues, and by uploads on their way
        self._catalogues: dict[tuple[str, str], StoredCatalogue] = {}

    def find(self, tenant: str, name: str, param: str | None = None) -> StoredCatalogue:
        found = self._catalogues.get((tenant, name))
        if found is None:
            message = f"There is no catalogue '{shorten(name, 128)}' here; upload it with POST /v1/catalogues."
            raise ApiError(404, "catalogue_not_found", message, param=param)
        return found

    def named(self, tenant: str, name: str | None) -> StoredCatalogue | None:
        """The catalogue of a request's field."""
        return None if name is None else self.find(tenant, name, "catalogue")

    def of(self, tenant: str) -> list[StoredCatalogue]:
        """Oldest first."""
        return [catalogue for (owner, _), catalogue in self._catalogues.items() if owner == tenant]

    def check_free(self, tenant: str, name: str) -> None:
        if (tenant, name) in self._catalogues:
            raise ApiError(
                409,
                "catalogue_exists",
                f"There is a catalogue '{name}' already: delete it, choose another name, or add `replace=true` to the "
                "query.",
                param="name",
            )

    def put(self, tenant: str, catalogue: StoredCatalogue, upload: Upload, replace: bool) -> None:
        """Takes the place of its upload in the budget."""
        if not replace:
            self.check_free(tenant, catalogue.name)
        upload.resize(catalogue.num_bytes)
        upload.num_bytes = 0
        before = self._catalogues.pop((tenant, catalogue.name), None)
        if before is not None:
            self._retire(before)
        self._catalogues[tenant, catalogue.name] = catalogue

    def delete(self, tenant: str, name: str) -> None:
        self._retire(self.find(tenant, name))
        del self._catalogues[tenant, name]

    def _retire(self, catalogue: StoredCatalogue) -> None:
        self.used_bytes -= catalogue.num_bytes
        catalogue.tree.retired = True  # devices let go of their copies

    @contextmanager
    def uploading(self, announced: int | None) -> Iterator[Upload]:
        """Room for an upload. What is announced must be free, but only what has come is taken."""
        self.check_room(announced or 0)
        upload = Upload(self)
        try:
            yield upload
        finally:
            upload.resize(0)

    def check_room(self, needed: int) -> None:
        if self.used_bytes + needed > self.most_bytes:
            raise ApiError(
                429,
                "catalogues_full",
                f"The catalogue does not fit: it needs {needed} bytes more, and {self.used_bytes} of the "
                f"{self.most_bytes} bytes for catalogues (--catalogues-mb) are in use. Delete one first.",
                details={"limit": self.most_bytes, "used": self.used_bytes, "needed": needed},
            )


@dataclass(slots=True, eq=False)
class Upload:
    """The bytes of a catalogue on its way in."""

    store: CatalogueStore
    num_bytes: int = 0

    def resize(self, num_bytes: int) -> None:
        more = num_bytes - self.num_bytes
        if more > 0:
            self.store.check_room(more)
        self.store.used_bytes += more
        self.num_bytes = num_bytes
