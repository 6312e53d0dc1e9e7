"""Processes that begin and end however they are treated."""

from __future__ import annotations

import subprocess
import sys

_HUNG = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from bequest.server.__main__ import _exit
ThreadPoolExecutor(1).submit(time.sleep, 300)
_exit(0)
"""
_CLOSED = """
import os, socket
os.close(2)
import sys
sys.stderr = None
from bequest.server.__main__ import _open_standard_files
from bequest.server.operation.logs import configure_logging
_open_standard_files()
with socket.socket() as one:
    assert one.fileno() > 2, "a socket would be written the log"
    configure_logging("info")
    print("to nowhere", file=sys.stderr)
print("fine")
"""


def test_a_worker_that_hangs_does_not_hold_the_end_up() -> None:
    ended = subprocess.run([sys.executable, "-c", _HUNG], timeout=60, check=False)
    assert ended.returncode == 0


def test_a_start_without_stderr() -> None:
    ended = subprocess.run([sys.executable, "-c", _CLOSED], timeout=60, check=False, stdout=subprocess.PIPE)
    assert ended.returncode == 0 and ended.stdout == b"fine\n"
