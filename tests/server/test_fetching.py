"""What a URL of a request may lead to: which addresses, and which answers."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from bequest.server.transport import fetching
from bequest.server.transport.fetching import Fetcher, NotFetched, PublicResolver, is_allowed, is_public

MOST = 1 << 20

PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"),
    *("169.254.169.254", "100.64.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1"),
    # An address within another one: by a mapping, by 6to4, by a NAT64 gateway, by Teredo.
    *("::ffff:10.0.0.1", "2002:a00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "2001:0:0:0:0:0:f5ff:fffe"),
    *("::127.0.0.1", "::ffff:0:0", "fec0::1", "localhost", "", "10.1", "0x7f.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_hosts_on_the_list() -> None:
    def allowed(host: str, *entries: str, port: int | None = None) -> bool:
        return is_allowed(host, port, entries)

    assert allowed("Images.Example.ORG.", "images.example.org") and allowed("a.b.org", "*.b.org")
    assert allowed("anything", "*") and not allowed("b.org", "*.b.org")
    assert not allowed("evilb.org", "*.b.org") and not allowed("a.b.org.evil.com", "a.b.org", "*.b.org")
    assert not allowed("b.org", "b.org", port=22) and not allowed("b.org", "*", port=22)
    assert allowed("b.org", "b.org:8080", port=8080) and not allowed("b.org", "b.org:8080")
    assert allowed("b.org", "b.org:443") and allowed("a.b.org", "*.b.org:81", port=81)
    assert allowed("2606:4700::1", "2606:4700::1") and allowed("2606:4700::1", "[2606:4700::1]:81", port=81)


class Names(AbstractResolver):
    """Every name is at one address, as if it were public."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=0)]

    async def close(self) -> None:
        pass


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a host that has an image, and much that is none."""

    async def answer(request: web.Request) -> web.Response:
        match request.match_info["name"]:
            case "image":
                return web.Response(body=b"pixels", content_type="image/png")
            case "page":
                return web.Response(text="<html>", content_type="text/html")
            case "huge":
                return web.Response(body=b"x" * (MOST + 1), content_type="image/png")
            case "moved":
                raise web.HTTPFound(request.query["to"])
            case "around":
                raise web.HTTPFound("/around")
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


HOSTS = ("images.test", "*.more.test", "10.0.0.1")


async def fetch(url: str, resolver: AbstractResolver | None = None) -> bytes:
    port = URL(url).port
    return await Fetcher([*HOSTS, *(f"{host}:{port}" for host in HOSTS)], MOST, resolver or Names()).fetch(url)


async def test_an_image_is_fetched(port: int) -> None:
    assert await fetch(f"http://images.test:{port}/image") == b"pixels"
    assert await fetch(f"http://images.test:{port}/moved?to=/image") == b"pixels"
    assert await fetch(f"http://images.test:{port}/moved?to=http://a.more.test:{port}/image") == b"pixels"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none", "answers with 404"),
        ("page", "leads to text/html, which is no image"),
        ("huge", "more than 1 MiB"),
        ("moved?to=http://other.test/image", "names the host other.test, which is not among"),
        ("moved?to=http://10.0.0.1/image", "names a private address"),
        ("moved?to=http://images.test:22/", "names port 22 of its host, and --allow-image-hosts has no images.test:22"),
        ("moved?to=http://me:secret@images.test/image", "name or the password of a user"),
        ("moved?to=http://[::ffff:7f00:1]/image", "names a private address"),
        ("moved?to=//2130706433/image", "names a private address"),
        ("moved?to=http://[", "could not be fetched"),
        ("moved?to=file:///etc/passwd", "must be a data:, http: or https: URL"),
        ("around", "more than 3 redirects"),
    ],
)
async def test_what_is_not_fetched(port: int, path: str, why: str) -> None:
    with pytest.raises(NotFetched, match=why):
        await fetch(f"http://images.test:{port}/{path}")


async def test_a_name_with_a_private_address() -> None:
    with pytest.raises(NotFetched, match="names a host with a private address"):
        await fetch("http://images.test/image", PublicResolver(Names("192.168.0.1")))


@pytest.mark.parametrize("url", ["http://127.1/", "http://0177.0.0.1/", "http://0/", "http://[::127.0.0.1]/"])
async def test_addresses_in_other_forms(url: str) -> None:
    """What the system would read as an address later on, without a resolver."""
    with pytest.raises(NotFetched, match="names a private address"):
        await Fetcher(["*"], MOST, Names()).fetch(url)


class Rebound(Names):
    """The first answer is a public address, each later one is not."""

    def __init__(self) -> None:
        super().__init__("8.8.8.8")
        self.asked = 0

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        self.asked += 1
        if self.asked > 1:
            self._address = "127.0.0.1"
        return await super().resolve(host, port, family)


async def test_a_name_that_changes_its_address(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the address that was looked at: nobody asks again in between."""
    monkeypatch.setattr(fetching, "_SECONDS", 0.2)
    names = Rebound()
    with pytest.raises(NotFetched, match=r"within 0\.2 s|cannot be reached"):
        await fetch(f"http://images.test:{port}/image", PublicResolver(names))
    assert names.asked == 1


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
RAW = {
    "endless body": ([HEAD + b"\r\n", *[b"x" * (1 << 16)] * 100], "more than 1 MiB"),
    "endless chunks": (
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"8000\r\n" + b"x" * 32768 + b"\r\n"] * 99],
        "1 MiB",
    ),
    "long by its own word": ([HEAD + b"Content-Length: 99999999999\r\n\r\n"], "more than 1 MiB"),
    "longer than it is": ([HEAD + b"Content-Length: 100\r\n\r\nabc"], "could not be fetched"),
    "slow body": ([HEAD + b"Content-Length: 100\r\n\r\na", b"", b"b"], "within 0.2 s"),
    "nothing at all": ([b"", b""], "within 0.2 s"),
    "endless head": ([HEAD, *[b"X-More: " + b"y" * 8000 + b"\r\n"] * 500], "could not be fetched"),
    "no head": ([b"\x00\x01\x02SSH-2.0\r\n"], "could not be fetched"),
    "gzip": (
        [HEAD + b"Content-Encoding: gzip\r\nContent-Length: 50\r\n\r\n" + gzip.compress(bytes(1 << 20))[:50]],
        "in the coding gzip",
    ),
    "a page": ([HEAD.replace(b"image/png", b"text/html") + b"\r\n<html>"], "leads to text/html"),
}


@pytest.mark.parametrize("name", RAW)
async def test_hosts_that_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty piece is a pause. Afterwards nothing is open."""
    pieces, why = RAW[name]
    monkeypatch.setattr(fetching, "_SECONDS", 0.2 if "within" in why else 5.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for piece in pieces:
                await asyncio.sleep(0 if piece else 1)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    before = open_files()
    with pytest.raises(NotFetched, match=why):
        await fetch(f"http://images.test:{server.sockets[0].getsockname()[1]}/x")
    server.close()
    for _ in range(200):
        if open_files() <= before:
            break
        await asyncio.sleep(0.01)
    assert open_files() <= before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
