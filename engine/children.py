"""Processes of their own for work that a request brings and nobody can bound beforehand: grammars, chat templates.

A thread that never ends cannot be stopped, and memory that one takes is everybody's. A child process can be killed, and
the kernel bounds its memory. A child does one task after another, a line of JSON each way over its pipes. A task that
takes too long, or too much memory, costs the child its life; the next task gets another child.

A child arms a timer of its own for each task, so it does not outlive a server that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PIECE = 1 << 16
# What a child needs of the environment; it holds keys, too, which no child needs.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_GRACE = 5.0  # seconds: the parent is the one that notices; the child's own timer is for one whose parent is gone


class TaskTooCostly(Exception):
    """The task took longer, or more memory, than it may; or it crashed the child."""


class Children:
    """Lends children to threads, each to one at a time. They start when they are needed."""

    def __init__(self, module: str, seconds: float, num_bytes: int, most_idle: int = 2) -> None:
        """`module` calls `serve` when it is run. `seconds` and `num_bytes` bound a task; `most_idle` are kept warm."""
        self.seconds = seconds
        self._arguments = [module, str(seconds + _GRACE), str(num_bytes)]
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._closed = False

    def ask(self, task: Any) -> Any:
        """The child's answer to `task`; both are JSON. Any thread; blocks. Raises TaskTooCostly."""
        line = json.dumps(task).encode() + b"\n"
        child = self._take()
        answer = b""
        try:
            answer = child.ask(line, self.seconds)
        finally:
            self._give_back(child, alive=bool(answer))
        if not answer:
            raise TaskTooCostly
        return json.loads(answer)

    def close(self) -> None:
        """Does not wait for a task that is under way: its child is gone, and so it ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()  # whoever waits for it ends it
        for child in idle:
            child.end()

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise TaskTooCostly
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    self._busy.add(child)
                    return child
                child.end()
        child = _Child(self._arguments)
        self._lend(child)
        return child

    def _lend(self, child: _Child) -> None:
        with self._lock:
            self._busy.add(child)
            if self._closed:  # while it started
                child.kill()

    def _give_back(self, child: _Child, alive: bool) -> None:
        with self._lock:
            self._busy.discard(child)
            keep = alive and not self._closed and len(self._idle) < self._most_idle
            if keep:
                self._idle.append(child)
        if not keep:
            child.end()


class _Child:
    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            cwd=Path(__file__).parents[2],  # where this package is found, however this process found it
        )
        if not self._line(None):  # it is ready: its start does not count
            self.end()
            raise RuntimeError(f"the process {arguments[0]} ended before it was ready; stderr says why")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """A line; empty if none came in time."""
        assert self._process.stdin is not None
        due = time.monotonic() + seconds
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except OSError:
            return b""
        return self._line(due)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _line(self, due: float | None) -> bytes:
        """What the child says until `due`; empty unless it is a whole line."""
        assert self._process.stdout is not None
        descriptor, said = self._process.stdout.fileno(), bytearray()
        poll = select.poll()  # select() takes no descriptor above 1,023, and a server has more
        poll.register(descriptor, select.POLLIN)
        while not said.endswith(b"\n"):
            if not poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000):
                return b""
            piece = os.read(descriptor, _PIECE)
            if not piece:
                return b""
            said += piece
        return bytes(said)


def serve(answer: Callable[[Any], Any]) -> None:
    """The life of a child: answers tasks until nobody asks any more. What `answer` does not catch ends it."""
    seconds, num_bytes = float(sys.argv[1]), int(sys.argv[2])
    answers = os.dup(1)
    if not _is_heard(answers, b"ready\n"):
        return
    # What a task makes Python or a library print is the client's text, and no line of the server's log.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or of systemd to all: the server drains first
        signal.signal(number, signal.SIG_IGN)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))  # it writes no file
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        said = json.dumps(answer(json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not _is_heard(answers, said + b"\n"):
            return


def _is_heard(descriptor: int, line: bytes) -> bool:
    """Writes a line, unless nobody is there any more: a server that is killed says nothing to its children."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BrokenPipeError:
        return False
    return True
