"""The folders of server/ lie in layers: each imports what lies below it, and nothing imports in a circle."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from benchmarks.house.sources import statements

SERVER = Path(__file__).parents[2] / "server"
PREFIX = "bequest.server."
# From the ground up; families of endpoints lie side by side, and `about` may describe the others.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("wire", "interfaces"),
    ("access",),
    ("operation",),
    ("stores",),
    ("context",),
    ("transport",),
    ("asks",),
    ("answers",),
    ("door",),
    ("generation", "states", "responses", "audio", "keeping"),
    ("doors", "batches"),
    ("about",),
    ("middleware",),
    ("app",),
    ("process",),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


@functools.cache
def imports() -> list[tuple[str, str]]:
    """(module, module it imports), by their names inside the package; what is imported for types counts too."""
    found: list[tuple[str, str]] = []
    for path in SERVER.rglob("*.py"):
        module = ".".join(path.relative_to(SERVER).with_suffix("").parts)
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PREFIX):
                found += [(module, f"{node.module}.{alias.name}".removeprefix(PREFIX)) for alias in node.names]
    return found


def test_every_folder_has_its_layer() -> None:
    folders = {path.name for path in SERVER.iterdir() if (path / "__init__.py").exists()}
    files = {path.stem for path in SERVER.glob("*.py")} - {"__init__"}
    assert folders | files == set(LEVELS)


def test_each_imports_what_lies_below() -> None:
    wrong = {
        f"{module} imports {name}"
        for module, name in imports()
        if (mine := module.split(".")[0]) != (other := name.split(".")[0]) and LEVELS[mine] <= LEVELS[other]
    }
    assert not wrong


def test_a_door_is_one_folder() -> None:
    """Nobody knows a door by its name, not even another door: adding one touches nothing else."""
    doors = {path.parent.name for path in SERVER.glob("doors/*/door.py")}
    for module, name in imports():
        parts = name.split(".")
        if parts[0] == "doors" and len(parts) > 1 and parts[1] in doors:
            assert module.split(".")[:2] == parts[:2], f"{module} imports {name}"


def test_no_files_import_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, name in imports():
        target = name if (SERVER / f"{name.replace('.', '/')}.py").exists() else name.rpartition(".")[0]
        graph.setdefault(module, set()).add(target)
    while leaves := {module for module in graph if not graph[module] & graph.keys()}:
        graph = {module: names for module, names in graph.items() if module not in leaves}
    assert not graph


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: str(path.relative_to(SERVER)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    functions = [n for n in statements(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 60]
