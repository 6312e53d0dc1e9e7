"""Processes that begin with everything imported: forks of one that imported it, started when it is first needed.

Importing torch and a server's libraries takes most of the time of a start, and the suite starts dozens of servers and
programs. They are as apart as any two processes, but the interpreter's own start is not theirs. What is about that, the
order of imports or variables that libraries read while they are imported starts with `subprocess` instead, and so does
the server of the embedded model that most tests of the whole share (tests/conftest.py).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
_NONE: dict[str, str] = {}


# What only some of the forks import: for runs of all tests.
_OF_SOME = ("anthropic", "hypothesis", "torch.distributed.tensor", "bequest.engine.models.gguf_config")


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def begin_early() -> None:
    """Starts the process that will be forked, which imports beside whatever the caller does next. Forks of the caller
    share it once they call `share`."""
    _context().set_forkserver_preload([*_OF_SOME, "tests.preloaded"])
    forkserver.ensure_running()


def share() -> None:
    """In a fork of who called `begin_early`, where multiprocessing would wait for the process as if for a child."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


class Forked:
    """What tests use of a subprocess.Popen whose stderr is a pipe of text."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`python -m` with these arguments, in the checkout's folder."""
        self.stderr, end = _pipe()
        try:
            self._process = _start(_run_module, list(arguments), 1, end)
        finally:
            os.close(end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_program(text: str, timeout: float | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """What subprocess.run gives of `python -c text` with these variables, too."""
    return _ended(_run_text, text, timeout, environment)


def run_tests(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The same of `python -m pytest`."""
    # Plugins that came with what is imported already run as they are.
    quiet = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    return _ended(_run_module, ["pytest", *quiet, *arguments], None, environment)


def _ended(
    target: Callable[..., None], what: Any, timeout: float | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    (out, out_end), (err, err_end) = _pipe(), _pipe()
    try:
        process = _start(target, what, out_end, err_end, environment)
    finally:
        os.close(out_end)
        os.close(err_end)
    with out, err, ThreadPoolExecutor(2) as threads:
        reading = threads.submit(out.read), threads.submit(err.read)
        process.join(timeout)
        if (code := process.exitcode) is None:
            process.kill()
        printed, complained = (one.result() for one in reading)
    if code is None:
        raise subprocess.TimeoutExpired(what, timeout or 0.0, printed, complained)
    return subprocess.CompletedProcess(what, code, printed, complained)


def _pipe() -> tuple[IO[str], int]:
    """Its reading end, and the other one."""
    read, write = os.pipe()
    return os.fdopen(read, encoding="utf-8"), write


def _start(
    target: Callable[..., None], what: object, stdout: int, stderr: int, environment: dict[str, str] = _NONE
) -> ForkServerProcess:
    # A daemon: one that a test leaves behind does not keep the suite from its end.
    files = _Passed(stdout), _Passed(stderr)
    arguments = (target, what, *files, dict(os.environ) | environment, os.sched_getaffinity(0))
    process = _context().Process(target=_begin, args=arguments, daemon=True)
    process.start()
    return process


class _Passed:
    """A file descriptor on its way to a fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, (DupFd(self._number),)


def _arrived(passed: Any) -> int:
    return int(passed.detach())


def _begin(
    target: Callable[[Any], None], what: Any, stdout: int, stderr: int, environment: dict[str, str], cores: set[int]
) -> None:
    os.sched_setaffinity(0, cores)  # those of who asks
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    target(what)


def _run_module(arguments: list[str]) -> None:
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_text(text: str) -> None:
    sys.argv = ["-c"]
    # Not with what this file imports from the future.
    exec(compile(text, "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
