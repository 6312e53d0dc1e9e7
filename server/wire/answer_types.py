"""What the endpoints answer, as types: for /openapi.json alone. The handlers write the same objects by hand, since most
of them are assembled from parts that are formatted once per request.

Fields that depend on what was asked for have a default here; others are always there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str
    details: dict[str, Any]


class Error(msgspec.Struct, kw_only=True):
    error: ErrorObject


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class Continued(msgspec.Struct, kw_only=True):
    """What a continuation took over and what it had to compute."""

    parent: str
    at: int
    inherited_tokens: int
    computed_tokens: int
    source: Literal["blocks", "host", "file", "prefix_cache", "recompute"]


class Retained(msgspec.Struct, kw_only=True):
    id: str
    expires_at: int
    tokens: int
    blocks: int
    durable: bool | None = None
    durable_reason: str | None = None


class _Generation(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    continuation: Continued | None = None
    retained: Retained | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET


class Completion(_Generation, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(_Generation, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: dict[str, Any] | None


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class HiddenStates(msgspec.Struct, kw_only=True):
    """As JSON; `encoding_format: "safetensors"` is a file instead."""

    id: str
    object: Literal["list"]
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, Any]
    computed_tokens: int
    stack: Literal["encoder", "decoder"] | None = None  # of an encoder-decoder model


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float | None] | str


class Embeddings(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: Literal[True]


class ContinuationChoice(msgspec.Struct, kw_only=True):
    index: int
    tokens: int
    blocks: int
    shared_blocks: int


class ContinuationGroup(msgspec.Struct, kw_only=True, omit_defaults=True):
    kind: Literal["full", "window", "state"]
    bytes: int
    window: int | None = None
    blocks: int | None = None
    states: int | None = None


class Continuation(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["continuation"]
    request_id: str | None
    created_at: int
    expires_at: int | None
    grade: Literal["running", "leased", "stored", "warm", "tokens"]
    adapter: str | None
    parent: str | None
    at: int | None
    children: int
    choices: list[ContinuationChoice]
    groups: list[ContinuationGroup]


class ContinuationList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Continuation]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Ttl(msgspec.Struct, kw_only=True):
    """A lease from now on; null ends it."""

    ttl: float | None


class CatalogueItems(msgspec.Struct, kw_only=True):
    """A catalogue as JSON: items are texts or lists of token ids."""

    name: str
    items: list[str | list[int]]


class Catalogue(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["catalogue"]
    name: str
    items: int
    depth: int


class CatalogueList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Catalogue]


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    lifecycle: Literal["active"]
    display_name: str
    created_at: str
    root: str
    parent: str | None
    max_model_len: int
    max_input_tokens: int
    reasoning_parser: str | None
    tool_call_parser: str


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str]


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class Status(msgspec.Struct, kw_only=True):
    status: Literal["ok"]


class Health(Status, kw_only=True):
    cpu_matmul: Literal["exact", "fast"] | msgspec.UnsetType = msgspec.UNSET  # of a model in codes on a CPU


class Sleeping(msgspec.Struct, kw_only=True):
    is_sleeping: bool
    bytes_given_back: int | None = None


class Transcription(msgspec.Struct, kw_only=True):
    text: str
    usage: dict[str, Any] | None = None
    task: str | None = None  # these of verbose_json
    language: str | None = None
    duration: float | None = None
    segments: list[dict[str, Any]] | None = None
    words: list[dict[str, Any]] | None = None


class Version(msgspec.Struct, kw_only=True):
    version: str


class File(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileForm(msgspec.Struct, kw_only=True):
    """The fields beside the file."""

    purpose: Literal["batch"]


class FileList(msgspec.Struct, kw_only=True):
    data: list[File]
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    data: list[Batch]
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool
