"""Functions that are longer than 60 lines, from the line of their name to their last, comments included.

In Python one inside another counts by itself, and in its outer one too. In C++ and CUDA, where this reads braces and
not the language, what a function holds counts in it alone; initialisers, types and namespaces are no functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house.sources import read_modules, statements

MOST_LINES = 60

_SILENT = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+' | ^[ \t]*\#(?:\\\n|[^\n])*
    | \b(?:public|private|protected)\s*:(?!:)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_DIGITS = re.compile(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])")  # 16'384
_PLACE = re.compile(r"\b(namespace|struct|class|union|enum|extern)\b")
_CONTROL = re.compile(r"\s*(if|for|while|switch|catch|do|else|return)\b")
_ENDS_LIKE_A_HEAD = re.compile(r"\)\s*(const|noexcept|override|final|mutable|\s|->\s*[\w:<>,&*\s]+)*$")
_BEFORE_A_NAME = re.compile(r"(__launch_bounds__|__attribute__|alignas|decltype|requires)\s*\([^{]*?\)+")
_NAME = re.compile(r"(operator\s*\S+?|~?\w[\w:~]*)\s*\(")


def long_python_functions(root: Path, most: int = MOST_LINES) -> dict[str, int]:
    found = {
        f"{module.path.relative_to(root).as_posix()}:{node.name}": lines
        for module in read_modules(root, ("engine", "server", "offline", "bench", "cli", "cluster")).values()
        for node in statements(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > most
    }
    return _longest_first(found)


def long_cxx_functions(root: Path, most: int = MOST_LINES) -> dict[str, int]:
    found = {
        f"{path.relative_to(root).as_posix()}:{name}": lines
        for path in sorted((root / "csrc").rglob("*"))
        if path.suffix in (".h", ".cuh", ".cpp", ".cu")
        for name, lines in cxx_functions(path.read_text())
        if lines > most
    }
    return _longest_first(found)


def cxx_functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function of a file."""
    text = _SILENT.sub(_blank, _DIGITS.sub(" ", source))
    head, depth = 0, 0  # where what may be a function's head begins; braces of an initialiser
    position = 0
    while position < len(text):
        character = text[position]
        if character == "{":
            before = text[head:position]
            if depth == 0 and _is_head(before):
                end = _closing(text, position)
                yield _name(before), text.count("\n", head + _blanks(before), end) + 1
                position = head = end + 1
                continue
            if depth == 0 and _PLACE.search(before):
                head = position + 1
            else:
                depth += 1
        elif character == "}":
            if depth:
                depth -= 1
            else:
                head = position + 1
        elif character == ";" and depth == 0:
            head = position + 1
        position += 1


def _is_head(before: str) -> bool:
    """Of a function: a list of parameters, perhaps with initialisers of members behind it."""
    return bool(_ENDS_LIKE_A_HEAD.search(before) or re.search(r"\)\s*:\s*\w.*[)}]\s*$", before, re.DOTALL)) and not (
        _CONTROL.match(before) or before.rstrip().endswith("=")
    )


def _name(before: str) -> str:
    match = _NAME.search(_BEFORE_A_NAME.sub(" ", before))
    return match[1] if match else "?"


def _closing(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _blank(match: re.Match[str]) -> str:
    """Keeps lines and columns."""
    return re.sub(r"[^\n]", " ", match[0])


def _blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def _longest_first(found: dict[str, int]) -> dict[str, int]:
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))
