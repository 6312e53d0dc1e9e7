"""Which hidden states a client asks for: layers, positions, pooling, dtype, encoding; and whether they fit.

Everything a client can get wrong is found here, before anything is submitted, so that errors name the client's field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from bequest.engine.errors import InvalidRequest
from bequest.engine.types import ModelInfo, Request
from bequest.engine.types.hidden import (
    HiddenStatesParams,
    Pooling,
    Positions,
    Span,
    Stack,
    StatesDType,
    most_positions,
    resolve_layers,
    select_positions,
)
from bequest.engine.types.states import ITEM_BYTES
from bequest.server.wire.bodies import GeneratedStates, HiddenStatesBody, PositionsField, PositionSpan
from bequest.server.wire.errors import ApiError, at_field, invalid
from bequest.server.wire.reading import shorten

JsonEncoding = Literal["float", "base64"]
Encoding = JsonEncoding | Literal["safetensors"]

_WHOLE: tuple[Encoding, ...] = ("float", "base64", "safetensors")
JSON_ENCODINGS: tuple[JsonEncoding, ...] = ("float", "base64")
_MOST_LAYERS = 1024  # far more than a model has
_POOLINGS: tuple[Pooling, ...] = ("none", "mean", "last")
_STACKS: tuple[Stack, ...] = ("encoder", "decoder")
# Fields of an extraction that mean nothing for an encoder's states, which leave nothing to continue from.
_OF_THE_DECODER = ("continuation_at", "continuation_choice", "continuation_suffix", "continuation_token_ids", "retain")
_Name = TypeVar("_Name", bound=str)


@dataclass(frozen=True, slots=True)
class StatesWish:
    """What is asked for."""

    params: HiddenStatesParams
    encoding: Encoding
    prefix: str = ""  # of the fields' names in errors


def completion_states(given: bool | GeneratedStates | None, info: ModelInfo) -> StatesWish | None:
    """The meaning of `return_hidden_states`; true is the last layer of the last sampled token."""
    if given is None or given is False:
        return None
    options = GeneratedStates() if given is True else given
    prefix = "return_hidden_states."
    stack = _stack(options.stack, info, "decoder", prefix + "stack")
    if stack == "encoder" and options.include_prompt:
        name = prefix + "include_prompt"
        raise invalid(f"`{name}` is of the decoder: positions of the encoder count in what it reads.", name)
    return _wish(options, info, prefix, JSON_ENCODINGS, bool(options.include_prompt), stack)


def prompt_states(body: HiddenStatesBody, info: ModelInfo) -> StatesWish:
    stack = _stack(body.stack, info, _default_stack(body, info), "stack")
    if stack == "encoder":
        for name in _OF_THE_DECODER:
            if getattr(body, name) is not None and getattr(body, name) is not False:
                raise invalid(f"`{name}` is of the decoder, which does not run for the encoder's states.", name)
        if body.continuation_of and body.input:
            raise invalid("`input` would follow in the decoder, whose parent's encoder is asked for.", "input")
    return _wish(body, info, "", _WHOLE, include_prompt=False, stack=stack)


def _default_stack(body: HiddenStatesBody, info: ModelInfo) -> Stack:
    """A plain input is the encoder's; a decoder prompt, or a parent, means the decoder."""
    if info.encoder is None or body.continuation_of:
        return "decoder"
    items = body.input if isinstance(body.input, list) else [body.input]
    begun = [isinstance(item, dict) and item.get("decoder_prompt") is not None for item in items]
    if any(begun) and not all(begun) and body.stack is None:
        raise invalid(
            '`stack` is missing: only some of the inputs have a `decoder_prompt`. Send "encoder" or "decoder".',
            "stack",
        )
    return "decoder" if any(begun) else "encoder"


def _stack(given: str | None, info: ModelInfo, default: Stack, param: str) -> Stack:
    stack = default if given is None else one_of(given, _STACKS, param)
    if stack == "encoder" and info.encoder is None:
        raise invalid(f'`{param}` is "encoder", but this model has none: leave it out, or send "decoder".', param)
    return stack


def _wish(
    options: GeneratedStates | HiddenStatesBody,
    info: ModelInfo,
    prefix: str,
    encodings: tuple[Encoding, ...],
    include_prompt: bool,
    stack: Stack,
) -> StatesWish:
    encoding = one_of(options.encoding_format, encodings, prefix + "encoding_format")
    pooling = one_of(options.pooling, _POOLINGS, prefix + "pooling")
    dtype: StatesDType | None = None
    if options.dtype is not None:
        dtype = one_of(options.dtype, tuple(ITEM_BYTES), prefix + "dtype")
    positions = _positions(options.positions, prefix + "positions")
    layers = _layers(options.layers, info.num_layers_of(stack), prefix + "layers")
    if encoding == "safetensors":
        layers = tuple(dict.fromkeys(layers))  # tensors are named by their layers, and a name is there once
    return StatesWish(HiddenStatesParams(layers, positions, pooling, dtype, include_prompt, stack), encoding, prefix)


def one_of(given: str | None, names: tuple[_Name, ...], param: str) -> _Name:
    """The first name is the default."""
    if given is None:
        return names[0]
    if given not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        raise invalid(f"`{param}` must be one of {listed}, not {shorten(repr(given))}.", param)
    return given


def _layers(given: str | list[int] | None, num_layers: int, param: str) -> tuple[int, ...]:
    if isinstance(given, list) and len(given) > _MOST_LAYERS:
        raise invalid(f"`{param}` may hold {_MOST_LAYERS} layers at most, not {len(given)}.", param)
    if isinstance(given, str) and given not in ("last", "all"):
        raise invalid(f'`{param}` must be "last", "all" or a list of numbers, not {shorten(repr(given))}.', param)
    try:
        return resolve_layers(cast(Literal["last", "all"] | list[int], "last" if given is None else given), num_layers)
    except InvalidRequest as error:
        raise at_field(error, param) from error


def _positions(given: PositionsField | None, param: str) -> Positions:
    if given is None or given == "last":
        return "last"
    if given == "all":
        return "all"
    if isinstance(given, PositionSpan):
        return Span(given.start or 0, given.end)
    if isinstance(given, str):
        raise invalid(
            f'`{param}` must be "last", "all", a list of numbers or {{"start", "end"}}, not {shorten(repr(given))}.',
            param,
        )
    if not given:
        raise invalid(f"`{param}` is an empty list: name at least one position.", param)
    return tuple(given)


# --- whether it can be answered ----------------------------------------------------------------------------------


def check_states(wish: StatesWish, requests: Sequence[Request], info: ModelInfo, budget: int) -> None:
    """Raises if positions are out of reach, or if the answer to all requests would take more than `budget` bytes."""
    wanted = wish.params
    held = vectors = 0
    for request in requests:
        num_prompt, max_tokens = request.states_lens
        _check_positions(wish, num_prompt, max_tokens)
        captured = held_bytes(wanted, request, info)
        # Pooled states of inputs are made as soon as they are there, and what they are made of is given back.
        held = max(held, captured) if wanted.pooling != "none" and request.extracts else held + captured
        vectors += request.params.n * _answer_vectors(wanted, num_prompt, max_tokens)
    needed = max(held, vectors * info.hidden_size * ITEM_BYTES[wanted.dtype or info.states_dtype])
    if needed > budget:
        raise ApiError(
            400,
            "answer_too_large",
            f"The hidden states of this request may take {needed} bytes, but this server holds at most {budget} for "
            "one request (--max-extraction-mb): ask for fewer positions or layers, send fewer inputs at once, or set a "
            "smaller `max_tokens`.",
            param=wish.prefix + "positions",
            details={"budget": budget, "needed": needed},
        )


def held_bytes(wanted: HiddenStatesParams, request: Request, info: ModelInfo) -> int:
    """The most bytes that a request's states take until they are released."""
    return request.most_states * len(wanted.tapped_layers) * info.hidden_size * ITEM_BYTES[info.states_dtype]


def _answer_vectors(params: HiddenStatesParams, num_prompt: int, max_tokens: int) -> int:
    """Vectors of one choice: unlike those that are computed, each as often as it is asked for."""
    if params.pooling != "none":
        return len(params.layers)
    if isinstance(params.positions, tuple):
        return len(params.layers) * len(params.positions)
    return len(params.layers) * most_positions(params, num_prompt, max_tokens)


def _check_positions(wish: StatesWish, num_prompt: int, max_tokens: int) -> None:
    """Of a completion, positions must be within what it can come to; of a prompt, they must be there."""
    params = wish.params
    if max_tokens and not isinstance(params.positions, tuple):
        return
    length = num_prompt if max_tokens == 0 else max_tokens + num_prompt * params.include_prompt
    try:
        select_positions(params.positions, length)
    except InvalidRequest as error:
        raise at_field(error, wish.prefix + "positions") from error
