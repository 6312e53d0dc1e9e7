"""Who may call: keys, loopback names for a server without keys, and the origins that browsers may call from."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from aiohttp import web

from bequest.server.access.key_file import KeyLimits, Permission
from bequest.server.access.keys import ANONYMOUS, Caller, KeyRing
from bequest.server.wire.errors import ApiError

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]*)?")
_EXPOSED = (
    "X-Request-Id, Request-Id, X-Should-Retry, X-Bequest-Ignored, X-Bequest-Record, X-Bequest-Owner, "
    "X-Bequest-Replica, Retry-After"
)
_UNGUARDED = frozenset({"/health", "/live"})
_NOBODY = Caller(ANONYMOUS, ANONYMOUS, KeyLimits(lowest_priority=-(2**31)), operator=True)


class Gate:
    """Decides on a request by its head alone, before a byte of its body is read."""

    def __init__(
        self,
        keys: KeyRing,
        *,
        host: str,
        guard_metrics: bool,
        allowed_origins: Sequence[str],
        static_paths: Collection[str] = (),
    ) -> None:
        self._keys = keys
        self._check_host = not keys and is_loopback(host)
        self._unguarded = _UNGUARDED.union(static_paths, () if guard_metrics else ("/metrics",))
        self._origins = frozenset(allowed_origins)

    def caller(self, request: web.BaseRequest) -> Caller:
        """Who sent a request; raises 401 or 403."""
        if self._check_host and not _is_loopback_name(request.headers.get("Host")):
            raise ApiError(
                403,
                "permission_denied",
                "This server answers to loopback names only (localhost, 127.0.0.1), and the Host header has another; "
                "start it with --host or --api-key to serve other names.",
            )
        if not self._keys or request.path in self._unguarded:
            return _NOBODY
        given, header = _given_key(request)
        if not given:
            raise _unauthorized("This server needs an API key: send the header 'Authorization: Bearer <key>'.")
        key = self._keys.find(given)
        if key is None:
            raise _unauthorized(f"The API key is not one of this server's keys; check the {header} header.")
        if self._keys.expired(key):
            message = f"The API key '{key.caller.name}' has expired; ask the server's operator for a new one."
            raise _unauthorized(message, "api_key_expired")
        return key.caller

    def named(self, name: str, tenant: str) -> Caller | None:
        """Who sent a request some time ago, if they may still call."""
        found = self._keys.named(name) if self._keys else _NOBODY
        return found if found is not None and (found.name, found.tenant) == (name, tenant) else None

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if not origin or not self._origins or not ({origin, "*"} & self._origins):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": _EXPOSED,
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
            "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE",
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=allowed)


def _given_key(request: web.BaseRequest) -> tuple[str, str]:
    """The key and the header that it came in: OpenAI's, or the one that Anthropic's clients send."""
    scheme, _, given = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and given.strip():
        return given.strip(), "Authorization"
    return request.headers.get("x-api-key", "").strip(), "x-api-key"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=64)
def _is_loopback_name(host: str | None) -> bool:
    """Browsers always send a Host, so that a page whose name was pointed at 127.0.0.1 gives itself away."""
    if not host:
        return True
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = (match["address"] or match["name"]).lower().rstrip(".")
    return name.endswith(".localhost") or is_loopback(name)


def check_operator(caller: Caller, why: str) -> None:
    """For what concerns all tenants; without keys everybody is one."""
    if not caller.operator:
        raise ApiError(
            403,
            "permission_denied",
            f"The API key '{caller.name}' is not an operator's, and {why}. In the key file, operator = true makes it "
            "one.",
        )


def check_permission(caller: Caller, permission: Permission) -> None:
    """For what nobody may do unless the key file says so."""
    if not caller.may(permission):
        who = f"The API key '{caller.name}' has not" if caller != _NOBODY else "Only a key can have"
        gives = f'In the key file (--api-key-file), permissions = ["{permission}"] gives it.'
        raise ApiError(403, "permission_denied", f"{who} the permission '{permission}'. {gives}")


def _unauthorized(message: str, code: str = "invalid_api_key") -> ApiError:
    return ApiError(401, code, message, headers={"WWW-Authenticate": "Bearer"})
