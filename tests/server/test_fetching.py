"""What a URL of a request may lead to: which addresses, and which answers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from bequest.server.transport.fetching import Fetcher, NotFetched, PublicResolver, is_allowed, is_public

MOST = 1 << 20

PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"),
    *("169.254.169.254", "100.64.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1"),
    # An address within another one: by a mapping, by 6to4, by a NAT64 gateway, by Teredo.
    *("::ffff:10.0.0.1", "2002:a00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "2001:0:0:0:0:0:f5ff:fffe"),
    *("localhost", "", "10.1", "0x7f.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_hosts_on_the_list() -> None:
    assert is_allowed("Images.Example.ORG.", ["images.example.org"]) and is_allowed("a.b.org", ["*.b.org"])
    assert is_allowed("anything", ["*"]) and not is_allowed("b.org", ["*.b.org"])
    assert not is_allowed("evilb.org", ["*.b.org"]) and not is_allowed("a.b.org.evil.com", ["a.b.org", "*.b.org"])


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


async def fetch(url: str, resolver: AbstractResolver | None = None) -> bytes:
    return await Fetcher(["images.test", "*.more.test", "10.0.0.1"], MOST, resolver or Names()).fetch(url)


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
