"""Files that requests name: below one directory, and no larger than allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bequest.server.transport.fetching import NotFetched, read_below

MOST = 1 << 20


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
