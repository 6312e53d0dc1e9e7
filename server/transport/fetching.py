"""Files that a request names instead of sending them: on hosts that the server was told of, or below one directory.

What a client names must not reach what the client could not: a host is on the list, its address is a public one, each
redirect is looked at like the first URL, and the connection goes to the address that was looked at.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from bequest.server.wire.reading import shorten

_SECONDS = 15.0  # for all of a file
_MOST_REDIRECTS = 3
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_PIECE = 1 << 16
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotFetched(Exception):
    """Says why, to the client: a sentence that follows the name of its field."""


class PrivateAddress(OSError):
    """A host has an address that is not for everybody."""


class PublicResolver(AbstractResolver):
    """Finds public addresses alone. A host with one other address has none: the next answer might be that one."""

    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = inner or ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)  # type: ignore[arg-type]
        if not all(is_public(result["host"]) for result in found):
            raise PrivateAddress(f"{host} has a private address")
        return found

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = _ipv4_within(parsed) if isinstance(parsed, ipaddress.IPv6Address) else None
    return parsed.is_global and not parsed.is_multicast and (inner is None or inner.is_global)


def _ipv4_within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Where a gateway would send what goes to an address that wraps another one."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """A name on the list, or below one that is written `*.name`; `*` is any."""
    name = host.lower().rstrip(".")
    for entry in map(str.lower, allowed):
        if entry in ("*", name) or (entry.startswith("*.") and name.endswith(entry[1:])):
            return True
    return False


class Fetcher:
    """`resolver` is for tests: they have no public host."""

    def __init__(self, hosts: Sequence[str], most_bytes: int, resolver: AbstractResolver | None = None) -> None:
        self._hosts = hosts
        self._most_bytes = most_bytes
        self._resolver = resolver

    async def fetch(self, given: str) -> bytes:
        """Raises NotFetched."""
        if not self._hosts:
            raise NotFetched(
                "is a URL, and this server fetches none: send a data: URL (or start it with --allow-image-hosts)"
            )
        connector = aiohttp.TCPConnector(resolver=self._resolver or PublicResolver(), use_dns_cache=False)
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
                return await self._follow(session, given)
        except PrivateAddress as error:
            raise NotFetched("names a host with a private address") from error
        except TimeoutError:
            raise NotFetched(f"could not be fetched within {_SECONDS:g} s") from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PrivateAddress):
                raise NotFetched("names a host with a private address") from None
            raise NotFetched("names a host that cannot be reached") from None
        except (aiohttp.ClientError, ValueError, UnicodeError, OSError) as error:
            raise NotFetched(f"could not be fetched ({type(error).__name__})") from None

    async def _follow(self, session: aiohttp.ClientSession, given: str) -> bytes:
        url = URL(given)
        for _ in range(_MOST_REDIRECTS + 1):
            self._check(url)
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status in (301, 302, 303, 307, 308) and "Location" in answer.headers:
                    url = url.join(URL(answer.headers["Location"]))
                    continue
                return await self._read(answer)
        raise NotFetched(f"leads through more than {_MOST_REDIRECTS} redirects")

    def _check(self, url: URL) -> None:
        host = url.host
        if url.scheme not in ("http", "https") or not host:
            raise NotFetched("must be a data:, http: or https: URL, also where it redirects to")
        if not is_allowed(host, self._hosts):
            raise NotFetched(f"names the host {shorten(host)}, which is not among --allow-image-hosts")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return  # a name: the resolver looks at its addresses
        if not is_public(host):
            raise NotFetched("names a private address")

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            raise NotFetched(f"could not be fetched: its host answers with {answer.status}")
        if not answer.content_type.startswith(_TYPES):
            raise NotFetched(f"leads to {shorten(answer.content_type)}, which is no image")
        data = bytearray()
        async for piece in answer.content.iter_chunked(_PIECE):
            data += piece
            if len(data) > self._most_bytes:
                raise NotFetched(f"leads to more than {self._most_bytes >> 20} MiB (--max-image-mb)")
        return bytes(data)


async def read_below(directory: str | None, given: str, most_bytes: int) -> bytes:
    """The file of a `file:` URL, if it is below the directory. Raises NotFetched."""
    if directory is None:
        raise NotFetched("is a file of the server, which reads none: send a data: URL (or start it with --image-dir)")
    return await asyncio.to_thread(_read_below, Path(directory), given, most_bytes)


def _read_below(directory: Path, given: str, most_bytes: int) -> bytes:
    parts = urlsplit(given)
    refusal = NotFetched("names no file below --image-dir")
    if parts.netloc not in ("", "localhost") or "\0" in unquote(parts.path):
        raise refusal
    root = directory.resolve()
    path = (root / unquote(parts.path)).resolve()  # an absolute path stands for itself, a link for what it leads to
    if not path.is_relative_to(root):
        raise refusal
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    except OSError:
        raise refusal from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refusal
        if status.st_size > most_bytes:
            raise NotFetched(f"names a file of more than {most_bytes >> 20} MiB (--max-image-mb)")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)
