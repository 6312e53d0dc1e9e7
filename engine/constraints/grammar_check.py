"""Tries a grammar in a process of its own first: one that never ends can be stopped there, and a thread cannot.

The child compiles for the vocabulary of single bytes. What grows without bounds in a grammar (states of its lexer,
combinations of its rules) grows there too, and the child needs nothing of the model but its number of tokens: a grammar
may name them by their ids. It also tells how much memory the compiled grammar holds, because it compiles nothing else
meanwhile.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bequest.engine.children import Children, TaskTooCostly, serve
from bequest.engine.constraints.grammar import GrammarError, GrammarSource, byte_tokens, compile_source, lark_of_any
from bequest.engine.constraints.schemas import fault_in

_MOST_BYTES = 2 << 30  # of the child's memory
_NAMED = "<["  # begins tokens that a grammar names by their ids


@dataclass(frozen=True, slots=True)
class Checked:
    """A grammar that can be compiled here."""

    source: GrammarSource  # in a dialect that compiles: what came as BNF is Lark
    num_bytes: int  # that it holds when it is compiled


class GrammarCheck:
    """Called from worker threads, by as many as like."""

    def __init__(self, seconds: float, vocab_size: int) -> None:
        self._children = Children(__name__, seconds, _MOST_BYTES)
        self._vocab_size = vocab_size

    def check(self, source: GrammarSource) -> Checked:
        """Raises GrammarError."""
        try:
            size = self._vocab_size if _NAMED in source.spelling else 0
            answer = self._children.ask([size, source.kind, source.text, source.whitespace, source.lead])
        except TaskTooCostly:
            seconds = self._children.seconds
            message = f"it takes more than {seconds:g} seconds, or too much memory, to compile"
            raise GrammarError(message, too_large=True) from None
        if answer["error"]:
            raise GrammarError(answer["error"], answer["too_large"])
        lark = answer["lark"]
        return Checked(source if lark is None else replace(source, kind="lark", text=lark), answer["num_bytes"])

    def close(self) -> None:
        self._children.close()


_MALLOC_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLOC_FIELDS]


def _memory_counter() -> Callable[[], int]:
    """A function that tells the bytes this process has allocated, or about so, where the C library does not tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        page = 4096
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page
    mallinfo.restype = _MallocInfo

    def allocated() -> int:
        info = mallinfo()
        return int(info.uordblks) + int(info.hblkhd)  # on the heap, and mapped one by one

    return allocated


def _placed(error: GrammarError, source: GrammarSource, compile: Callable[[GrammarSource], object]) -> str:
    """What is wrong, behind the place in the schema where it is wrong."""

    def complaint_of(schema: Any) -> str | None:
        try:
            compile(replace(source, text=json.dumps(schema), lead=""))
        except GrammarError as fault:
            return str(fault)
        return None

    if source.kind != "json_schema" or error.too_large:
        return str(error)
    try:
        schema = json.loads(source.text)
    except ValueError:
        return str(error)
    place = fault_in(schema, str(error), complaint_of)
    return f"`{place}`: {error}" if place else str(error)


def _serve() -> None:
    tokens_of_size = cache(byte_tokens)
    allocated = _memory_counter()

    def answer(task: list[Any]) -> dict[str, Any]:
        size, source = task[0], GrammarSource(*task[1:])
        tokens = tokens_of_size(size)
        try:
            lark = None
            if source.kind == "any":
                lark = lark_of_any(source.text)
                source = replace(source, kind="lark", text=lark)
            before = allocated()
            compiled = compile_source(source, tokens)
            num_bytes = max(0, allocated() - before)
            del compiled
        except GrammarError as error:
            return {
                "error": _placed(error, source, lambda part: compile_source(part, tokens)),
                "too_large": error.too_large,
            }
        return {"error": "", "lark": lark, "num_bytes": num_bytes}

    serve(answer)


if __name__ == "__main__":
    _serve()
