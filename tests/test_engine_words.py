"""Who words what: the engine states facts; routes, flags and fields of HTTP bodies are the server's to name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import string
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.house.sources import walk
from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.errors import EngineError, ModelError
from bequest.server.audio import form
from bequest.server.wire import bodies, sentences

ENGINE = Path(__file__).parents[1] / "engine"
_FLAGS = {f.name.replace("_", "-") for config in (EngineConfig, ServerConfig) for f in dataclasses.fields(config)}
_FIELDS = {
    name
    for module in (bodies, form)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, msgspec.Struct)
    for name in kind.__struct_fields__
}
# A flag of ours, a route, or a body's field in backticks.
_FOREIGN = re.compile(rf"--({'|'.join(sorted(_FLAGS))})(?![\w-])|/v1/|`({'|'.join(sorted(_FIELDS))})`")


def files() -> list[Path]:
    """All of engine/ but what has help texts of a command line: the configuration, and the program that replays."""
    return [path for path in sorted(ENGINE.rglob("*.py")) if path not in (ENGINE / "config.py", ENGINE / "replay.py")]


@functools.cache
def literals(path: Path) -> list[tuple[int, str]]:
    """The strings of a file with their lines, the parts of formatted ones too, but no docstrings."""
    nodes = walk(ast.parse(path.read_text()))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
    ]


def test_the_engine_names_no_route_flag_or_field() -> None:
    wrong = [
        f"{path.relative_to(ENGINE)}:{line}: {found[0]}"
        for path in files()
        for line, value in literals(path)
        if (found := _FOREIGN.search(value))
    ]
    assert wrong == []


def test_every_reason_has_a_sentence_and_every_sentence_a_reason() -> None:
    said = set(sentences.SENTENCES)
    given = {value for path in files() for _, value in literals(path)}
    given |= {f"encoder_needs_{takes}" for takes in ("tokens", "audio")}  # made of what the encoder takes
    assert said <= given
    reasons = {
        node.value.value
        for path in files()
        if "reason=" in (text := path.read_text())
        for node in walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "reason" and isinstance(node.value, ast.Constant)
    }
    assert reasons - {""} <= said


def raised() -> Iterator[tuple[str, str, set[str]]]:
    """Where an error is made, a reason that it may have, and the names that its sentence may use."""
    for path in files():
        text = path.read_text()
        if "reason=" not in text:
            continue
        for function in walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in walk(function):
                    if isinstance(call, ast.Call) and (given := {k.arg: k.value for k in call.keywords}).get("reason"):
                        for reason in _reasons(given["reason"], function):
                            yield f"{path.name}:{call.lineno}", reason, _names(given)


def _reasons(node: ast.expr, function: ast.AST) -> set[str]:
    """A constant, one of two, or what a variable is given in the same function."""
    if isinstance(node, ast.JoinedStr):
        return {reason for reason in sentences.SENTENCES if reason.startswith("encoder_needs_")}
    sources: list[ast.AST] = [node]
    if isinstance(node, ast.Name):
        assigned = [n for n in walk(function) if isinstance(n, ast.Assign)]
        sources = [n.value for n in assigned if node.id in map(ast.unparse, (p for t in n.targets for p in walk(t)))]
    parts = [part for source in sources for part in walk(source)]
    return {str(n.value) for n in parts if isinstance(n, ast.Constant) and n.value in sentences.SENTENCES}


def _names(given: dict[str | None, ast.expr]) -> set[str]:
    details = given.get("details")
    numbers = [key for part in walk(details) if isinstance(part, ast.Dict) for key in part.keys] if details else []
    named = {str(key.value) for key in numbers if isinstance(key, ast.Constant)}
    if details is not None and not numbers:  # those of a lease that there is no room for
        named = {"budget_blocks", "used_blocks", "needed_blocks", "earliest_expiry"}
    return named | {name for name in given if name is not None} | {"param"}


def test_every_sentence_has_its_numbers() -> None:
    found = list(raised())
    assert {reason for _, reason, _ in found} == set(sentences.SENTENCES)
    for where, reason, names in found:
        used = {field for _, field, _, _ in string.Formatter().parse(sentences.SENTENCES[reason]) if field}
        assert used <= names, (where, reason)


def test_an_error_without_a_reason_says_all_itself() -> None:
    assert sentences.sentence(EngineError("Something happened."), None) == "Something happened."


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Set num_blocks=7 or fewer.", "Set --num-blocks 7 or fewer."),
        ("Take a smaller max_model_len=, or device=cpu.", "Take a smaller --max-model-len, or --device cpu."),
        ("retain_fraction=0.5 lets", "--retain-fraction 0.5 lets"),
        ("model=x has no flag", "model=x has no flag"),
        ("record=/tmp/x.log: no space", "--record /tmp/x.log: no space"),
        ("record=./x: no space", "--record ./x: no space"),
        ("other=5 is none of ours", "other=5 is none of ours"),
    ],
)
def test_settings_are_flags_on_the_command_line(said: str, told: str) -> None:
    assert sentences.with_flags(ModelError(said)) == told
