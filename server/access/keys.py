"""Keys, whom they stand for, and what each may do. Of a key only its SHA-256 is kept.

A key file is TOML; [limits] holds for every key that does not say otherwise:

    [limits]
    requests_per_minute = 600

    [[keys]]
    name = "acme-production"          # in logs and messages, where the key itself never shows
    tenant = "acme"                   # default: the name
    key = "sk-…"                      # or sha256 = "…", the hexadecimal digest of the key
    expires = 2027-01-01T00:00:00Z
    operator = true                   # sees all tenants in the console, may load adapters, may send to sleep
    permissions = ["estates"]         # may take what it retains to another server; "admin": may send to sleep
    adapters = ["legal", "medical"]   # that it may name as `model`, beside the model itself; default: all
    max_concurrent = 8
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bequest.server.access.key_file import Entry, KeyLimits, Permission, read_tables

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    tenant: str
    limits: KeyLimits
    operator: bool = False
    permissions: frozenset[Permission] = frozenset()
    adapters: frozenset[str] | None = None  # that it may name; None: all

    def may(self, permission: Permission) -> bool:
        return permission in self.permissions or (permission == "admin" and self.operator)

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters


@dataclass(frozen=True, slots=True)
class Key:
    caller: Caller
    digest: bytes
    expires: float | None = None  # seconds since 1970


class KeyRing:
    """Every key is compared on every call, each in constant time."""

    def __init__(
        self, given: Sequence[str] = (), path: str | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        """`given` are the keys of the command line, tenants of their own (`key-1`, …) and operators.

        Raises ValueError or OSError, whose messages never hold a key.
        """
        stripped = [key.strip() for key in given]  # as a header comes in: else nobody could send it
        if "" in stripped:
            raise ValueError("an API key must not be empty")
        self._given = [
            Key(Caller(f"key-{number}", f"key-{number}", KeyLimits(), operator=True), digest_of(key))
            for number, key in enumerate(stripped, 1)
        ]
        self.path = path
        self._wall = wall
        self._keys = self._read()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_tenants(self) -> int:
        """At least the anonymous one."""
        return max(1, len({key.caller.tenant for key in self._keys}))

    def callers(self) -> dict[str, Caller]:
        """By the hexadecimal SHA-256 of each key."""
        return {key.digest.hex(): key.caller for key in self._keys}

    def reload(self) -> None:
        """Reads the file again. Raises as the constructor does; then the keys are those from before."""
        self._keys = self._read()

    def find(self, key: str) -> Key | None:
        given = digest_of(key)
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, given):
                found = known
        return found

    def named(self, name: str) -> Caller | None:
        """None for a key that is gone or has expired."""
        found = next((key for key in self._keys if key.caller.name == name), None)
        return None if found is None or self.expired(found) else found.caller

    def expired(self, key: Key) -> bool:
        return key.expires is not None and self._wall() >= key.expires

    def _read(self) -> list[Key]:
        keys = self._given + ([] if self.path is None else read_keys(self.path))
        for what, values in (("name", [k.caller.name for k in keys]), ("key", [k.digest for k in keys])):
            if twice := next((i for i, value in enumerate(values) if value in values[:i]), None):
                where = self.path if twice >= len(self._given) else "--api-key, BEQUEST_API_KEY"
                raise ValueError(f"{where}: the {what} of '{keys[twice].caller.name}' is there twice")
        return keys


def read_keys(path: str) -> list[Key]:
    """Raises ValueError or OSError."""
    return [_key(entry, limits) for entry, limits in read_tables(path)]


def _key(entry: Entry, limits: KeyLimits) -> Key:
    digest = digest_of(entry.key) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
    permissions, named = frozenset(entry.permissions), entry.adapters
    adapters = None if named is None else frozenset(named)
    caller = Caller(entry.name, entry.tenant or entry.name, limits, entry.operator, permissions, adapters)
    return Key(caller, digest, None if entry.expires is None else entry.expires.timestamp())


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
