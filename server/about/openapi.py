"""GET /openapi.json: the routes, made into a document from the types of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from bequest.server.audio import form
from bequest.server.batches.batches import BatchBody
from bequest.server.context import CONTEXT
from bequest.server.door import Operation
from bequest.server.doors.finding import DOORS
from bequest.server.operation.version import installed_version
from bequest.server.transport.replies import json_response
from bequest.server.wire import answer_types, bodies

JSON, FORM = "application/json", "multipart/form-data"
EVENTS, BYTES = "text/event-stream", "application/octet-stream"
# What any route may answer instead, and what that means; every one of them has the same body.
_ERRORS = {
    "400": "The request is wrong: the message says where and what would do.",
    "401": "The key is missing, unknown or expired.",
    "403": "The key may not do this.",
    "404": "No such URL, model, response, continuation, catalogue, file or batch.",
    "409": "The name is taken, or the parent came to nothing.",
    "410": "The parent's lease was in files that are lost.",
    "413": "The body is too large.",
    "415": "The Content-Type is not one that this endpoint takes.",
    "421": "Another replica has what the request names: X-Bequest-Owner says which.",
    "429": "Too much at once; Retry-After says when to try again.",
    "500": "A fault of the server's own.",
    "503": "Loading, shutting down, or failed.",
    "504": "The request's timeout passed before its first token.",
    "507": "The disk for files is full, read-only or broken.",
    "default": "Any other error.",
}


def plain_path(path: str) -> str:
    """A route's path as the document writes it: without patterns."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)


_FILE = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
_PAGE = ("limit", "after", "order")
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        "Completes a prompt, or scores suffixes of it.", answer_types.Completion, bodies.CompletionBody, streams=True
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answers a conversation.", answer_types.ChatCompletion, bodies.ChatBody, streams=True
    ),
    ("POST", "/v1/hidden_states"): Operation(
        "Hidden states of a prompt or of a parent.", answer_types.HiddenStates, bodies.HiddenStatesBody, files=True
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Vectors of texts and images.", answer_types.Embeddings, bodies.EmbeddingsBody
    ),
    ("POST", "/v1/responses"): Operation(
        "Answers items, and keeps them.", answer_types.Response, bodies.ResponseBody, streams=True
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Counts the tokens of a response's prompt.", answer_types.InputTokens, bodies.ResponseBody
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        "A stored response, or its events once more.",
        answer_types.Response,
        streams=True,
        query=("stream", "starting_after"),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation("Forgets a response.", answer_types.Deleted),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "What a response was made from.", answer_types.ItemList, query=_PAGE
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation("Ends a response that runs.", answer_types.Response),
    ("GET", "/v1/continuations"): Operation("What is retained.", answer_types.ContinuationList, query=_PAGE),
    ("GET", "/v1/continuations/{id}"): Operation("One record.", answer_types.Continuation),
    ("PATCH", "/v1/continuations/{id}"): Operation(
        "Leases a record, or ends it.", answer_types.Continuation, answer_types.Ttl
    ),
    ("DELETE", "/v1/continuations/{id}"): Operation("Forgets a record.", answer_types.Deleted),
    ("GET", "/v1/continuations/{id}/estate"): Operation("All that a record owns, as one file.", None, files=True),
    ("PUT", "/v1/continuations/{id}/estate"): Operation(
        "Takes such a file in.", answer_types.Continuation, query=("ttl",), media=(BYTES,)
    ),
    ("POST", "/v1/continuations/{id}/prefetch"): Operation(
        "Reads a lease out of files before its children come.", answer_types.Continuation, status="202"
    ),
    ("POST", "/v1/catalogues"): Operation(
        "Uploads a set of items.",
        answer_types.Catalogue,
        answer_types.CatalogueItems,
        query=("name", "replace", "width"),
        media=("application/x-ndjson", "application/octet-stream"),
    ),
    ("GET", "/v1/catalogues"): Operation("The catalogues.", answer_types.CatalogueList),
    ("GET", "/v1/catalogues/{name}"): Operation("One catalogue.", answer_types.Catalogue),
    ("DELETE", "/v1/catalogues/{name}"): Operation("Forgets a catalogue.", answer_types.Deleted),
    ("POST", "/v1/files"): Operation("Uploads a file.", answer_types.File, answer_types.FileForm, form=True),
    ("GET", "/v1/files"): Operation("The files.", answer_types.FileList, query=(*_PAGE, "purpose")),
    ("GET", "/v1/files/{id}"): Operation("One file.", answer_types.File),
    ("DELETE", "/v1/files/{id}"): Operation("Deletes a file.", answer_types.Deleted),
    ("GET", "/v1/files/{id}/content"): Operation("What is in a file.", None, files=True),
    ("POST", "/v1/batches"): Operation("Runs the lines of a file.", answer_types.Batch, BatchBody),
    ("GET", "/v1/batches"): Operation("The batches.", answer_types.BatchList, query=_PAGE),
    ("GET", "/v1/batches/{id}"): Operation("One batch.", answer_types.Batch),
    ("POST", "/v1/batches/{id}/cancel"): Operation("Ends a batch.", answer_types.Batch),
    ("POST", "/v1/audio/transcriptions"): Operation(
        "Writes speech down.", answer_types.Transcription, form.TranscriptionBody, streams=True, form=True
    ),
    ("POST", "/v1/audio/translations"): Operation(
        "Writes speech down in English.", answer_types.Transcription, form.TranslationBody, form=True
    ),
    ("POST", "/v1/load_lora_adapter"): Operation("Loads a LoRA adapter.", answer_types.Model, bodies.LoadAdapterBody),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Unloads a LoRA adapter.", answer_types.Deleted, bodies.UnloadAdapterBody
    ),
    ("GET", "/v1/models"): Operation("The models.", answer_types.ModelList),
    ("GET", "/v1/models/{id}"): Operation("One model.", answer_types.Model),
    **{
        ("POST", f"{prefix}/tokenize"): Operation(
            "Text or messages to tokens.", answer_types.Tokens, bodies.TokenizeBody
        )
        for prefix in ("", "/v1")
    },
    **{
        ("POST", f"{prefix}/detokenize"): Operation("Tokens to text.", answer_types.Detokenized, bodies.DetokenizeBody)
        for prefix in ("", "/v1")
    },
    ("GET", "/tokenizer_info"): Operation("The tokenizer and its chat template.", answer_types.TokenizerInfo),
    ("POST", "/sleep"): Operation("Gives memory back until it is woken.", answer_types.Sleeping),
    ("POST", "/wake_up"): Operation("Takes its memory again.", answer_types.Sleeping),
    ("GET", "/is_sleeping"): Operation("Whether its memory is given back.", answer_types.Sleeping),
    ("GET", "/health"): Operation("Whether the server takes work.", answer_types.Health),
    ("GET", "/live"): Operation("Whether the process answers.", answer_types.Status),
    ("GET", "/version"): Operation("The version.", answer_types.Version),
    ("GET", "/metrics"): Operation("Metrics for Prometheus.", None),
    ("GET", "/openapi.json"): Operation("This document.", None),
    **{(route.method, plain_path(route.path)): route.operation for door in DOORS for route in door.routes},
}
_OPEN = ("/health", "/live")  # without a key


async def openapi(request: web.Request) -> web.Response:
    return json_response(with_models(document(), request.app[CONTEXT].model_names))


def with_models(shown: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The document of a server: bodies name one of its models, or none."""
    schemas = dict(shown["components"]["schemas"])
    for body in {operation.body for operation in OPERATIONS.values()}:
        if body is not None and "model" in schemas[body.__name__]["properties"]:
            schema = schemas[body.__name__]
            schemas[body.__name__] = {
                **schema,
                "properties": {**schema["properties"], "model": {"enum": [*names, None]}},
            }
    return {**shown, "components": {**shown["components"], "schemas": schemas}}


@cache
def document() -> dict[str, Any]:
    types = {t for op in OPERATIONS.values() for t in (op.answer, op.body, op.error) if t is not None}
    ordered = sorted(types | {answer_types.Error}, key=lambda t: t.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bequest", "version": installed_version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {status: _error(text) for status, text in _ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # none are asked for where none are configured
    }


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    name = "_".join(re.findall(r"\w+", path)) or "root"
    shown: dict[str, Any] = {"operationId": f"{method.lower()}_{name}", "summary": operation.summary}
    if path in _OPEN:
        shown["security"] = []
    parameters = [*_parameters(re.findall(r"\{(\w+)\}", path), "path"), *_parameters(operation.query, "query")]
    if parameters:
        shown["parameters"] = parameters
    if operation.body is not None:
        content: dict[str, Any] = {JSON: {"schema": _reference(operation.body)}}
        content |= {media: {} for media in operation.media}
        if operation.form:
            content = {FORM: {"schema": {"allOf": [_reference(operation.body), _FILE]}}}
        shown["requestBody"] = {"required": True, "content": content}
    elif operation.media:
        shown["requestBody"] = {"required": True, "content": {media: {} for media in operation.media}}
    return {**shown, "responses": {operation.status: _answer(operation), **_errors(operation.error)}}


def _parameters(names: Iterable[str], place: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}} for name in names]


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {JSON if operation.answer is not None else "*/*": {}}
    if operation.answer is not None:
        content = {JSON: {"schema": _reference(operation.answer)}}
    if operation.streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    if operation.files:
        content[BYTES] = {}
    return {"description": "As asked for.", "content": content}


def _errors(own: type[msgspec.Struct] | None) -> dict[str, Any]:
    """`own`: what errors of this route look like, if they do not look as everywhere."""
    if own is not None:
        return {status: _error(text, own) for status, text in _ERRORS.items()}
    return {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}


def _error(description: str, kind: type[msgspec.Struct] = answer_types.Error) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": _reference(kind)}}}


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
