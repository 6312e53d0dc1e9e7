"""What a JSON schema is made before it is followed, against what JSON Schema says; and where its faults lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

import jsonschema
import pytest

from bequest.engine.constraints.grammar import GrammarError, GrammarSource, byte_tokens, compile_source
from bequest.engine.constraints.grammar_check import GrammarCheck
from bequest.engine.constraints.schemas import KNOWN_FORMATS, followed


def matches(schema: Any, *values: Any) -> list[bool]:
    """Whether an answer to a schema may be these values."""
    start = compile_source(GrammarSource("json_schema", json.dumps(schema)), byte_tokens(257))
    copies = [(start.copy(), json.dumps(value).encode()) for value in values]
    return [matcher.consume(list(text)) and matcher.is_accepting for matcher, text in copies]


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck(10.0, 1000)
    yield check
    check.close()


@pytest.mark.parametrize("name", ["password", "binary", "path", "file-path", "byte", "int32", "uri-template", "x"])
def test_a_format_that_is_not_known_is_an_annotation(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}, "required": ["format"]}
    assert matches(schema, {"format": "any text"}, {"format": 1}) == [True, False]


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS - {"unknown"}))
def test_a_format_that_is_known_is_enforced(name: str) -> None:
    assert matches({"type": "string", "format": name}, "no such thing !") == [False]


def test_what_is_data_is_left_as_it_is() -> None:
    data = {"format": "password", "uniqueItems": False, "oneOf": []}
    schema = {"enum": [data], "default": data, "properties": {"format": {"const": data}}}
    assert followed(schema) == schema


def test_items_that_must_differ_where_there_is_one() -> None:
    assert matches({"type": "array", "items": {"enum": [1]}, "uniqueItems": False}, [1, 1]) == [True]
    one = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 1}
    assert matches(one, [1], [1, 1]) == [True, False]


def test_a_decimal_of_pydantic() -> None:
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    given = ["1.50", "-.5", "7.", "-", ".", "", "+.", "1.2.3"]
    assert matches(schema, *given) == [_is_valid(schema, value) for value in given]


def _is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def tagged(kind: object, **properties: object) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **properties}
    return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}


REFS = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
VALUES: list[Any] = [{"kind": "a"}, {"kind": "b"}, {"kind": "c"}, {"kind": 1}, {"kind": True}, 1, 1.5, True, "x", None]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": REFS, "$defs": {"a": tagged("a"), "b": tagged("b")}},
        {"oneOf": REFS, "$defs": {"a": tagged(1), "b": tagged(True)}},
        {"oneOf": [*REFS, {"type": "integer"}, {"type": "null"}], "$defs": {"a": tagged("a"), "b": tagged("b")}},
        {"oneOf": [{"enum": ["x", None]}, {"const": 1}, {"type": "boolean"}]},
        {"oneOf": [{"$ref": "#/$defs/a", "title": "A"}, {"type": ["number", "null"]}], "$defs": {"a": tagged("a")}},
    ],
)
def test_one_of_branches_that_exclude_each_other(schema: dict[str, Any]) -> None:
    assert matches(schema, *VALUES) == [_is_valid(schema, value) for value in VALUES]


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": ["x", 1]}, {"const": 1.0}],
        [{"const": "x"}, {"type": "string"}],
        [tagged("a"), {"type": "object", "properties": {"kind": {"const": "b"}}}],
        [tagged("a"), tagged("a")],
        [tagged("a"), {}],
        [{"type": "object"}, {"const": {"kind": "b"}}],
    ],
)
def test_one_of_branches_that_may_overlap(branches: list[Any]) -> None:
    assert followed({"oneOf": branches}) == {"oneOf": branches}


def test_a_discriminator_must_be_there() -> None:
    """In a tree, too, which its branches lead back to."""
    tree = {"oneOf": REFS, "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/a", "b": "#/$defs/b"}}}
    branch, leaf = tagged("a", left=tree), tagged("b")
    del branch["required"], leaf["required"]
    schema = {**tree, "$defs": {"a": branch, "b": leaf}}
    given = [{"kind": "b"}, {"kind": "a", "left": {"kind": "b"}}, {}, {"kind": "a", "left": {"kind": "c"}}]
    assert matches(schema, *given) == [True, True, False, False]


@pytest.mark.parametrize(
    "names",
    [
        {"$ref": "#/$defs/E"},
        {"enum": ["a", 1]},
        {"const": "a"},
        {"pattern": "^[ab]+$"},
        {"type": "string"},
        {"format": "x"},
    ],
)
def test_the_names_of_a_map(names: dict[str, Any]) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": names}
    schema["$defs"] = {"E": {"type": "string", "title": "E", "enum": ["a", "b"]}}
    given: list[Any] = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": "x"}]
    assert matches(schema, *given) == [_is_valid(schema, value) for value in given]


@pytest.mark.parametrize(
    "names", [{"type": "null"}, {"$ref": "#/nowhere"}, {"minLength": 2}, {"enum": ["a"], "const": "b"}]
)
def test_names_of_a_map_that_cannot_be_listed(names: dict[str, Any]) -> None:
    assert followed({"propertyNames": names}) == {"propertyNames": names}


X_SHORT = {"^x": {"maxLength": 1}}
NAMED_X: dict[str, Any] = {"type": "object", "properties": {"x1": {"type": "string"}}}
CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**NAMED_X, "patternProperties": X_SHORT},
        {**NAMED_X, "patternProperties": X_SHORT, "required": ["x2", "x1"], "additionalProperties": False},
        {"allOf": [{"patternProperties": X_SHORT}, {"additionalProperties": {"enum": ["s", "long"]}}]},
        {"patternProperties": {"^x": {"type": "string"}}, "anyOf": [CLOSED, {"type": "object", "required": ["x1"]}]},
        {"$ref": "#/$defs/closed", "patternProperties": X_SHORT, "$defs": {"closed": CLOSED}},
    ],
)
def test_patterns_of_names_bind_whatever_else_names_them(schema: dict[str, Any]) -> None:
    texts: list[Any] = [{name: value} for name in ("a", "x1", "y") for value in ("s", "long", 1)]
    given = [*texts, {}, {"x1": "s", "x2": "s"}, {"x1": "s", "x2": "long"}]
    assert matching(schema, given) == [value for value in given if _is_valid(schema, value)]


def matching(schema: Any, given: list[Any]) -> list[Any]:
    return [value for value, does in zip(given, matches(schema, *given), strict=True) if does]


@pytest.mark.parametrize(
    "least, required, follows", [(1, [], True), (2, [], False), (2, ["a"], True), (3, ["a"], False)]
)
def test_names_that_may_be_repeated_are_not_counted(least: int, required: list[str], follows: bool) -> None:
    schema = {"type": "object", "minProperties": least, "allOf": [{"required": required}]}
    given: list[Any] = [{}, {"a": 1}, {"a": 1, "b": 1}]
    if follows:
        assert matches(schema, *given) == [_is_valid(schema, value) for value in given]
        return
    with pytest.raises(GrammarError, match=f"^`minProperties` cannot .* bound it to {len(required) + 1}"):
        matches(schema, *given)


def test_dates_are_days_of_a_calendar() -> None:
    years = ["0000", "0001", "0100", "1900", "2000", "2023", "2024", "2100"]
    days = [f"{year}-{day}" for year in years for day in ("01-31", "02-28", "02-29", "02-30", "10-01", "12-32")]
    real = [day for day in days if _is_day(day)]
    assert matching({"type": ["string", "null"], "format": "date"}, [*days, None]) == [*real, None]
    times = [f"{day}T23:59:59Z" for day in days]
    assert matching({"format": "date-time"}, times) == [f"{day}T23:59:59Z" for day in real]
    assert matches({"format": "date-time"}, "2024-02-29T23:59:60Z", "2024-02-29T12:00:00.5+01:00") == [False, True]
    assert matches({"format": "time"}, "23:59:60Z", "23:59:59Z") == [False, True]


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


@pytest.mark.parametrize("junk", [None, True, 1.5, "a", [], [[]], [{}], {}, {"a": []}, {"$ref": []}, {"enum": [[]]}])
def test_what_is_no_schema_is_left_to_the_compiler(junk: Any) -> None:
    """In the place of anything that is looked at."""
    names = ["$ref", "const", "discriminator", "enum", "format", "maxItems", "oneOf", "pattern", "properties"]
    names += ["additionalProperties", "allOf", "minProperties", "patternProperties"]
    for name in [*names, "propertyNames", "required", "type", "uniqueItems"]:
        part = {"propertyNames": {name: junk}, "oneOf": [{name: junk}], "discriminator": {"propertyName": "a"}}
        for schema in (part, {**part, name: junk}, {"items": [part, {name: {name: junk}}]}):
            json.dumps(followed(schema))


UNIQUE = {"type": "array", "uniqueItems": True}
OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}


@pytest.mark.parametrize(
    "schema, place, complaint",
    [
        ({"properties": {"ok": {"type": "string"}, "tags": UNIQUE}}, "properties.tags", "`uniqueItems` cannot be"),
        ({"$defs": {"T": {"properties": {"a": UNIQUE}}}, "$ref": "#/$defs/T"}, "$defs.T.properties.a", "`uniqueItems`"),
        ({"anyOf": [{"type": "null"}, {"items": {"not": {}}}]}, "anyOf[1].items", "`not` cannot be followed: leave it"),
        ({"properties": {"a b": {"contains": {}, "minContains": 2}}}, 'properties["a b"]', "`minContains`"),
        ({"properties": {"n": OVERLAPPING}}, "properties.n", "`oneOf` may overlap, or cannot be told apart: use `any"),
        ({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, "properties.p", "look-around"),
        ({"properties": {"p": {"type": "thing"}}}, "properties.p", "Invalid type: thing"),
    ],
)
def test_a_fault_is_told_of_with_its_place(check: GrammarCheck, schema: Any, place: str, complaint: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check.check(GrammarSource("json_schema", json.dumps(schema)))
    assert str(caught.value).startswith(f"`{place}`: ") and complaint in str(caught.value)


def test_the_fault_of_a_whole_schema_has_no_place(check: GrammarCheck) -> None:
    with pytest.raises(GrammarError, match=r"^`uniqueItems` cannot"):
        check.check(GrammarSource("json_schema", json.dumps(UNIQUE)))
    loop = {"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"next": {"$ref": "#/$defs/N"}}, "not": {}}}}
    with pytest.raises(GrammarError, match=r"^`\$defs.N`: `not` cannot"):
        check.check(GrammarSource("json_schema", json.dumps(loop)))
