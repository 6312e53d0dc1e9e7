"""Images that cost more than they look: bombs by pixels, by parts, by number. Each is refused by name, nobody waits,
and nothing stays."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from bequest.engine.types.image import Detail, PreparedImage, Rgb
from tests.attack.conftest import Serve, Victim
from tests.attack.test_memory import _used
from tests.server.fakes import FakeEngine, seeing_engine
from tests.tiny_seeing import data_url, encoded, picture

pytest.importorskip("PIL")
WHERE = "messages[0].content[0].image_url"


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def canvas(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND")


def files() -> dict[str, bytes]:
    png, jpeg = encoded(picture(64, 64)), encoded(picture(64, 64), "JPEG")
    webp = bytearray(encoded(picture(64, 64), "WEBP"))
    webp[21:25] = b"\xff\xff\xff\x0f"  # lossless: fourteen bits for each side
    return {
        "png": canvas(65_000, 65_000),
        "line": canvas(60_000, 1),
        "gif": b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\2\2L\1\0;",
        "webp": bytes(webp),
        "jpeg": jpeg.replace(b"\xff\xc0\x00\x11\x08\x00\x40\x00\x40", b"\xff\xc0\x00\x11\x08\xff\xff\xff\xff"),
        "chunks": png[:33] + chunk(b"teSt") * 500_000 + png[33:],
        "segments": jpeg[:2] + b"\xff\xfe\x00\x02" * 1_000_000 + jpeg[2:],
        "scans": jpeg[:-2] + jpeg[jpeg.index(b"\xff\xda") : -2] * 2_000 + jpeg[-2:],
    }


def body_of(*urls: str) -> bytes:
    content = [{"type": "image_url", "image_url": url} for url in urls]
    return orjson.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1})


@pytest.mark.parametrize("name", files())
async def test_bombs(serve: Serve, name: str) -> None:
    victim, body = serve(engine=seeing_engine), body_of(data_url(files()[name]))
    answer, content = await victim.calmly(lambda _: victim.front.post("/v1/chat/completions", body), stall=0.1)
    assert answer.status == 400 and content["error"]["param"] == WHERE, content
    code = "image_too_large" if name in ("png", "gif", "webp", "jpeg") else "invalid_image"
    assert content["error"]["code"] == code, content
    assert await _used(victim) == 0 and await _num_known(victim) == 0


async def test_a_hundred_images(serve: Serve) -> None:
    victim, good = serve(engine=seeing_engine), data_url(encoded(picture(64, 64)))
    answer, content = await victim.front.post("/v1/chat/completions", body_of(*[good] * 100))
    assert answer.status == 400 and content["error"]["param"] == WHERE.replace("[0].image", "[32].image"), content
    assert await _num_known(victim) == 0
    answer, _ = await victim.front.post("/v1/chat/completions", body_of(good))
    assert answer.status == 200


def blowing_up() -> FakeEngine:
    """Each image becomes half a megabyte of pixels, however small its file is."""
    engine = seeing_engine()
    assert engine.info.vision is not None

    def prepare(image: Rgb, detail: Detail) -> PreparedImage:
        return PreparedImage(np.zeros((1, 256, 683, 3), np.uint8), (4,), 4)

    engine.info = replace(engine.info, vision=replace(engine.info.vision, prepare=prepare))
    return engine


async def test_pixels_of_small_files_are_counted(serve: Serve) -> None:
    victim = serve(engine=blowing_up, max_in_flight_mb=2, images_mb=1)
    urls = [data_url(encoded(picture(8, 8, seed))) for seed in range(6)]
    answer, content = await victim.front.post("/v1/chat/completions", body_of(*urls))
    assert answer.status in (413, 503) and "--max-in-flight-mb" in content["error"]["message"], content
    assert await _used(victim) == 0 and await _num_known(victim) <= 2
    answer, _ = await victim.front.post("/v1/chat/completions", body_of(*urls[:3]))
    assert answer.status == 200 and await _used(victim) == 0


async def test_thousands_of_images_that_come_again_cost_no_look_at_each(serve: Serve) -> None:
    """A new one needs ids that nobody has."""
    victim = serve(engine=seeing_engine)

    def fill() -> list[Any]:
        store = victim.server.context.images
        assert store is not None
        from bequest.engine.state.contents import ContentKey

        prepared = PreparedImage(np.zeros((1, 2, 2, 3), np.uint8), (4,), 4)
        return [store.take(ContentKey.of("x", str(n).encode(), Detail()), prepared) for n in range(20_000)]

    async with victim.probe() as probe:
        held = await victim.server.on_loop(fill)
    assert len({image.first_id for image in held}) == 20_000 and probe.loop_cpu_s < 5, probe


async def _num_known(victim: Victim) -> int:
    return await victim.server.on_loop(lambda: len(victim.server.context.engine.contents))
