"""The key file as types, and what is said of a wrong one: which field, and what would do. A key never shows."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

_MOST_PRIORITY = 2**31
_T = TypeVar("_T")

Permission = Literal["estates", "admin"]  # what no key may do unless the file says so
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


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A [[keys]] table, apart from its limits."""

    name: _Name
    tenant: _Name | None = None
    key: Annotated[str, Meta(min_length=1, pattern=r"^[\x21-\x7e]+$")] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    operator: bool = False
    permissions: list[Permission] = []
    adapters: list[_Name] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[dict[str, Any]], Meta(min_length=1)]  # a file without keys would open the server to everybody
    limits: dict[str, Any] = {}


LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))
_WORD = "1 to 128 ASCII characters without spaces"
_COUNT = "a whole number, at least 1"
_AMOUNT = "a number over 0"
# What each field takes.
_TAKES: Mapping[str, str] = {
    "keys": "a list of tables, at least one: each begins with [[keys]], in two brackets",
    "limits": "a table: it begins with [limits]",
    "name": _WORD,
    "tenant": _WORD,
    "key": "ASCII characters without spaces",
    "sha256": "64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them",
    "expires": "a time with its zone and without quotes, such as 2027-01-01T00:00:00Z",
    "operator": "true or false",
    "permissions": "a list of permissions: estates, admin",
    "adapters": "a list of names of adapters",
    **dict.fromkeys(("max_prompt_tokens", "max_concurrent", "max_queued"), _COUNT),
    **dict.fromkeys(("max_body_mb", "requests_per_minute", "max_timeout"), _AMOUNT),
    "lowest_priority": "a whole number of 32 bits",
}


def read_tables(path: str) -> list[tuple[Entry, KeyLimits]]:
    """Each key of the file with its limits. Raises ValueError or OSError."""
    try:
        file = _typed(tomllib.loads(Path(path).read_text()), _File, "", ("keys", "limits"))
        common = _limits({}, file.limits, "limits")
        return [_entry(table, common, f"keys[{index}]") for index, table in enumerate(file.keys)]
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _entry(table: dict[str, Any], common: dict[str, Any], where: str) -> tuple[Entry, KeyLimits]:
    own = {name: value for name, value in table.items() if name in LIMITS}
    limits = KeyLimits(**_limits(common, own, where))
    rest = {name: value for name, value in table.items() if name not in LIMITS}
    entry = _typed(rest, Entry, where, (*Entry.__struct_fields__, *LIMITS))
    if (entry.key is None) == (entry.sha256 is None):
        raise ValueError(f"{where}: '{entry.name}' needs either key or sha256")
    return entry, limits


def _limits(common: dict[str, Any], own: dict[str, Any], where: str) -> dict[str, Any]:
    """The values of both, checked; those of a key win."""
    if unknown := sorted(own.keys() - set(LIMITS)):
        raise ValueError(_unknown(unknown[0], where, LIMITS))
    _typed(own, KeyLimits, where, LIMITS)
    return {**common, **own}


def _typed(table: Mapping[str, Any], kind: type[_T], where: str, known: Collection[str]) -> _T:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_plain(str(error), where, known)) from None


def _plain(said: str, where: str, known: Collection[str]) -> str:
    """msgspec's sentence without its types and patterns, and without the value, which may be a key."""
    if found := re.search(r"unknown field `(.*)`", said):
        return _unknown(found[1], where, known)
    if found := re.search(r"required field `(.*)`", said):
        return f"{_at(where, found[1])} is missing: {_TAKES[found[1]]}"
    found = re.search(r"at `\$\.(\w+)", said)
    name = found[1] if found else ""
    return f"{_at(where, name)} must be {_TAKES[name]}" if name in _TAKES else f"{where}: {said}"


def _unknown(name: str, where: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
    return f"unknown field '{_at(where, name)}'; {hint}"


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
