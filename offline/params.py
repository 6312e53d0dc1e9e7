"""How answers are sampled, and on which terms: the fields of a client's body, under the same names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from bequest.offline.errors import RequestError, own_errors
from bequest.server.wire import fields
from bequest.server.wire.bodies import Body, CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What is None is the model's own default, or else the server's: temperature 1, one choice, 16 tokens of a
    completion, and of a chat as many as there is room for."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None  # alternatives for each sampled token; 0: the sampled one alone
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        """What is of a wrong type is found here, what the model does not have when it is asked."""
        read(self.given(), CompletionBody)

    def given(self) -> dict[str, Any]:
        """What is not None, as JSON would have it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: plain(value, name) for name, value in values.items() if value is not None}


class Options(TypedDict, total=False):
    """What else a request may say: its adapter, its name and lease, its parent, its time and its place in the queue."""

    model: str  # one of `lora`'s names
    request_id: str
    retain: bool | Mapping[str, float]
    store: bool
    continuation_of: Any  # an id, a request_id, or what was given back before
    continuation_at: int | str
    continuation_choice: int
    continuation_fallback: Any
    hidden_states: bool | Mapping[str, Any]
    timeout: float
    priority: int
    cache_salt: str


class ChatOptions(Options, total=False):
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def plain(value: Any, param: str) -> Any:
    """A value as JSON would have it: lists, objects with strings for keys, Python's own numbers. What JSON cannot hold
    never reaches the server's rules, so it is refused here."""
    if isinstance(value, str):
        return _sendable(value, param)
    if isinstance(value, bytes | bytearray | memoryview):
        raise RequestError(f"`{param}` holds bytes: decode them to a string first.", "invalid_type", param, {})
    if isinstance(value, Mapping):
        return {_sendable(str(key), param): plain(inner, param) for key, inner in value.items()}
    if isinstance(value, int | float | bool) or value is None:
        return value
    if hasattr(value, "tolist"):  # numpy's and torch's
        return plain(value.tolist(), param)
    return [plain(item, param) for item in value] if isinstance(value, Sequence | set | frozenset) else value


def _sendable(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X} at character {error.start}"
        message = f"`{param}` is not valid Unicode: it has a lone surrogate ({surrogate})."
        raise RequestError(message, "invalid_value", param, {}) from None
    return text


def read(raw: Mapping[str, Any], body: type[Body]) -> Body:
    """The typed body. A name that nobody reads is refused: there is no header to tell it in."""
    with own_errors():
        typed, ignored = fields.read({name: value for name, value in raw.items() if value is not None}, body)
    if ignored:
        message = f"`{ignored[0]}` is not a parameter here."
        raise RequestError(message, "unknown_parameter", ignored[0], {})
    return typed
