"""What a file of an image is made of, before anybody decodes it: chunks, segments, scans.

An image within the bounds of its size may still take hours to read: a progressive JPEG has as many scans as its writer
likes, each of which goes over all of the image for a few bytes, and millions of empty chunks are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bequest.engine.errors import InvalidImage

MOST_PARTS = 1 << 14  # of a file, scans apart: a chunk of pixels has some thousand bytes
MOST_SCANS = 64  # of a progressive JPEG; encoders make about ten
_SCAN = b"\xff\xda"
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xDA)))  # markers of a JPEG that no length follows


def check_parts(data: bytes) -> None:
    """Raises InvalidImage for a file of too many parts. One that is broken is for its decoder to complain of."""
    walk = next((walk for begin, walk in _WALKS.items() if data.startswith(begin)), None)
    if walk is None:
        return
    for number, _ in enumerate(walk(data)):
        if number >= MOST_PARTS:
            raise _too_many("chunks", MOST_PARTS)
    if walk is _segments and data.count(_SCAN, _first_scan(data)) > MOST_SCANS:
        raise _too_many("scans", MOST_SCANS)


def _too_many(kind: str, most: int) -> InvalidImage:
    message = f"The file has more than {most} {kind}, which would take long to read."
    return InvalidImage(message, reason="image_in_parts", kind=kind, most=most)


def _chunks(data: bytes) -> Iterator[int]:
    """Where those of a PNG begin."""
    at = 8
    while at + 8 <= len(data):
        yield at
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _segments(data: bytes) -> Iterator[int]:
    """Those of a JPEG before its first scan, and each byte between them that belongs to none."""
    at = 2
    while at + 4 <= len(data):
        yield at
        if data[at] != 0xFF or data[at + 1] == 0xFF:
            at += 1
        elif data[at : at + 2] == _SCAN:
            return
        else:
            at += 2 if data[at + 1] in _ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _first_scan(data: bytes) -> int:
    """A preview within a segment has scans of its own, which nobody reads."""
    return max(_segments(data), default=0)


def _blocks(data: bytes) -> Iterator[int]:
    """Those of a GIF before its first image, and the parts of each."""
    at = 13 + (3 << ((data[10] & 7) + 1) if len(data) > 10 and data[10] & 0x80 else 0)
    while at + 1 < len(data) and data[at] not in b",;":
        yield at
        if data[at] != 0x21:
            at += 1
            continue
        at += 2
        while at < len(data) and data[at]:
            yield at
            at += 1 + data[at]
        at += 1


_WALKS: dict[bytes, Callable[[bytes], Iterator[int]]] = {
    b"\x89PNG\r\n\x1a\n": _chunks,
    b"\xff\xd8": _segments,
    b"GIF8": _blocks,
}
