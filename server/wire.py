"""Request bodies: bytes → JSON → typed structs, with every complaint mapped to the field it is about.

`null` is the same as absent for every field, so every field is optional here; who needs one asks for it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import orjson

from bequest.server.errors import ApiError, invalid


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # advisory: padding against traffic analysis


class PositionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: int | None = None
    end: int | None = None


LayersField = str | list[int]
PositionsField = str | list[int] | PositionSpan


class GeneratedStates(msgspec.Struct, frozen=True, kw_only=True):
    """`return_hidden_states` as an object."""

    layers: LayersField | None = None
    positions: PositionsField | None = None
    pooling: str | None = None
    dtype: str | None = None
    encoding_format: str | None = None
    include_prompt: bool | None = None
    stack: str | None = None


# `structured_outputs`, of which one of the first five says what the answer is (server/structured/constraints.py).
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
STRUCTURED_FIELDS = (
    *STRUCTURED_KINDS,
    "disable_additional_properties",
    "disable_any_whitespace",
    "whitespace_pattern",
    "disable_fallback",  # advisory: there is nothing to fall back to
    "structural_tag",  # refused
)


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    store: bool | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None

    use_beam_search: bool = False
    beam_width: int | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    catalogue: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_hidden_states: bool | GeneratedStates | None = None

    continuation_of: str | None = None
    continuation_at: int | str | None = None
    continuation_choice: int | None = None
    continuation_suffix: str | None = None
    continuation_token_ids: list[int] | None = None
    retain: bool | dict[str, Any] | None = None

    # Advisory: cannot change the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None


# A string, a list of token ids, or a list of either.
InputField = str | list[int | str | list[int]]
# The same, and objects (server/generation/prompt_forms.py).
PromptField = str | dict[str, Any] | list[int | str | list[int] | dict[str, Any]]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: PromptField | None = None
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = None
    continuation_fallback: str | list[int] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    continuation_fallback: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


class ResponseBody(GenerationBody, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    truncation: str | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Advisory
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None


class InputBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoints have in common that compute prompts and generate nothing."""

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    # Advisory
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None


class HiddenStatesBody(InputBody, frozen=True, kw_only=True):
    input: PromptField | None = None
    stack: str | None = None
    layers: LayersField | None = None
    positions: PositionsField | None = None
    pooling: str | None = None
    dtype: str | None = None
    encoding_format: str | None = None

    request_id: str | None = None
    store: bool | None = None
    retain: bool | dict[str, Any] | None = None
    continuation_of: str | None = None
    continuation_at: int | str | None = None
    continuation_choice: int | None = None
    continuation_suffix: str | None = None
    continuation_token_ids: list[int] | None = None
    continuation_fallback: str | list[int] | None = None


class EmbeddingsBody(InputBody, frozen=True, kw_only=True):
    input: InputField | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_FLAT_OBJECTS = frozenset({"stream_options", "logit_bias"})
_KINDS = {str: "str", bool: "bool", int: "int", float: "float", list: "array", dict: "object", type(None): "null"}
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)` - at `\$(?P<path>[^`]*)`$", re.DOTALL)
_COMPLAINT = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?$")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    if not data.strip():
        raise ApiError(400, "invalid_json", "The body is empty; send a JSON object.")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {why_malformed(error)}.") from None
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
    wanted = [_WORDS.get(name, name) for name in match["want"].split(" | ") if name != "null"]
    found, value = _lookup(fields, path)
    got = describe(value) if found else _WORDS.get(match["got"], match["got"])
    return ApiError(400, "invalid_type", f"`{param}` must be {' or '.join(wanted)}, not {got}.", param=param)


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
