"""Bytes → JSON → typed bodies, with every complaint mapped to the field it is about."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from functools import reduce
from typing import Any

import msgspec
import orjson

from bequest.server.wire.bodies import Body
from bequest.server.wire.errors import ApiError, invalid
from bequest.server.wire.large import Malformed, parse_large
from bequest.server.wire.structure import Structure

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LEVELS_AROUND = 16  # of an answer, around the arguments of a call
_FLAT_OBJECTS = frozenset({"stream_options", "logit_bias"})
_KINDS = {str: "str", bool: "bool", int: "int", float: "float", list: "array", dict: "object", type(None): "null"}
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)` - at `\$(?P<path>[^`]*)`$", re.DOTALL)
_COMPLAINT = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?$")


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body, behind the mark that some programs put in front of UTF-8."""
    data = data.removeprefix(BOM_UTF8)
    if not data.strip():
        raise ApiError(400, "invalid_json", "The body is empty; send a JSON object.")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(why_malformed(error)) from None
    return _object(value)


def parse_large_object(data: bytes | bytearray, structure: Structure) -> dict[str, Any]:
    """The same of a large body, piece by piece: for worker threads."""
    try:
        return _object(parse_large(data, structure, len(BOM_UTF8) if data.startswith(BOM_UTF8) else 0))
    except Malformed as error:
        raise _not_json(_reason(error)) from None


def _not_json(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"The body is not valid JSON: {reason}.")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_type", f"The body must be a JSON object, not {describe(value)}.")
    return value


def convert(fields: dict[str, Any], body: type[Body]) -> Body:
    """The typed body. Names it does not know are left out; nulls inside flat objects are absent too."""
    for name in _FLAT_OBJECTS & fields.keys():
        if isinstance(inner := fields[name], dict):
            fields = {**fields, name: {k: v for k, v in inner.items() if v is not None}}
    try:
        return msgspec.convert(fields, body)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), fields) from None


def arguments_of(text: str) -> Any:
    """Of a call, as a model wrote them. Raises ValueError for what is no JSON, or too deep to be part of an answer."""
    given = orjson.loads(text or "{}")
    try:
        orjson.dumps(reduce(lambda inner, _: [inner], range(_LEVELS_AROUND), given))
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from None
    return given


def written(value: Any, param: str) -> bytes:
    """What a client sent, as JSON once more: to be compiled, kept or told back. JSON knows integers of any size and
    nests as deep as it likes; who writes it has limits."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        fault = "holds an integer of more than 64 bits" if "nteger" in str(error) else "is nested too deeply"
        raise invalid(f"`{param}` {fault}.", param) from None


def why_malformed(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return _reason(error)


def _reason(error: Exception) -> str:
    # A lone surrogate at the very end of a string reads as "truncated" in the parser's own words.
    return str(error).removeprefix("JSON is malformed: ").removesuffix(" - at `$[...]`")


def _type_error(complaint: str, fields: dict[str, Any]) -> ApiError:
    if unknown := _UNKNOWN.match(complaint):
        holder, name = _param(unknown["path"]), shorten(unknown["name"])
        message = f"`{holder}` has no field {name!r}."
        return ApiError(400, "unknown_parameter", message, param=f"{holder}.{name}")
    match = _COMPLAINT.match(complaint)
    if match is None:
        path = complaint.rpartition(" - at `$")[2].rstrip("`") if " - at " in complaint else ""
        return ApiError(400, "invalid_type", complaint.partition(" - at ")[0] + ".", param=_param(path))
    path = _with_key(fields, match["path"] or "", match["got"])
    param = _param(path)
    found, value = _lookup(fields, path)
    got = describe(value) if found else _WORDS.get(match["got"], match["got"])
    return ApiError(400, "invalid_type", f"`{param}` must be {_wanted(match)}, not {got}.", param=param)


def mismatch(complaint: str) -> str | None:
    """What a decoder says of a value of a wrong type, in our words; None: it says something else."""
    match = _COMPLAINT.match(complaint)
    return match and f"must be {_wanted(match)}, not {_WORDS.get(match['got'], match['got'])}"


def _wanted(match: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(name, name) for name in match["want"].split(" | ") if name != "null")


def _with_key(fields: dict[str, Any], path: str, got: str) -> str:
    """The path with the key of the wrong value, which the decoder does not tell of an object whose keys are free."""
    _, holder = _lookup(fields, path.removesuffix("[...]"))
    if not path.endswith("[...]") or not isinstance(holder, dict):
        return path
    wrong = (key for key, value in holder.items() if _KINDS.get(type(value)) == got)
    return f"{path.removesuffix('[...]')}.{shorten(next(wrong, ''))}"


def _param(path: str) -> str | None:
    return path.removeprefix(".").replace("[...]", "") or None


def _lookup(fields: dict[str, Any], path: str) -> tuple[bool, Any]:
    """The value at a path such as `.stop[1]`."""
    value: Any = fields
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return False, None
    return True, value


def describe(value: Any) -> str:
    """A value in an error message: what it is and, where short, what it says."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return shorten(repr(value))
    if isinstance(value, str):
        return f"the string {shorten(repr(value))}"
    return "a list" if isinstance(value, list) else "an object"


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
