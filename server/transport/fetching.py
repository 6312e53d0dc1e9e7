"""Files that a request names instead of sending them: on hosts that the server was told of, or below one directory.

What a client names must not reach what the client could not: a host is on the list, its address is a public one, each
redirect is looked at like the first URL, and the connection goes to the address that was looked at.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from bequest.server.wire.reading import shorten

_SECONDS = 15.0  # for all of a file
_MOST_REDIRECTS = 3
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_PIECE = 1 << 16
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that is given to anybody
# A server of names may be as slow as whoever owns it likes: nobody else waits for a thread here.
_LOOKUPS = ThreadPoolExecutor(8, thread_name_prefix="names")


class NotFetched(Exception):
    """Says why, to the client: a sentence that follows the name of its field."""


class PrivateAddress(OSError):
    """A host has an address that is not for everybody."""


class SystemResolver(AbstractResolver):
    """What the system says of a name, in threads of its own."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        def look() -> list[ResolveResult]:
            infos = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
            return [_result(host, port, family, proto, str(address[0])) for family, _, proto, _, address in infos]

        return await asyncio.get_running_loop().run_in_executor(_LOOKUPS, look)

    async def close(self) -> None:
        pass


def _result(host: str, port: int, family: int, proto: int, address: str) -> ResolveResult:
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=proto, flags=flags)


class PublicResolver(AbstractResolver):
    """Finds public addresses alone. A host with one other address has none: the next answer might be that one."""

    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = inner or SystemResolver()

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
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.is_global and not parsed.is_multicast
    inner = _ipv4_within(parsed)
    is_given = parsed in _UNICAST or parsed in _NAT64
    return is_given and parsed.is_global and (inner is None or inner.is_global)


def _ipv4_within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Where a gateway would send what goes to an address that wraps another one."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def is_allowed(host: str, port: int | None, allowed: Sequence[str]) -> bool:
    """A name on the list, or below one that is written `*.name`; `*` is any. `port` None: that of the URL's scheme;
    another one is written behind the name, as `name:8080`."""
    name = host.lower().rstrip(".")
    for entry, its_port in map(_entry, allowed):
        if its_port == port and (entry in ("*", name) or (entry.startswith("*.") and name.endswith(entry[1:]))):
            return True
    return False


def _entry(written: str) -> tuple[str, int | None]:
    name, colon, port = written.lower().rpartition(":")
    if not colon or not port.isdecimal() or (":" in name and not name.endswith("]")):
        return written.lower().strip("[]"), None
    return name.strip("[]"), None if int(port) in (80, 443) else int(port)


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
            async with (
                aiohttp.ClientSession(
                    connector=connector, timeout=timeout, auto_decompress=False, headers={"Accept-Encoding": "identity"}
                ) as session,
                asyncio.timeout(_SECONDS),
            ):  # all redirects together
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
        host, port = url.host, None if url.is_default_port() else url.port
        if url.scheme not in ("http", "https") or not host:
            raise NotFetched("must be a data:, http: or https: URL, also where it redirects to")
        if url.user is not None or url.password is not None:
            raise NotFetched("must not hold the name or the password of a user")
        if _is_number(host) and not is_public(host):
            raise NotFetched("names a private address")
        if is_allowed(host, port, self._hosts):
            return
        if port is not None and is_allowed(host, None, self._hosts):
            raise NotFetched(f"names port {port} of its host, and --allow-image-hosts has no {shorten(host)}:{port}")
        raise NotFetched(f"names the host {shorten(host)}, which is not among --allow-image-hosts")

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            raise NotFetched(f"could not be fetched: its host answers with {answer.status}")
        if not answer.content_type.startswith(_TYPES):
            raise NotFetched(f"leads to {shorten(answer.content_type)}, which is no image")
        if (coding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
            raise NotFetched(f"comes from its host in the coding {shorten(coding)}, which was not asked for")
        data = bytearray()
        if (answer.content_length or 0) > self._most_bytes:
            raise self._too_long()
        async for piece in answer.content.iter_chunked(_PIECE):
            data += piece
            if len(data) > self._most_bytes:
                raise self._too_long()
        return bytes(data)

    def _too_long(self) -> NotFetched:
        return NotFetched(f"leads to more than {self._most_bytes >> 20} MiB (--max-image-mb)")


def _is_number(host: str) -> bool:
    """An address in some way of writing it, not a name. Nobody resolves one: what is not written as addresses are
    (2130706433, 127.1) would be read as one later on."""
    return ":" in host or host.replace(".", "").isdigit()


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
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer
    try:
        root = directory.resolve()
        path = (root / unquote(parts.path)).resolve()  # an absolute path stands for itself, a link for what it leads to
        if not path.is_relative_to(root):
            raise refusal
        descriptor = os.open(path, flags)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links that lead to each other
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
