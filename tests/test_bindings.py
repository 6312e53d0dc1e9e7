"""The border between Python and csrc: few arguments each, and the stubs in engine/_C say what is bound."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from bequest.engine import _C

STUBS = sorted((Path(__file__).parent.parent / "engine" / "_C").glob("*.pyi"))
MOST_ARGUMENTS = 6
MOST_LINES = 200  # of a stub


def statements() -> list[ast.stmt]:
    return [statement for stub in STUBS for statement in ast.parse(stub.read_text()).body]


def arguments_of(function: ast.FunctionDef) -> int:
    """All but `self`."""
    arguments = function.args
    assert arguments.vararg is None and arguments.kwarg is None, function.name
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name != "self"])


def declared() -> dict[str, int]:
    """Functions, methods and constructors of the stub with their numbers of arguments, the largest of overloads."""
    found: dict[str, int] = {}
    for node in statements():
        body = node.body if isinstance(node, ast.ClassDef) else [node]
        scope = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in body:
            if isinstance(function, ast.FunctionDef):
                name = scope + function.name
                found[name] = max(found.get(name, 0), arguments_of(function))
    return found


def bound() -> dict[str, int]:
    """The same of the extension, by the signatures that pybind11 writes into docstrings."""
    found: dict[str, int] = {}
    for name, value in vars(_C).items():
        if not isinstance(value, type):
            found |= signature(name, value)
        elif value is not _C.Error:
            for attribute, method in vars(value).items():
                plain = method.__func__ if isinstance(method, staticmethod) else method
                found |= signature(f"{name}.{attribute}", plain)
    return found


def signature(name: str, value: object) -> dict[str, int]:
    if not callable(value) or isinstance(value, type):
        return {}
    own = name.rpartition(".")[2]
    lines = re.findall(rf"^(?:\d+\. )?{own}\((.*)\) ->", value.__doc__ or "", re.MULTILINE)
    return {name: max(map(count, lines))} if lines else {}


def count(arguments: str) -> int:
    """Of "self: _C.Table, begin: typing.SupportsInt, pairs: list[tuple[int, int]] = ()": those outside of brackets."""
    while re.search(r"[(\[][^()\[\]]*[)\]]", arguments):
        arguments = re.sub(r"[(\[][^()\[\]]*[)\]]", "", arguments)
    names = [part.strip() for part in arguments.split(",") if part.strip() not in ("", "*", "/")]
    return len([name for name in names if not name.startswith("self:")])


@pytest.mark.parametrize("functions", [declared, bound])
def test_no_function_has_many_arguments(functions: object) -> None:
    """Of many numbers by position one can be in the wrong place and nobody notices: they are structs (bindings/)."""
    assert callable(functions)
    many = {name: number for name, number in functions().items() if number > MOST_ARGUMENTS}
    assert not many


def test_the_stub_declares_what_is_bound() -> None:
    """Names that begin with cuda_ or Cuda are there where CUDA is compiled in."""
    here = {name: number for name, number in declared().items() if _C.with_cuda or not is_cuda(name)}
    found = bound()
    missing = {name for name in here if name not in found}
    hidden = {name for name in found if name not in here and not re.search(r"__(eq|hash|init|repr)__", name)}
    assert not missing and not hidden
    assert {name: found[name] for name in here} == here


def is_cuda(name: str) -> bool:
    return name.lower().startswith("cuda")


def test_values_are_declared() -> None:
    tree = statements()
    names = {node.target.id for node in tree if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    values = {name for name, value in vars(_C).items() if isinstance(value, (bool, int))}
    assert values == {name for name in names if _C.with_cuda or not is_cuda(name)}


def test_fields_are_declared() -> None:
    for node in statements():
        if not isinstance(node, ast.ClassDef) or node.name == "Error" or not hasattr(_C, node.name):
            continue
        targets = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
        fields = {target.id for target in targets if isinstance(target, ast.Name)}
        members = vars(getattr(_C, node.name)).items()
        found = {name for name, value in members if isinstance(value, property) or inspect.ismemberdescriptor(value)}
        assert fields == found, node.name


def test_the_stub_stays_short() -> None:
    assert STUBS and all(len(stub.read_text().splitlines()) < MOST_LINES for stub in STUBS)
