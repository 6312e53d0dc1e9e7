"""Lines leave in order; a reader that does not read stops nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bequest.server.operation import log_writer
from bequest.server.operation.log_writer import LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def say(handler: logging.Handler, text: str) -> None:
    handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def read_until(descriptor: int, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        data += os.read(descriptor, 1 << 16)
    return data


def test_lines_come_in_order(pipe: tuple[int, int]) -> None:
    handler = LineWriter(pipe[1])
    for number in range(100):
        say(handler, f"line {number} \udcff")
    handler.flush()
    assert read_until(pipe[0], b"line 99 \\udcff\n") == b"".join(b"line %d \\udcff\n" % n for n in range(100))


def test_lines_without_a_reader_are_counted(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 0.01)
    handler = LineWriter(pipe[1], max_waiting=10)
    for number in range(1000):
        say(handler, f"{number} " + "x" * 1000)
    handler.flush()  # gives up
    lines = read_until(pipe[0], b"nobody read them\n")
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 20.0)
    handler.flush()  # what waited has left
    say(handler, "again")
    lines += read_until(pipe[0], b"again\n")
    # How often the loss is told depends on how the threads took turns.
    notices = [line for line in lines.splitlines() if line.endswith(b"nobody read them")]
    lost = sum(int(line.split()[0]) for line in notices)
    assert 0 < lost == 1000 - (len(lines.splitlines()) - len(notices) - 1)


def test_a_closed_descriptor_is_no_error(pipe: tuple[int, int]) -> None:
    handler = LineWriter(pipe[1])
    os.close(pipe[0])
    say(handler, "nobody")
    handler.flush()
    say(handler, "nobody still")
    handler.flush()


def test_a_process_ends_though_its_lines_are_stuck() -> None:
    code = (
        "import logging; from bequest.server.operation import log_writer; log_writer.FLUSH_SECONDS = 0.1\n"
        "from server.operation.logs import configure_logging; configure_logging('info')\n"
        "for _ in range(3000): logging.info('x' * 100)\n"
        "print('done', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.wait(timeout=20) == 0
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read() == b"done\n"
