"""Circles of files and of folders, in Python by imports and in csrc by includes.

An import counts wherever it stands: under TYPE_CHECKING and inside a function too, because what is read together
is built together. Whoever imports from a package imports its `__init__.py`.

A circle of files is a set of files each of which reaches every other. A circle of folders is the same among the
children of one folder: two folders, or a folder and a file beside it, that reach each other through their files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath

from benchmarks.house.sources import Module, read_modules

Graph = Mapping[str, set[str]]
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_CXX = (".h", ".cuh", ".cpp", ".cu")


@dataclass(frozen=True)
class Circles:
    """Each one as a chain of paths that ends where it began."""

    files: list[list[str]]
    folders: list[list[str]]
    pairs: list[list[str]]  # folders, or a folder and a file beside it, that import each other
    imports: Graph = field(repr=False)  # of files

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)

    def __str__(self) -> str:
        """A line for each circle; under one of folders, for each of its links, a file that makes it."""
        lines = [" → ".join(chain) for chain in self.files]
        for chain in self.folders:
            lines.append(" → ".join(chain))
            lines += [self._example(one, other) for one, other in pairwise(chain)]
        return "\n".join(lines)

    def _example(self, one: str, other: str) -> str:
        file, imported = min(
            (file, imported)
            for file, others in self.imports.items()
            if _inside(file, one)
            for imported in others
            if _inside(imported, other)
        )
        return f"    {file} imports {imported}"


def python_circles(
    root: Path, packages: tuple[str, ...] = ("engine", "server", "offline", "bench", "cli", "cluster")
) -> Circles:
    modules = read_modules(root, packages)
    paths = {name: module.path.relative_to(root).as_posix() for name, module in modules.items()}
    return _circles({paths[name]: {paths[other] for other in _imported(modules, name)} for name in modules})


def include_circles(root: Path, folder: str = "csrc") -> Circles:
    base = root / folder
    files = [path for path in sorted(base.rglob("*")) if path.suffix in _CXX]
    graph = {
        path.relative_to(root).as_posix(): {
            found.relative_to(root).as_posix()
            for name in _INCLUDE.findall(path.read_text())
            for found in ((base / name).resolve(), (path.parent / name).resolve())
            if found.is_file() and found.is_relative_to(base)
        }
        for path in files
    }
    return _circles(graph)


def _imported(modules: dict[str, Module], name: str) -> set[str]:
    found = set()
    for whole, _ in modules[name].imports():
        package = whole.rpartition(".")[0]
        found |= {imported for imported in (whole, package) if imported in modules}
    return found - {name}


def _circles(graph: Graph) -> Circles:
    siblings = _siblings(graph).values()
    return Circles(
        files=sorted(_chains(graph)),
        folders=sorted(chain for children in siblings for chain in _chains(children, set(graph))),
        pairs=sorted(pair for children in siblings for pair in _pairs(children, set(graph))),
        imports=graph,
    )


def _siblings(graph: Graph) -> dict[str, dict[str, set[str]]]:
    """folder → its children, folders and files → which of its other children they import."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file, others in graph.items():
        for other in others:
            parent, child, sibling = _part(PurePosixPath(file), PurePosixPath(other))
            found[parent][child].add(sibling)
            found[parent][sibling] |= set()
    return found


def _inside(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def _part(file: PurePosixPath, other: PurePosixPath) -> tuple[str, str, str]:
    """The folder that both lie in, and the children of it that lead to them."""
    common = 0
    while file.parts[common] == other.parts[common]:
        common += 1
    parent = PurePosixPath(*file.parts[:common])
    return str(parent), str(parent / file.parts[common]), str(parent / other.parts[common])


def _chains(graph: Graph, but_for: Collection[str] = ()) -> Iterator[list[str]]:
    """A shortest circle for each set of names that all reach each other, through the first of them that is not in
    `but_for`; a set of such names alone is left out."""
    for members in _strong_components(graph):
        if len(members) > 1 and (starts := members.difference(but_for)):
            yield _shortest_circle({name: graph[name] & members for name in members}, min(starts))


def _pairs(graph: Graph, but_for: Collection[str]) -> Iterator[list[str]]:
    for name, others in graph.items():
        yield from (
            [name, other] for other in others if name < other and name in graph[other] and {name, other} - set(but_for)
        )


def _shortest_circle(graph: Graph, start: str) -> list[str]:
    chains = [[start]]
    seen: set[str] = set()
    for chain in chains:  # grows: the shorter chains come first
        for name in sorted(graph[chain[-1]]):
            if name == start:
                return [*chain, name]
            if name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    raise AssertionError("a component without a circle")


def _strong_components(graph: Graph) -> Iterator[set[str]]:
    """Kosaraju: backwards from each name, in the order in which a walk forwards finished with them."""
    order: list[str] = []
    seen: set[str] = set()
    for name in sorted(graph):
        _finish(graph, name, seen, order)
    back: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            back[other].add(name)
    seen = set()
    for name in reversed(order):
        component: list[str] = []
        _finish(back, name, seen, component)
        if component:
            yield set(component)


def _finish(graph: Graph, start: str, seen: set[str], order: list[str]) -> None:
    """A walk from `start` over what was not seen yet; names are added when all behind them is done."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(sorted(graph.get(start, ()))))]
    while stack:
        name, others = stack[-1]
        fresh = next((other for other in others if other not in seen), None)
        if fresh is None:
            order.append(name)
            stack.pop()
        else:
            seen.add(fresh)
            stack.append((fresh, iter(sorted(graph.get(fresh, ())))))
