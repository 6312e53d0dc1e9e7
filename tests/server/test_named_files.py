"""Files that requests name: hosts of a list, public addresses, few redirects, no more bytes than allowed."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from bequest.server.transport.fetching import Fetcher, NotFetched, PublicResolver, is_allowed, is_public, read_below

MOST = 1 << 20


class Everywhere(AbstractResolver):
    """Every name is this machine."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:  # type: ignore[override]
        return [
            ResolveResult(
                hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def image(request: web.Request) -> web.Response:
        return web.Response(body=b"pixels", content_type=request.query.get("type", "image/png"))

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(MOST + 1), content_type="image/png")

    async def loop(request: web.Request) -> web.Response:
        raise web.HTTPFound("/loop")

    async def to(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["url"])

    app = web.Application()
    app.add_routes([web.get("/image", image), web.get("/large", large), web.get("/to", to), web.get("/loop", loop)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    await runner.cleanup()


async def fetched(url: str, hosts: tuple[str, ...] = ("pictures.example",)) -> bytes | str:
    try:
        return await Fetcher(hosts, MOST, Everywhere()).fetch(url)
    except NotFetched as error:
        return str(error)


async def test_hosts_of_the_list(port: int) -> None:
    at = f"http://pictures.example:{port}"
    assert await fetched(f"{at}/image") == b"pixels"
    assert await fetched(f"{at}/to?url=/image") == b"pixels"
    assert "not among --allow-image-hosts" in str(await fetched(f"http://other.example:{port}/image"))
    assert "not among --allow-image-hosts" in str(await fetched(f"{at}/to?url=http://other.example:{port}/image"))
    assert "must be a data:" in str(await fetched(f"{at}/to?url=file:///etc/passwd"))
    assert "fetches none" in str(await fetched(f"{at}/image", ()))


async def test_what_a_host_may_send(port: int) -> None:
    at = f"http://pictures.example:{port}"
    assert "no image" in str(await fetched(f"{at}/image?type=text/html"))
    assert "more than 1 MiB" in str(await fetched(f"{at}/large"))
    assert "answers with 404" in str(await fetched(f"{at}/missing"))
    assert "more than 3 redirects" in str(await fetched(f"{at}/loop"))
    assert "cannot be reached" in str(await fetched("http://pictures.example:1/x"))


async def test_private_addresses(port: int) -> None:
    async def refused(url: str) -> str:
        with pytest.raises(NotFetched) as caught:
            await Fetcher(("*",), MOST, PublicResolver(Everywhere())).fetch(url)
        return str(caught.value)

    assert "private address" in await refused(f"http://pictures.example:{port}/image")
    for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
        assert "private address" in await refused(f"http://{host}:{port}/image")


def test_addresses_and_names() -> None:
    assert is_public("8.8.8.8") and is_public("2001:4860:4860::8888")
    private = ("192.168.1.1", "100.64.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "fc00::1", "224.0.0.1", "x")
    assert not any(map(is_public, private))
    assert is_allowed("A.example.", ("a.example",)) and is_allowed("b.a.example", ("*.a.example",))
    assert not is_allowed("a.example", ("*.a.example",)) and not is_allowed("evila.example", ("*.a.example",))


async def test_files_below_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"pixels")
    (tmp_path / "images-secret").write_bytes(b"secret")
    assert await read_below(str(folder), "file:a%20b.png", MOST) == b"pixels"
    assert await read_below(str(folder), f"file://{folder}/a%20b.png", MOST) == b"pixels"
    for wrong in (
        f"file://{tmp_path}/images-secret",
        "file:../images-secret",
        "file://host/a%20b.png",
        "file:%00",
        "file:",
    ):
        with pytest.raises(NotFetched, match="no file below"):
            await read_below(str(folder), wrong, MOST)
    with pytest.raises(NotFetched, match="more than"):
        await read_below(str(folder), "file:a%20b.png", 3)
    with pytest.raises(NotFetched, match="reads none"):
        await read_below(None, "file:a%20b.png", MOST)
