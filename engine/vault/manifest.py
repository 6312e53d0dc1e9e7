"""The manifest of a lease in files, as bytes: magic, content (MessagePack), digest. Whole, or none."""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.estate import Manifest

_MAGIC = b"BQLEASE1"
_DIGEST_BYTES = 32
_MARK_CHARS = 32
_WARM = ".warm"  # ends the names of those that are no leases
_FILE_NAME = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32})?")


def file_name(manifest: Manifest) -> str:
    """What its tenant finds a lease by, told apart from all others where its manifest cannot be read any more."""
    deed = manifest.deed
    references = (deed.id,) if deed.name is None else (deed.id, deed.name)
    name = "-".join(mark_of(deed.identity.tenant, reference) for reference in references)
    return name + _WARM if manifest.warm else name


def mark_of(tenant: str, reference: str) -> str:
    """Neither a tenant nor an id is fit to be a part of a path."""
    return hashlib.blake2b(f"{tenant}\0{reference}".encode(), digest_size=16).hexdigest()


def new_segment(owner: str, now: float) -> str:
    """A name for bytes that the lease of this mark writes; it tells whose they are, and since when."""
    return f"{owner}{int(now):010x}{secrets.token_hex(8)}"


def owner_of(segment: str) -> str:
    return segment[:_MARK_CHARS]


def made_at(segment: str) -> float:
    """Seconds since 1970."""
    try:
        return float(int(segment[_MARK_CHARS : _MARK_CHARS + 10], 16))
    except ValueError:
        return 0.0


def marks_in(name: str) -> list[str]:
    """Of a file; none, if it is not named as one of ours."""
    return name.split("-") if _FILE_NAME.fullmatch(name) else []


def to_bytes(manifest: Manifest) -> bytes:
    body = _MAGIC + msgspec.msgpack.encode(manifest)
    return body + _digest(body)


def from_bytes(data: bytes) -> Manifest:
    """Raises InvalidEstate."""
    body = data[:-_DIGEST_BYTES]
    if not body.startswith(_MAGIC) or _digest(body) != data[-_DIGEST_BYTES:]:
        raise InvalidEstate("The manifest is cut short, was changed, or is none.")
    try:
        manifest = msgspec.msgpack.decode(body[len(_MAGIC) :], type=Manifest)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidEstate(f"The manifest cannot be read: {error}.") from None
    for flaw in manifest.deed.flaws(len(manifest.blocks)):
        raise InvalidEstate(f"The manifest is broken: {flaw}.")
    return manifest


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
