"""`response_format` and `structured_outputs`: which grammar a body asks for, if any."""

from __future__ import annotations

import json
from typing import Any

import orjson

from bequest.engine.constraints.grammar import GrammarSource
from bequest.server.stores.grammars import Constraint
from bequest.server.wire.bodies import STRUCTURED_KINDS, GenerationBody
from bequest.server.wire.errors import ApiError, invalid, missing, unsupported
from bequest.server.wire.reading import describe, shorten

# JSON nests in what parses it: deeper than any schema that somebody wrote.
_DEEPEST = 64
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_NAME = "json_schema"
_OPENAIS = "response_format"  # so OpenAI's sentences call `text.format` as well, and clients look for them
_NESTED = "json_schema"  # the field of `response_format` that holds a schema


def json_schema(schema: Any, name: str, param: str, field: str) -> Constraint:
    """The constraint of a schema that came in the field `param`; `name` is the client's for it."""
    complaint = f"Invalid schema for {field} '{shorten(name)}'"
    if not isinstance(schema, dict | bool):
        message = f"{complaint}: it must be an object, not {describe(schema)}."
        raise ApiError(400, "invalid_json_schema", message, param=param)
    if _depth(schema) > _DEEPEST:
        message = f"{complaint}: it is nested more than {_DEEPEST} deep."
        raise ApiError(400, "grammar_too_large", message, param=param)
    try:
        text = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:
        message = f"{complaint}: it holds an integer of more than 64 bits."
        raise ApiError(400, "invalid_json_schema", message, param=param) from None
    return Constraint(GrammarSource("json_schema", text), param, complaint)


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Of completions and chat; None: any text."""
    fields = ("response_format", "json_schema", "grammar")
    given = [name for name in fields if getattr(body, name) not in (None, "")]
    if len(given) > 1:
        one, other = given[:2]
        raise invalid(f"`{one}` and `{other}` both say what the answer looks like: send one of them.", other)
    if body.response_format is not None:
        form = format_constraint(body.response_format, "response_format", _NESTED)
        return only_one(form, "response_format", body.structured_outputs)
    return only_one(_top_level(body), given[0] if given else "", body.structured_outputs)


def _top_level(body: GenerationBody) -> Constraint | None:
    """llama.cpp's fields: a schema, or a grammar in its BNF."""
    if body.json_schema is not None:
        return json_schema(body.json_schema, "json_schema", "json_schema", "json_schema")
    if body.grammar:
        return Constraint(GrammarSource("any", body.grammar), "grammar", "Invalid `grammar`")
    return None


def only_one(form: Constraint | None, field: str, structured: dict[str, Any] | None) -> Constraint | None:
    """`form` is what the endpoint's own `field` asks for, `structured` the `structured_outputs` beside it."""
    other = _structured(structured)
    if form is not None and other is not None:
        message = f"`{field}` and `structured_outputs` both say what the answer looks like: send one of them."
        raise invalid(message, "structured_outputs")
    return form or other


def check_alone(body: GenerationBody, param: str) -> None:
    """Refuses what cannot be used beside a grammar."""
    if body.use_beam_search:
        message = f"`use_beam_search` cannot be used with `{param}`: beams follow a `catalogue`, but no grammar."
        raise unsupported("use_beam_search", message)
    if body.catalogue is not None:
        message = f"`catalogue` cannot be used with `{param}`: both say what the answer is. Leave one out."
        raise unsupported("catalogue", message)


def format_constraint(given: dict[str, Any], param: str, nested: str | None) -> Constraint | None:
    """Of an object with `type`; the schema's fields are in its field `nested`, or beside `type`."""
    field = _OPENAIS if param in (_OPENAIS, "text.format") else param
    kind = given.get("type")
    _check_one_schema(given, param, nested)
    if kind is None:
        raise missing(f"{param}.type", f"`{param}.type` is missing: one of {', '.join(_FORMATS)}.")
    if kind == "text":
        _check_unread(given, param, nested, "schema")
        return None
    if kind == "json_object":
        _check_unread(given, param, nested)
        schema = given.get("schema")  # llama.cpp's, and others'
        if schema is None:
            return json_schema({"type": "object"}, "json_object", param, field)
        return json_schema(schema, "json_object", f"{param}.schema", field)
    if kind != "json_schema":
        given_kind = shorten(repr(kind))
        raise invalid(f"`{param}.type` must be one of {', '.join(_FORMATS)}, not {given_kind}.", f"{param}.type")
    beside = nested is None or (given.get(nested) is None and given.get("schema") is not None)  # as llama.cpp has it
    holder = given if beside else given.get(nested or "")
    place = param if beside else f"{param}.{nested}"
    if not isinstance(holder, dict):
        raise missing(place, f"`{place}` is missing: an object with `name` and `schema`.")
    schema = holder.get("schema")
    if schema is None:
        raise missing(f"{place}.schema")
    name = holder.get("name")
    return json_schema(schema, name if isinstance(name, str) else _SCHEMA_NAME, f"{place}.schema", field)


def _check_one_schema(given: dict[str, Any], param: str, nested: str | None) -> None:
    """A schema has two places where it may stand, one of which would not be looked at."""
    if nested is not None and given.get(nested) is not None and given.get("schema") is not None:
        message = f"`{param}` has both `{nested}` and `schema`, which say the same: send one of them."
        raise invalid(message, f"{param}.schema")


def _check_unread(given: dict[str, Any], param: str, *names: str | None) -> None:
    """Fields that hold a schema where the type has none, or not there."""
    for name in names:
        if name is not None and given.get(name) is not None:
            place = f"{param}.{name}"
            raise invalid(f"`{place}` is read where `{param}.type` is 'json_schema', not '{given['type']}'.", place)


def _structured(given: dict[str, Any] | None) -> Constraint | None:
    """vLLM's object: one kind of grammar, and options of JSON."""
    if given is None:
        return None
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    kinds = [name for name in STRUCTURED_KINDS if name in fields]
    if "structural_tag" in fields:
        raise unsupported("structured_outputs.structural_tag", "`structural_tag` is not supported; use `tools`.")
    if not kinds:
        raise missing("structured_outputs", f"`structured_outputs` needs one of {', '.join(STRUCTURED_KINDS)}.")
    if len(kinds) > 1:
        raise invalid(f"`structured_outputs` has both `{kinds[0]}` and `{kinds[1]}`: send one.", "structured_outputs")
    kind, param = kinds[0], f"structured_outputs.{kinds[0]}"
    value = fields[kind]
    if kind == "json_object":
        return _with_options(json_schema({"type": "object"}, kind, param, "structured_outputs"), fields)
    if kind == "json":
        return _with_options(json_schema(_parsed(value, param), kind, param, "structured_outputs"), fields)
    if kind == "choice":
        return Constraint(GrammarSource("lark", _choice(value, param)), param, f"Invalid `{param}`")
    if not isinstance(value, str):
        raise ApiError(400, "invalid_type", f"`{param}` must be a string, not {describe(value)}.", param=param)
    if kind == "regex":
        return Constraint(GrammarSource("regex", value), param, "Invalid regular expression in `structured_outputs`")
    return Constraint(GrammarSource("any", value), param, "Invalid grammar in `structured_outputs`")


def _parsed(value: Any, param: str) -> Any:
    """vLLM takes a schema as JSON text too."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json_schema", f"`{param}` is not valid JSON: {error}.", param=param) from None


def _with_options(constraint: Constraint, fields: dict[str, Any]) -> Constraint:
    source = constraint.source
    if fields.get("disable_additional_properties"):
        closed = _closed(orjson.loads(source.text))
        source = GrammarSource("json_schema", orjson.dumps(closed).decode())
    whitespace = fields.get("whitespace_pattern")
    if fields.get("disable_any_whitespace"):
        if whitespace is not None:
            message = "`whitespace_pattern` and `disable_any_whitespace` exclude each other: send one of them."
            raise invalid(message, "structured_outputs.whitespace_pattern")
        whitespace = ""
    if whitespace is not None:
        param = "structured_outputs.whitespace_pattern"
        if not isinstance(whitespace, str):
            raise ApiError(400, "invalid_type", f"`{param}` must be a string.", param=param)
        source = GrammarSource("json_schema", source.text, whitespace)
    return Constraint(source, constraint.param, constraint.complaint)


def _closed(schema: Any) -> Any:
    """Objects that list their properties have no others, unless they say so themselves."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ApiError(400, "invalid_type", f"`{param}` must be a list of strings.", param=param)
    if not value or "" in value:
        raise invalid(f"`{param}` must hold at least one string, and no empty one.", param)
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion: the value is the client's."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [value for part in inner for value in part]
    return depth
