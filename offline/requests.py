"""Arguments of LLM's methods → fields of bodies, one body for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from bequest.offline.answers import Completion
from bequest.offline.errors import RequestError
from bequest.offline.params import SamplingParams, plain

Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
Prompts: TypeAlias = Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[int]]
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


def is_single(prompts: Any) -> bool:
    """A text, an object, or a list of tokens; else they are many."""
    if hasattr(prompts, "ndim"):  # numpy's and torch's: a row is a list of tokens
        return bool(prompts.ndim < 2)
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def is_single_chat(messages: Any) -> bool:
    """A text, or a list of messages; else they are many."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        return True
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def completion_fields(prompts: Any, params: Params, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = [prompts] if is_single(prompts) else list(prompts)
    common = _common(options, len(given))
    return [
        {"prompt": plain(prompt, "prompt"), **_sampling(own), **common}
        for prompt, own in zip(given, _each(params, len(given)), strict=True)
    ]


def stream_fields(prompt: Any, params: Params, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of one prompt. No prompt at all is refused with the others that are empty."""
    if not is_single(prompt) and len(prompt) > 0:
        message = f"`prompt` is a list of {len(prompt)} prompts, and a stream is of one: call `stream` with each."
        raise RequestError(message, "invalid_value", "prompt", {})
    [body] = completion_fields([prompt], params, options)
    return body


def chat_fields(messages: Any, params: Params, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = [messages] if is_single_chat(messages) else list(messages)
    common = _common(options, len(given))
    return [
        {"messages": _messages(one), **_chat_sampling(own), **common}
        for one, own in zip(given, _each(params, len(given)), strict=True)
    ]


def input_fields(inputs: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of what generates nothing."""
    given = [inputs] if inputs is None or is_single(inputs) else list(inputs)
    common = _common(options, len(given))
    return [{"input": plain(one, "input"), **common} for one in given]


def beam_fields(
    width: int, n: int | None, length_penalty: float | None, early_stopping: bool | str | None
) -> dict[str, Any]:
    """Beside the prompt and its parameters. All beams are given back, unless `n` says how many."""
    fields = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    return {"use_beam_search": True, "beam_width": width, "n": width if n is None else n, **fields}


def reference_of(parent: Any) -> Any:
    """The id of an answer that is continued."""
    return parent.id if isinstance(parent, Completion) else parent


def _common(options: Mapping[str, Any], count: int) -> dict[str, Any]:
    fields = {name: plain(value, name) for name, value in options.items() if name not in ("continuation_of",)}
    if "continuation_of" in options:
        fields["continuation_of"] = reference_of(options["continuation_of"])
    if "hidden_states" in fields:
        fields["return_hidden_states"] = fields.pop("hidden_states")
    if count > 1 and fields.get("request_id") is not None:
        message = f"`request_id` names a single request, and there are {count} prompts: send each with its own name."
        raise RequestError(message, "invalid_value", "request_id", {})
    return fields


def _each(params: Any, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        _sampling(params)  # says what it is not
    if len(params) != count:
        message = f"`params` must be one for all, or one for each of the {count} prompts, not {len(params)}."
        raise RequestError(message, "invalid_value", "params", {})
    return list(params)


def _sampling(params: Any) -> dict[str, Any]:
    if not isinstance(params, SamplingParams):
        message = f"`params` must be SamplingParams, not {type(params).__name__}."
        raise RequestError(message, "invalid_type", "params", {})
    return params.given()


def _chat_sampling(params: Any) -> dict[str, Any]:
    """Chat has two fields for log-probabilities."""
    fields = _sampling(params)
    if "logprobs" in fields:
        fields["top_logprobs"] = fields["logprobs"]
        fields["logprobs"] = True
    return fields


def _messages(given: Any) -> Any:
    return plain([{"role": "user", "content": given}] if isinstance(given, str) else given, "messages")


def continued_fields(
    parent: Completion, more: Any, params: SamplingParams | None, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Of a request that goes on behind `parent`; a chat goes on with messages, and with its own answer if there are
    none."""
    options = {**options, "continuation_of": parent}
    if not parent.is_chat:
        return completion_fields([more], params, options)
    return chat_fields([more or []], params, options)
