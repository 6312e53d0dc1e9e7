"""Tries a grammar in a process of its own first: one that never ends can be stopped there, and a thread cannot.

The child compiles for the vocabulary of single bytes. What grows without bounds in a grammar (states of its lexer,
combinations of its rules) grows there too, and the child needs nothing of the model. It answers one grammar after
another over its pipes; one that takes too long, or too much memory, costs the child, and the next grammar gets another.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from bequest.engine.constraints.grammar import GrammarError, GrammarSource, compile_source

_MOST_BYTES = 2 << 30  # of the child's memory
_END = 256  # the token behind those of the bytes


class GrammarCheck:
    """Called from worker threads; one grammar at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, source: GrammarSource) -> None:
        """Raises GrammarError."""
        with self._lock:
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps([source.kind, source.text, source.whitespace]).encode() + b"\n")
                child.stdin.flush()
                answer = self._answer(child.stdout)
            except BrokenPipeError:
                answer = b""
            if not answer.endswith(b"\n"):
                self._end()
                message = f"it takes more than {self._seconds:g} seconds, or too much memory, to compile"
                raise GrammarError(message, too_large=True)
        message, too_large = json.loads(answer)
        if message:
            raise GrammarError(message, too_large)

    def close(self) -> None:
        """Does not wait for a check that is under way: its child is gone, and so it ends."""
        child = self._child
        if child is not None:
            child.kill()
            with self._lock:
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "bequest.engine.constraints.grammar_check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],  # where `engine` is found, however this process found it
            )
            assert self._child.stdout is not None
            if not self._child.stdout.readline():  # it is ready: its start does not count
                raise RuntimeError("the process that tries grammars ended before it was ready; stderr says why")
        return self._child

    def _answer(self, answers: IO[bytes]) -> bytes:
        """A line; empty if none came in time."""
        ready, _, _ = select.select([answers], [], [], self._seconds)
        return answers.readline() if ready else b""

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what it did not read any more
                    pipe.close()


class _Bytes:
    """The smallest vocabulary, as llguidance wants it."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _serve() -> None:
    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    answers = sys.stdout.buffer
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        try:
            compile_source(GrammarSource(*json.loads(line)), vocabulary)
            answer = ["", False]
        except GrammarError as error:
            answer = [str(error), error.too_large]
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
