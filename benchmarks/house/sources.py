"""The Python files of a checkout, by the names that others import them by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_WITH_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields of statements, and of their parts
INSTALLED = "bequest."  # what imports begin with, and folders do not


_keeping = False
_kept: dict[Path, ast.Module] = {}


@contextmanager
def parsed_once() -> Iterator[None]:
    """For several figures of one tree. Not for longer: the trees of all files are a hundred megabytes."""
    global _keeping
    _keeping = True
    try:
        yield
    finally:
        _keeping = False
        _kept.clear()


def parsed(path: Path) -> ast.Module:
    if path not in _kept:
        tree = ast.parse(path.read_text())
        return _kept.setdefault(path, tree) if _keeping else tree
    return _kept[path]


@dataclass(frozen=True)
class Module:
    name: str  # engine.text.chat; a package goes by its folder
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.path)

    @property
    def folder(self) -> str:
        """The package it lies in, or is."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[str, str]]:
        """(what is imported, under which name here), wherever it stands: in functions and under TYPE_CHECKING too.

        `from a import b` gives a.b, which may be a module or something in a.
        """
        for node in statements(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name.removeprefix(INSTALLED), alias.asname or alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    yield f"{origin}.{alias.name}", alias.asname or alias.name

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return (node.module or "").removeprefix(INSTALLED)
        parts = self.folder.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As ast.walk gives them, without the expressions in them, which are nine tenths of a file."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(within(node))


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The statements right inside another, and what else holds some."""
    for field in _WITH_STATEMENTS:
        yield from getattr(node, field, ())


def walk(tree: ast.AST) -> list[ast.AST]:
    """What ast.walk gives, in half its time."""
    found = [tree]
    for node in found:  # and those that are found meanwhile
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found.extend([one for one in value if isinstance(one, ast.AST)])
    return found


def read_modules(root: Path, packages: tuple[str, ...]) -> dict[str, Module]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found
