"""Request bodies, as types. server/wire/reading.py makes them of bytes.

`null` is the same as absent for every field, so every field is optional here; who needs one asks for it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # advisory: padding against traffic analysis
    continuous_usage_stats: bool = False  # vLLM's: every chunk tells the usage so far


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


# `structured_outputs`, of which one of the first five says what the answer is (server/asks/constraints.py).
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
STRUCTURED_FIELDS = (
    *STRUCTURED_KINDS,
    "disable_additional_properties",
    "disable_any_whitespace",
    "whitespace_pattern",
    "disable_fallback",  # advisory: there is nothing to fall back to
    "structural_tag",  # refused
)


SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")  # OpenAI's: its list is closed


class SampledBody(msgspec.Struct, frozen=True, kw_only=True):
    """What all have that sample an answer: completions, chats and responses."""

    model: str | None = None
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    return_tokens_as_token_ids: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None

    structured_outputs: dict[str, Any] | None = None
    speculation: bool | dict[str, Any] | None = None
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


class GenerationBody(SampledBody, frozen=True, kw_only=True):
    """What completions and chat have in common, and responses have not."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None

    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool = False

    use_beam_search: bool = False
    beam_width: int | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    catalogue: str | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None  # llama.cpp's names of two of `structured_outputs`
    grammar: str | None = None
    return_hidden_states: bool | GeneratedStates | None = None

    continuation_of: str | None = None
    continuation_at: int | str | None = None
    continuation_choice: int | None = None
    continuation_suffix: str | None = None
    continuation_token_ids: list[int] | None = None


# A string, a list of token ids, or a list of either.
InputField = str | list[int | str | list[int]]
# The same, and objects (server/asks/prompt_forms.py).
PromptField = str | dict[str, Any] | list[int | str | list[int] | dict[str, Any]]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: PromptField | None = None
    prompt_embeds: str | list[str] | None = None
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = None
    continuation_fallback: str | list[int] | None = None
    continuation_suffixes: list[str | list[int]] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    continuation_fallback: list[dict[str, Any]] | None = None
    prediction: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    include_reasoning: bool = True
    mm_processor_kwargs: dict[str, Any] | None = None


class ResponseBody(SampledBody, frozen=True, kw_only=True):
    background: bool = False
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
    truncation_side: str | None = None
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
    input: PromptField | None = None  # objects are texts with images (server/states/inputs.py)
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None

    # In place of `input`: one conversation
    messages: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None


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
    mm_processor_kwargs: dict[str, Any] | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)
