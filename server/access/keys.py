"""Keys, whom they stand for, and what each may do. Of a key only its SHA-256 is kept.

A key file is TOML; [limits] holds for every key that does not say otherwise:

    [limits]
    requests_per_minute = 600

    [[keys]]
    name = "acme-production"          # in logs and messages, where the key itself never shows
    tenant = "acme"                   # default: the name
    key = "sk-…"                      # or sha256 = "…", the hexadecimal digest of the key
    expires = 2027-01-01T00:00:00Z
    operator = true                   # may see the console's data, which is of all tenants
    max_concurrent = 8
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

ANONYMOUS = "anonymous"
_MOST_PRIORITY = 2**31

_Count = Annotated[int, Meta(ge=1)]
_Amount = Annotated[float, Meta(gt=0)]
_Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may ask for; None: whatever the server allows."""

    max_body_mb: _Amount | None = None
    max_prompt_tokens: _Count | None = None
    max_concurrent: _Count | None = None  # requests open at once, running or waiting
    max_queued: _Count | None = None  # of its tenant's requests, that wait to run
    requests_per_minute: _Amount | None = None
    max_timeout: _Amount | None = None  # seconds; also the deadline of a request that sets none
    # Lower is earlier: keys may not overtake each other by claiming a number before everyone's default.
    lowest_priority: Annotated[int, Meta(ge=-_MOST_PRIORITY, lt=_MOST_PRIORITY)] = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    tenant: str
    limits: KeyLimits
    operator: bool = False


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
        if "" in given:
            raise ValueError("an API key must not be empty")
        self._given = [
            Key(Caller(f"key-{number}", f"key-{number}", KeyLimits(), operator=True), digest_of(key))
            for number, key in enumerate(given, 1)
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

    def expired(self, key: Key) -> bool:
        return key.expires is not None and self._wall() >= key.expires

    def _read(self) -> list[Key]:
        keys = self._given + ([] if self.path is None else read_keys(self.path))
        for what, values in (("name", [k.caller.name for k in keys]), ("key", [k.digest for k in keys])):
            if twice := next((i for i, value in enumerate(values) if value in values[:i]), None):
                raise ValueError(f"{self.path}: the {what} of '{keys[twice].caller.name}' is there twice")
        return keys


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A [[keys]] table, apart from its limits."""

    name: _Name
    tenant: _Name | None = None
    key: Annotated[str, Meta(min_length=1, pattern=r"^[\x21-\x7e]+$")] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    operator: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[dict[str, Any]], Meta(min_length=1)]  # a file without keys would open the server to everybody
    limits: dict[str, Any] = {}


_LIMITS = {field.name for field in dataclasses.fields(KeyLimits)}


def read_keys(path: str) -> list[Key]:
    try:
        file = msgspec.convert(tomllib.loads(Path(path).read_text()), _File)
        common = _limits({}, file.limits, "limits")
        return [_key(table, common, f"keys[{index}]") for index, table in enumerate(file.keys)]
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _key(table: dict[str, Any], common: dict[str, Any], where: str) -> Key:
    own = {name: value for name, value in table.items() if name in _LIMITS}
    limits = KeyLimits(**_limits(common, own, where))
    try:
        entry = msgspec.convert({name: value for name, value in table.items() if name not in _LIMITS}, _Entry)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    if (entry.key is None) == (entry.sha256 is None):
        raise ValueError(f"{where}: '{entry.name}' needs either key or sha256")
    digest = digest_of(entry.key) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
    caller = Caller(entry.name, entry.tenant or entry.name, limits, entry.operator)
    return Key(caller, digest, None if entry.expires is None else entry.expires.timestamp())


def _limits(common: dict[str, Any], own: dict[str, Any], where: str) -> dict[str, Any]:
    """The values of both, checked; those of a key win."""
    if unknown := sorted(own.keys() - _LIMITS):
        raise ValueError(f"{where}: there is no limit '{unknown[0]}'; there are {', '.join(sorted(_LIMITS))}")
    try:
        msgspec.convert(own, KeyLimits)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    return {**common, **own}


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
