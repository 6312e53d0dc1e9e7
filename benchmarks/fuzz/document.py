"""/openapi.json as a list of operations, with every reference resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

JSON, FORM = "application/json", "multipart/form-data"
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str  # with {names}
    query: tuple[str, ...]
    fields: dict[str, Schema] | None  # of its body, by name; None: it has none
    required: frozenset[str]
    media: tuple[str, ...]  # that its body may be

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def parameters(self) -> list[str]:
        """Of the path."""
        return re.findall(r"\{(\w+)\}", self.path)


def operations_of(document: dict[str, Any]) -> list[Operation]:
    schemas = document["components"]["schemas"]
    return [
        _operation(method.upper(), path, told, schemas)
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]


def _operation(method: str, path: str, told: dict[str, Any], schemas: dict[str, Schema]) -> Operation:
    query = tuple(one["name"] for one in told.get("parameters", []) if one["in"] == "query")
    content = told.get("requestBody", {}).get("content", {})
    described = next((media["schema"] for media in content.values() if "schema" in media), None)
    if described is None:  # no body, or bytes of any kind
        return Operation(method, path, query, None, frozenset(), ())
    schema = _merged(described, schemas)
    fields = {name: resolved(field, schemas) for name, field in schema["properties"].items()}
    return Operation(method, path, query, fields, frozenset(schema.get("required", ())), tuple(content))


def _merged(schema: Schema, schemas: dict[str, Schema]) -> Schema:
    """An object's schema, also where it is written as several that all hold."""
    schema = resolved(schema, schemas)
    parts = [_merged(part, schemas) for part in schema.get("allOf", ())]
    properties = {name: field for part in (*parts, schema) for name, field in part.get("properties", {}).items()}
    required = [name for part in (*parts, schema) for name in part.get("required", ())]
    return {"properties": properties, "required": required}


def resolved(schema: Any, schemas: dict[str, Schema]) -> Any:
    """Without references; the document has no schema that contains itself."""
    if isinstance(schema, list):
        return [resolved(part, schemas) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return {name: resolved(part, schemas) for name, part in schema.items()}
