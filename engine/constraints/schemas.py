"""JSON schemas as llguidance can follow them, and where in one a fault lies.

llguidance refuses what it does not know, which keeps a schema from being followed in part. But some of it asks nothing
of an answer, and some says in other words what llguidance does follow. Pydantic writes both.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

__all__ = ["KNOWN_FORMATS", "UnfollowedError", "fault_in", "followed", "reworded"]

# JSON Schema: a format that is not known is an annotation. llguidance enforces these.
KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "properties", "patternProperties")
_SINGLE = ("additionalItems", "additionalProperties", "items", "propertyNames")

# They ask nothing of an answer. Beside a `$ref` llguidance takes whatever it does not know for a part of the schema.
_NOTES = ("deprecated", "discriminator")

# Pydantic's Decimal: not a text of these characters alone. Rust's patterns cannot look ahead.
_AHEAD = "^(?!^[-+.]*$)"
_NOT_ALONE = {"type": "string", "pattern": "[^-+.]"}

_ATOMS = {name: frozenset({name}) for name in ("array", "boolean", "integer", "null", "object", "string")}
_ATOMS["number"] = frozenset({"integer", "fraction"})
_ANY = frozenset().union(*_ATOMS.values())
_MOST_REFS = 16  # that are followed from one schema: they may lead in a circle

_OF_NAMES = {"$ref", "const", "description", "enum", "pattern", "title", "type"}  # of a schema of names, that are read

# What a format asks beyond what llguidance makes of it: a day that its year has, and a second that clocks know.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = f"(?:(?:[1-9]|0[1-9]|00[1-9]|000[1-9])[0-9]*-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_EXACTLY = {"date": f"^{_DAY}", "date-time": f"^{_DAY}.*[Tt]{_SECOND}", "time": f"^{_SECOND}"}

_JOINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_MOST_BOUND = 64  # schemas that are looked at for one object

_SEARCH_SECONDS = 0.5


class UnfollowedError(Exception):
    """A schema that llguidance would follow in part."""


def followed(schema: Any) -> Any:
    """A copy whose answers are answers to `schema`. Raises UnfollowedError."""
    root = copy.deepcopy(schema)
    parts = [part for _, part in _all_parts(root)]
    for part in parts:
        _require_tag(part, root)
    for part in parts:
        if isinstance(part.get("oneOf"), list) and "anyOf" not in part and _exclude(part["oneOf"], root):
            part["anyOf"] = part.pop("oneOf")
    for part in parts:
        _without_notes(part)
    for part in parts:
        _name_properties(part, root)
        _count_names(part, root)
        _be_exact(part)
    for part in parts:
        _bind_listed(part)
    if any("patternProperties" in part for part in parts):
        for part in parts:
            _bind_patterns(part, root)
    return root


def fault_in(schema: Any, complaint: str, complaint_of: Callable[[Any], str | None]) -> str:
    """The path of the innermost part that is at fault: of which is said what is said of the whole; "": the whole.

    Searches for half a second: what it has found until then holds the fault, too.
    """
    until = time.monotonic() + _SEARCH_SECONDS
    path, part, seen = "", schema, {""}

    def at_fault(inner: Any) -> bool:
        return time.monotonic() < until and complaint_of(_alone(inner, schema)) == complaint

    while True:
        for found_path, found in _children(path, part):
            if not at_fault(found):
                continue
            target = _target(found, schema)
            if target is not None and at_fault(target):
                found_path, found = _path_of(found["$ref"]), target
            if found_path not in seen:
                path, part = found_path, found
                seen.add(path)
                break
        else:
            return path


def reworded(complaint: str) -> str:
    """What llguidance says of a schema, as what its author can do."""
    if complaint.startswith("oneOf constraints are not supported"):
        return (
            "the branches of `oneOf` may overlap, or cannot be told apart: use `anyOf`, or give each object a required "
            "property with a `const` of its own"
        )
    unknown = re.fullmatch(r"Unimplemented keys: (\[.*\])", complaint)
    if unknown is None:
        return complaint
    keys: list[str] = json.loads(unknown[1])
    way = "leave it out" if len(keys) == 1 else "leave them out"
    if "uniqueItems" in keys:
        way += ", and drop what an answer repeats; or bound `maxItems` to 1"
    return f"{' and '.join(f'`{key}`' for key in keys)} cannot be followed: {way}"


def _all_parts(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    waiting = [("", root)]
    while waiting:
        path, part = waiting.pop()
        waiting += _children(path, part)
        if isinstance(part, dict):
            yield path, part


def _children(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, in its order, with their paths."""
    for key, value in part.items() if isinstance(part, dict) else ():
        here = _joined(path, key)
        if isinstance(value, list) and (key in _LISTS or key == "items"):
            yield from ((f"{here}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict) and key in _NAMED:
            yield from ((_joined(here, name), item) for name, item in value.items())
        elif isinstance(value, dict) and key in _SINGLE:
            yield here, value


def _joined(path: str, name: str) -> str:
    if not re.fullmatch(r"[\w$-]{1,64}", name):
        return f"{path}[{json.dumps(name[:64], ensure_ascii=False)}]"
    return f"{path}.{name}" if path else name


def _path_of(ref: str) -> str:
    return reduce(_joined, _names_of(ref), "")


def _names_of(ref: str) -> list[str]:
    return [name.replace("~1", "/").replace("~0", "~") for name in ref.split("/")[1:]]


def _alone(part: Any, root: Any) -> Any:
    """A part as a schema of its own, which finds what the whole one defines."""
    if not isinstance(part, dict) or not isinstance(root, dict):
        return part
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **part}


def _target(part: Any, root: Any) -> Any:
    """Where a `$ref` to another place of the same schema leads; None: nowhere."""
    ref = part.get("$ref") if isinstance(part, dict) else None
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found = root
    for name in _names_of(ref):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _without_notes(part: dict[str, Any]) -> None:
    for name in _NOTES:
        part.pop(name, None)
    if isinstance(part.get("format"), str) and part["format"] not in KNOWN_FORMATS:
        del part["format"]
    most = part.get("maxItems")
    if part.get("uniqueItems") is False or ("uniqueItems" in part and type(most) is int and most <= 1):
        del part["uniqueItems"]
    pattern = part.get("pattern")
    if isinstance(pattern, str) and pattern.startswith(_AHEAD) and isinstance(part.get("allOf", []), list):
        part["pattern"] = "^" + pattern.removeprefix(_AHEAD)
        part["allOf"] = [*part.get("allOf", []), _NOT_ALONE]


def _name_properties(part: dict[str, Any], root: Any) -> None:
    """`propertyNames` of a map as properties: Pydantic writes it for a dict whose keys are of an enum or a pattern."""
    if not {"properties", "patternProperties"}.isdisjoint(part):
        return
    holders = list(_resolved(part.get("propertyNames"), root))
    if not holders or "$ref" in holders[-1] or any(holder.keys() - _OF_NAMES for holder in holders):
        return
    rules = [(key, holder[key]) for holder in holders for key in ("const", "enum", "pattern") if key in holder]
    if len(rules) > 1 or any("string" not in _atoms(holder.get("type")) for holder in holders):
        return
    kind, rule = rules[0] if rules else ("", [])
    if (kind == "pattern" and not isinstance(rule, str)) or (kind == "enum" and not isinstance(rule, list)):
        return
    del part["propertyNames"]
    if not kind:
        return
    values = part.get("additionalProperties", True)
    part["additionalProperties"] = False
    if kind == "pattern":
        part["patternProperties"] = {rule: values}
    else:
        names = rule if kind == "enum" else [rule]
        part["properties"] = {name: values for name in names if isinstance(name, str)}


def _count_names(part: dict[str, Any], root: Any) -> None:
    """An object may have a name twice, which counts once: llguidance keeps only those apart that must come."""
    least = part.get("minProperties")
    if type(least) is not int or "object" not in _atoms(part.get("type")):
        return
    holders = _bound(part, root, ("allOf",))
    lists = [holder["required"] for holder in holders if isinstance(holder.get("required"), list)]
    required = {name for names in lists for name in names if isinstance(name, str)}
    if least > len(required) + 1:
        raise UnfollowedError(
            "`minProperties` cannot be followed beyond one name that is not `required`, since an answer may repeat it: "
            f"bound it to {len(required) + 1}, or leave it out"
        )


def _be_exact(part: dict[str, Any]) -> None:
    exactly = _EXACTLY.get(part["format"]) if isinstance(part.get("format"), str) else None
    if exactly is not None and isinstance(part.get("allOf", []), list):
        part["allOf"] = [*part.get("allOf", []), {"pattern": exactly}]


def _bind_listed(part: dict[str, Any]) -> None:
    """Patterns bind properties that are listed, too. llguidance looks at those of another schema alone."""
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict) and part.get("properties") and isinstance(part.get("allOf", []), list):
        part["patternProperties"] = dict.fromkeys(patterns, True)  # which keeps them out of `additionalProperties`
        part["allOf"] = [*part.get("allOf", []), {"patternProperties": patterns}]


def _bind_patterns(part: dict[str, Any], root: Any) -> None:
    """What matches a pattern of one schema may be an additional property of another one, and then both bind.

    llguidance merges schemas pattern by pattern, and forgets the other. So that one gets the same patterns.
    """
    if _JOINING.isdisjoint(part):
        return
    always = list(_bound(part, root, ("allOf",)))
    perhaps = list(_bound(part, root, ("allOf", "anyOf", "oneOf")))
    for holders, others in ((always, perhaps), (perhaps, always)):
        patterns = [name for other in others for name in _dict(other.get("patternProperties"))]
        for holder in holders if patterns else ():
            values, own = holder.get("additionalProperties", True), holder.get("patternProperties", {})
            if values not in (True, {}) and isinstance(own, dict):
                holder["patternProperties"] = dict.fromkeys(patterns, values) | own


def _bound(part: dict[str, Any], root: Any, lists: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The schemas that bind the same value: this one, what it refers to, and those in `lists`."""
    waiting: list[Any] = [part]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_BOUND:
        holder = waiting.pop()
        if not isinstance(holder, dict) or id(holder) in seen:
            continue
        seen.add(id(holder))
        yield holder
        waiting.append(_target(holder, root))
        for name in lists:
            waiting += holder[name] if isinstance(holder.get(name), list) else ()


def _dict(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else {}


def _require_tag(part: dict[str, Any], root: Any) -> None:
    """The property that tells the branches of a `oneOf` apart must be there, as its `discriminator` says.

    Pydantic gives such a property a default and does not list it as required.
    """
    discriminator = part.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if not isinstance(tag, str) or not isinstance(part.get("oneOf"), list):
        return
    for branch in part["oneOf"]:
        for holder in _resolved(branch, root):
            properties, required = holder.get("properties"), holder.get("required", [])
            if isinstance(properties, dict) and tag in properties and isinstance(required, list):
                holder["required"] = [name for name in required if name != tag] + [tag]


def _resolved(part: Any, root: Any) -> Iterator[dict[str, Any]]:
    """A schema, and what it refers to: all of them bind."""
    for _ in range(_MOST_REFS):
        if not isinstance(part, dict):
            return
        yield part
        part = _target(part, root)


class _Kinds(NamedTuple):
    """What a value of a branch may be, as far as this is easily told."""

    atoms: frozenset[str]
    values: frozenset[Any] | None  # None: any of these types
    tags: dict[str, frozenset[Any]]  # the values of properties that an object must have


def _exclude(branches: Sequence[Any], root: Any) -> bool:
    """Whether no value can be of two branches, so that `oneOf` is `anyOf`. "No" means that this is not easily told."""
    kinds = [_kinds(branch, root) for branch in branches]
    valued = [kind.values for kind in kinds if kind.values is not None]
    objects = [kind for kind in kinds if kind.values is None and kind.atoms == {"object"}]
    others = [kind.atoms for kind in kinds if kind.values is None and kind.atoms != {"object"}]
    of_values = frozenset().union(*(kind.atoms for kind in kinds if kind.values is not None))
    return (
        _apart(valued)
        and _apart([of_values, *others, frozenset({"object"} if objects else ())])
        and (len(objects) < 2 or any(_apart([kind.tags.get(tag) for kind in objects]) for tag in objects[0].tags))
    )


def _apart(sets: Iterable[frozenset[Any] | None]) -> bool:
    """Whether all are known and nothing is in two of them."""
    seen: set[Any] = set()
    for values in sets:
        if values is None or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def _kinds(branch: Any, root: Any) -> _Kinds:
    atoms, values = _ANY, None
    tags: dict[str, frozenset[Any]] = {}
    for part in _resolved(branch, root):
        atoms &= _atoms(part.get("type"))
        values = _values(part) if values is None else values
        required, properties = part.get("required"), part.get("properties")
        if isinstance(required, list) and isinstance(properties, dict):
            for name in required:
                listed = _tag_values(properties.get(name), root) if isinstance(name, str) else None
                tags |= {name: listed} if listed is not None else {}
    if values is not None:
        atoms &= frozenset(kind for kind, _ in values)
    return _Kinds(atoms, values, tags)


def _tag_values(part: Any, root: Any) -> frozenset[Any] | None:
    listed = (_values(holder) for holder in _resolved(part, root))
    return next((values for values in listed if values is not None), None)


def _atoms(given: Any) -> frozenset[str]:
    names = given if isinstance(given, list) else [given]
    known = [_ATOMS[name] for name in names if isinstance(name, str) and name in _ATOMS]
    return frozenset().union(*known) if known and len(known) == len(names) else _ANY


def _values(part: dict[str, Any]) -> frozenset[Any] | None:
    """Of `const` or `enum`, each with its type, since JSON's true is not its 1; None: there are others."""
    if "const" in part:
        listed = [part["const"]]
    elif isinstance(part.get("enum"), list):
        listed = part["enum"]
    else:
        return None
    if not all(value is None or isinstance(value, str | bool | int | float) for value in listed):
        return None
    return frozenset((_atom(value), value) for value in listed)


def _atom(value: str | float | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    return "fraction" if isinstance(value, float) and not value.is_integer() else "integer"
