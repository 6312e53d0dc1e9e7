"""The forms a prompt comes in: text, tokens, an object that says which of the two it is, or one prompt for the encoder
and one for the decoder. Pure: nothing is tokenised here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bequest.server.wire.errors import ApiError, invalid, missing
from bequest.server.wire.reading import describe, shorten

Given = str | list[int]
MAX_PROMPTS = 4096  # of one request, as many as may wait unless the server is told otherwise
_KINDS = ("prompt", "prompt_token_ids")
_PAIR = ("encoder_prompt", "decoder_prompt")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text or token ids, and the field they are in."""

    given: Given
    param: str


@dataclass(frozen=True, slots=True)
class Form:
    """One prompt. Of an encoder-decoder model `prompt` goes to the encoder."""

    prompt: Piece
    decoder: Piece | None = None
    is_pair: bool = False  # the client named an encoder prompt


def read_forms(given: Any, name: str) -> list[Form]:
    """The prompts `given` in the field `name`: one, or a list of them in any mix."""
    if given is None:
        raise missing(name, f"`{name}` is missing: send a string, a list of token ids, or a list of either.")
    if isinstance(given, str | dict) or (len(given) > 0 and _are_ids(given)):
        return [_form(given, name)]
    if not given:
        raise invalid(f"`{name}` is an empty list; send at least one token or string.", name)
    if len(given) > MAX_PROMPTS:
        raise invalid(
            f"`{name}` may hold {MAX_PROMPTS} prompts at most, not {len(given)}: send several requests.", name
        )
    return [_form(item, f"{name}[{index}]") for index, item in enumerate(given)]


def _are_ids(items: list[Any]) -> bool:
    """Kinds are looked at, not items: a prompt of token ids has thousands of them, and the event loop reads it."""
    return all(issubclass(kind, int) for kind in set(map(type, items)))


def _form(item: Any, param: str) -> Form:
    if isinstance(item, int):
        raise ApiError(400, "invalid_type", f"`{param}` is a bare token id among other prompts.", param=param)
    if not isinstance(item, dict):
        return Form(Piece(item, param))
    fields = {key: value for key, value in item.items() if value is not None}
    if not fields.keys() & {*_PAIR}:
        return Form(_kind(fields, param, (*_KINDS, *_PAIR)))
    _check_names(fields, param, _PAIR)
    if "encoder_prompt" not in fields:
        name = f"{param}.encoder_prompt"
        raise missing(name, f"`{name}` is missing: a `decoder_prompt` continues what an encoder has read.")
    pieces = {name: _piece(value, f"{param}.{name}") for name, value in fields.items()}
    return Form(pieces["encoder_prompt"], pieces.get("decoder_prompt"), is_pair=True)


def _piece(value: Any, param: str) -> Piece:
    if isinstance(value, dict):
        return _kind({key: inner for key, inner in value.items() if inner is not None}, param, _KINDS)
    return Piece(_checked(value, param), param)


def _kind(fields: dict[str, Any], param: str, known: tuple[str, ...]) -> Piece:
    """An object with `prompt` or `prompt_token_ids`."""
    _check_names(fields, param, known)
    if len(fields) != 1:
        stated = "both" if fields else "neither"
        raise invalid(f"`{param}` must have either `prompt` or `prompt_token_ids`; it has {stated}.", param)
    [(name, value)] = fields.items()
    if name == "prompt_token_ids" and isinstance(value, str):
        raise _wrong_type(value, f"{param}.{name}", "a list of token ids")
    return Piece(_checked(value, f"{param}.{name}"), f"{param}.{name}")


def _checked(value: Any, param: str) -> Given:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong_type(value, param, "a string or a list of token ids")
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise _wrong_type(token, f"{param}[{index}]", "a token id")
    return value


def _wrong_type(value: Any, param: str, wanted: str) -> ApiError:
    return ApiError(400, "invalid_type", f"`{param}` must be {wanted}, not {describe(value)}.", param=param)


def _check_names(fields: dict[str, Any], param: str, known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            wrong = f"{param}.{shorten(name)}"
            choices = ", ".join(f"`{choice}`" for choice in known)
            raise ApiError(400, "unknown_parameter", f"`{wrong}` is not known here; there are {choices}.", param=wrong)
