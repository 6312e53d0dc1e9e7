"""Files come into the page cache before they are asked for, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bequest.engine.models import read_ahead
from bequest.engine.models.read_ahead import reading_ahead


def write(folder: Path, *sizes: int) -> list[Path]:
    paths = [folder / f"{number}.bin" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("is_cached", [False, True])
def test_every_piece_is_read_once(is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are there already."""
    monkeypatch.setattr(read_ahead, "_PIECE", 100)
    files, seen, read = write(tmp_path, 250, 0, 100, 731), list[tuple[str, int]](), os.preadv

    def watched(file: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags:
            assert flags == os.RWF_NOWAIT and len(buffers[0]) == 1
            if not is_cached:
                raise BlockingIOError
            return read(file, buffers, offset)
        seen.append((os.readlink(f"/proc/self/fd/{file}"), offset))
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    with reading_ahead(files):
        for thread in readers():
            thread.join()
    wanted = [(str(path), offset) for path in files for offset in range(0, path.stat().st_size, 100)]
    assert sorted(seen) == ([] if is_cached else wanted)


def test_threads_end_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PIECE", 1)
    with pytest.raises(ZeroDivisionError), reading_ahead(write(tmp_path, 1 << 20)):
        assert readers()
        raise ZeroDivisionError
    assert not readers()


def test_more_than_the_memory_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_free_bytes", lambda: 1000)
    with reading_ahead(write(tmp_path, 701)):
        assert not readers()
    with reading_ahead(write(tmp_path, 699)):
        pass
    assert not readers()


def test_a_file_that_goes_away_is_no_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path, 10, 10)
    pieces = read_ahead._Pieces(files)
    files[0].unlink()
    read_ahead._read(pieces, threading.Event())
