"""The manifest of a lease in files, as bytes: magic, content (MessagePack), digest. Whole, or none."""

from __future__ import annotations

import hashlib

import msgspec

from bequest.engine.errors import InvalidEstate
from bequest.engine.types.estate import Manifest

_MAGIC = b"BQLEASE1"
_DIGEST_BYTES = 32


def name_of(tenant: str, record_id: str) -> str:
    """Of its file. Neither a tenant nor an id is fit to be a part of a path."""
    return hashlib.blake2b(f"{tenant}\0{record_id}".encode(), digest_size=16).hexdigest()


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
