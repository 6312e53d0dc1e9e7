"""The document that describes the API: complete, valid, and true of what the server answers."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from bequest.server.about.openapi import OPERATIONS, document, plain_path
from bequest.server.app import ROUTES
from tests.server.front import Front

MESSAGES = [{"role": "user", "content": "x"}]


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    routes = {(method, plain_path(path)) for method, path, _ in ROUTES}
    assert routes == OPERATIONS.keys()
    told = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert told == routes


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(references, value.values()))


def test_references_lead_somewhere_and_schemas_are_schemas() -> None:
    shown = document()
    for reference in references(shown):
        found: Any = shown
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        assert found
    for schema in shown["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [op["operationId"] for methods in shown["paths"].values() for op in methods.values()]
    assert len(names) == len(set(names))


async def test_it_is_served(front: Front) -> None:
    answer, shown = await front.get("/openapi.json")
    assert answer.status == 200 and shown["openapi"].startswith("3.1")
    fields = shown["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["tools"] and fields["model"] == {"enum": ["fake/model", None]}


def conforms(value: Any, name: str) -> None:
    schemas = document()["components"]
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": schemas})


@pytest.mark.parametrize(
    "path, body, name",
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "Completion"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, "ChatCompletion"),
        ("/v1/responses", {"input": "x"}, "Response"),
        ("/v1/responses/input_tokens", {"input": "x"}, "InputTokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "Tokens"),
        ("/detokenize", {"tokens": [65]}, "Detokenized"),
        ("/v1/catalogues", {"name": "c", "items": ["ab", [67]]}, "Catalogue"),
    ],
)
async def test_answers_are_what_it_says(front: Front, path: str, body: dict[str, Any], name: str) -> None:
    answer, shown = await front.post(path, body)
    assert answer.status == 200, shown
    conforms(shown, name)


@pytest.mark.parametrize(
    "path, name",
    [
        ("/v1/models", "ModelList"),
        ("/v1/continuations", "ContinuationList"),
        ("/v1/catalogues", "CatalogueList"),
        ("/health", "Health"),
        ("/version", "Version"),
        ("/nowhere", "Error"),
        ("/v1/responses/resp_x", "Error"),
    ],
)
async def test_answers_to_get(front: Front, path: str, name: str) -> None:
    _, shown = await front.get(path)
    conforms(shown, name)
