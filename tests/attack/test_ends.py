"""Processes that begin and end however they are treated."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent
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


def test_a_whole_server_ends_while_its_workers_are_stuck() -> None:
    """A text that is an hour from its tokens, a request that waits for it, and SIGTERM."""
    command = [sys.executable, "-m", "tests.server.fake_process", "--stuck", "--drain-timeout", "0.1"]
    with subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        url = next(line for line in lines if "ready on" in line).split("ready on ")[1].split()[0]
        body = json.dumps({"prompt": "word " * 100_000}).encode()

        def ask() -> None:
            with suppress(OSError):
                urllib.request.urlopen(
                    urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
                )

        asking = threading.Thread(target=ask)
        asking.start()
        assert next(line for line in lines if "stuck" in line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, "the drain timeout is a tenth of a second"
        asking.join()


def test_a_start_without_stderr() -> None:
    ended = subprocess.run([sys.executable, "-c", _CLOSED], timeout=60, check=False, stdout=subprocess.PIPE)
    assert ended.returncode == 0 and ended.stdout == b"fine\n"
