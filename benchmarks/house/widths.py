"""How many fields the types of the engine have: dataclasses, named tuples and msgspec's Structs.

Fields of base classes that are of the engine count too; class variables do not. Configurations are left out: a setting
more is a field more there, and nobody passes them on in parts. They are the files called config.py or
something_config.py, and the types named below.
"""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.house.sources import read_modules, statements

CONFIGURATIONS = {
    "engine.types.sampling.SamplingParams": "the flat configuration of a request, by the names that its users know",
    "engine.scheduling.policy.tuning.Tuning": "every constant of the policy of steps",
}


def type_widths(root: Path) -> dict[str, int]:
    """Type, with its module → fields, the widest first."""
    classes = {
        f"{name}.{node.name}": node
        for name, module in read_modules(root, ("engine",)).items()
        if not module.path.stem.endswith("config")
        for node in statements(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    by_name = {node.name: node for node in classes.values()}
    widths = {
        name: len(_fields(node, by_name))
        for name, node in classes.items()
        if _is_record(node, by_name) and name not in CONFIGURATIONS
    }
    return dict(sorted(widths.items(), key=lambda pair: (-pair[1], pair[0])))


def _is_record(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    if any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list):
        return True
    if any(_last_name(base) in ("Struct", "NamedTuple") for base in node.bases):
        return True
    return any(_is_record(classes[name], {}) for name in _own_bases(node, classes))


def _fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    inherited = [_fields(classes[name], classes) for name in _own_bases(node, classes)]
    return set().union(*inherited) | {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not ast.unparse(line.annotation).startswith(("ClassVar", "KW_ONLY", "InitVar"))
    }


def _own_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    """Those of the engine: their names are imported, so that `abc.Sequence` is none of them."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.id for base in plain if isinstance(base, ast.Name) and base.id in classes]


def _last_name(node: ast.expr) -> str:
    """dataclasses.dataclass(frozen=True) → dataclass"""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
