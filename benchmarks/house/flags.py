"""Tests of kind flags outside the kinds.

A kind of work (search, extraction, encoding, …) that is told by flags is tested for all over the engine. Counted is
each place that reads an attribute of one of the names below inside a condition, in engine/ but for the folders whose
subject they are: the kinds (`work`), `beams`, `states` and the plain types.

A condition is the test of an if, a while, a ternary or an assert, the `if` of a comprehension, the subject of a match,
what `and`, `or` or `not` stand beside, and a comparison. A read counts once however many conditions it lies in, and
wherever in them it lies: `if self.search is None`, `x.beams and …`, `if min(s.cross for s in …) > 0`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house.sources import read_modules, walk

FLAGS = frozenset({"search", "beams", "capture", "owing", "extracts", "cross", "forked", "encodes_only"})
KINDS = ("engine.work", "engine.beams", "engine.states", "engine.types")


def flag_tests(root: Path) -> dict[str, int]:
    """How many there are in each file that has one, most first."""
    counts = {
        module.path.relative_to(root).as_posix(): len(_flags_read(module.tree))
        for name, module in read_modules(root, ("engine",)).items()
        if not any(f"{name}.".startswith(f"{kind}.") for kind in KINDS)
    }
    return {file: count for file, count in sorted(counts.items(), key=lambda pair: -pair[1]) if count}


def _flags_read(tree: ast.Module) -> set[ast.Attribute]:
    return {
        node
        for condition in _conditions(tree)
        for node in walk(condition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in FLAGS
    }


def _conditions(tree: ast.Module) -> Iterator[ast.expr]:
    for node in walk(tree):
        match node:
            case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                yield node.test
            case ast.comprehension():
                yield from node.ifs
            case ast.Match():
                yield node.subject
            case ast.BoolOp():
                yield from node.values
            case ast.UnaryOp(op=ast.Not()):
                yield node.operand
            case ast.Compare():
                yield node
