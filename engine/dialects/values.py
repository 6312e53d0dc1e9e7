"""Arguments that models write as text or as Python, as the JSON that clients get."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def types_of(schema: Any) -> frozenset[str]:
    """The types that a schema names; empty where it says nothing of them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or ():
            types |= types_of(branch)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not types and all(value is None or isinstance(value, str) for value in values):
        types = {"null" if value is None else "string" for value in values}
    return frozenset(kind for kind in types if isinstance(kind, str))


def properties_of(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    given = (schema or {}).get("properties")
    return given if isinstance(given, Mapping) else {}


def json_of_text(text: str, schema: Any) -> str:
    """A value that stands without quotes: a string where the schema wants one, else what it reads as."""
    types = types_of(schema)
    if types == {"string"}:
        return written(text)
    plain = ""  # the same, where it is JSON: numbers stay as they were written
    try:
        value, plain = json.loads(text, parse_constant=no_number), text.strip()
    except (ValueError, RecursionError):
        value = _python_or_text(text)
    if isinstance(value, str) or ("string" in types and not (value is None and "null" in types)):
        return written(text if not isinstance(value, str) or "string" in types else value)
    return plain or written(value)


def _python_or_text(text: str) -> Any:
    try:
        return python_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def written(value: Any) -> str:
    return well_formed(json.dumps(value, ensure_ascii=False))


def well_formed(text: str) -> str:
    """Text that UTF-8 can spell. Escapes of JSON may name the halves of a character: two are one, one alone is none."""
    half = _HALF.search(text)
    return text if half is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def no_number(name: str) -> Any:
    """For NaN and the infinities, which Python's JSON has and JSON has not."""
    raise ValueError(name)


# What models write of JSON in the midst of Python.
_JSON_NAMES = {"true": True, "false": False, "null": None}


def python_value(node: ast.expr) -> Any:
    """Of a literal. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else python_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no string")
        return dict(zip(keys, map(python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ValueError("no value of JSON")
    return value
