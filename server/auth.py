"""Who may call: keys → tenants, loopback names for a server without keys, and the origins browsers may call from."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiohttp import web

from server.errors import ApiError

ANONYMOUS = "anonymous"
_UNGUARDED = frozenset({"/health", "/live"})


class Keys:
    """Maps a key to its tenant. Every key is compared on every call, each in constant time."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._entries = [(key.encode(), tenant) for key, tenant in tenants.items()]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def tenant(self, key: str) -> str | None:
        given = key.encode("utf-8", "surrogateescape")
        found = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def load_keys(keys: Sequence[str], path: str | None) -> Keys:
    """Keys of the command line are tenants of their own (`key-1`, …); the file says `tenant key` on each line.

    Raises ValueError, which never holds a key, for a file that says something else.
    """
    tenants = {key: f"key-{number}" for number, key in enumerate(keys, 1)}
    if path is not None:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ValueError(f"{path}, line {number}: expected 'tenant key', found {len(words)} words")
            tenant, key = words
            tenants[key] = tenant
    if "" in tenants:
        raise ValueError("an API key must not be empty")
    return Keys(tenants)


class Gate:
    """Decides on a request by its head alone, before a byte of its body is read."""

    def __init__(self, keys: Keys, *, host: str, guard_metrics: bool, allowed_origins: Sequence[str]) -> None:
        self._keys = keys
        self._check_host = not keys and is_loopback(host)
        self._unguarded = _UNGUARDED if guard_metrics else _UNGUARDED | {"/metrics"}
        self._origins = frozenset(allowed_origins)

    @property
    def lowest_priority(self) -> int | None:
        """Tenants may not overtake each other by claiming a priority before everyone's default."""
        return 0 if self._keys else None

    def tenant(self, request: web.BaseRequest) -> str:
        """The tenant of a request; raises 401 or 403."""
        if self._check_host and not _is_loopback_name(request.headers.get("Host")):
            raise ApiError(
                403,
                "permission_denied",
                "This server answers to loopback names only (localhost, 127.0.0.1), and the Host header has another; "
                "start it with --host or --api-key to serve other names.",
            )
        if not self._keys or request.path in self._unguarded:
            return ANONYMOUS
        scheme, _, key = request.headers.get("Authorization", "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("This server needs an API key: send the header 'Authorization: Bearer <key>'.")
        tenant = self._keys.tenant(key.strip())
        if tenant is None:
            raise _unauthorized("The API key is not one of this server's keys; check the Authorization header.")
        return tenant

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if not origin or not self._origins or not ({origin, "*"} & self._origins):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": "X-Request-Id, X-Bequest-Ignored, Retry-After",
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser's question whether it may call, which carries no key."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if not self.cors_headers(request):
            return None
        wanted = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        allowed = {
            "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE",
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=allowed)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback_name(host: str | None) -> bool:
    """Browsers always send a Host, so that a page whose name was pointed at 127.0.0.1 gives itself away."""
    if not host:
        return True
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return name.endswith(".localhost") or is_loopback(name)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
