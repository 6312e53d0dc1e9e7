"""Who may share blocks: the exact key that divides the prefix index and the cross tables."""

from __future__ import annotations

from bequest.engine.types import Request
from bequest.engine.types.adapter import NO_ADAPTER, AdapterRef
from bequest.engine.types.encoder import EncoderInput


def salt_of(request: Request) -> bytes:
    return pack_salt(request.tenant, request.cache_salt, request.encoder, request.adapter)


def pack_salt(
    tenant: str, cache_salt: str, encoder: EncoderInput | None = None, adapter: AdapterRef | None = None
) -> bytes:
    """No two (tenant, salt, encoder input, load of an adapter) of a model give the same bytes."""
    name, salt = tenant.encode(), cache_salt.encode()
    handle = NO_ADAPTER if adapter is None else adapter.handle
    head = handle.to_bytes(4, "little") + len(name).to_bytes(4, "little") + name
    return head + salt if encoder is None else head + len(salt).to_bytes(4, "little") + salt + encoder.key
