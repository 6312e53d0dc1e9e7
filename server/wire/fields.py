"""The classes of body fields: honoured and advisory (members of the typed bodies), refused, ignored, and near misses.

A refused field may still be sent with a value that asks for nothing. A field in no class is ignored and named in a
response header, unless it is nearly a name of ours: then the client meant us, and must know that we did not hear.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote

import msgspec

from bequest.server.wire import bodies, reading
from bequest.server.wire.errors import ApiError, unsupported

IGNORED_HEADER = "X-Bequest-Ignored"
_MOST_NAMED = 32  # of ignored fields, so that the header stays a header

# Refused fields and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
_GENERATION = "it belongs to /v1/completions and /v1/chat/completions"
_CHAT = "it belongs to /v1/chat/completions"
_BACKGROUND: dict[str, tuple[tuple[Any, ...], str]] = {"background": ((False,), "it belongs to /v1/responses")}
# OpenAI's older names.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "function_call": (("none", "auto"), "use `tool_choice`"),
    "functions": (([],), "use `tools`"),
}
_SUFFIXES: dict[str, tuple[tuple[Any, ...], str]] = {"continuation_suffixes": (([],), "it belongs to /v1/completions")}
# What the endpoints that generate nothing refuse.
_NO_GENERATION: dict[str, tuple[tuple[Any, ...], str]] = {
    **_SUFFIXES,
    "include_prompt": ((), "all positions are the prompt's"),
    "max_completion_tokens": ((0,), _GENERATION),
    "max_tokens": ((0,), _GENERATION),
    "messages": (([],), "it takes `input`: text or token ids"),
    "n": ((1,), _GENERATION),
    "prediction": ((), _CHAT),
    "prompt": (("", []), "it takes `input`"),
    "return_hidden_states": ((False,), _GENERATION),
    "stream": ((False,), "the answer comes whole"),
    "stream_options": ((), "the answer comes whole"),
}
# Fields of one endpoint that the other refuses, and what to use there.
_ELSEWHERE: dict[type[msgspec.Struct], dict[str, tuple[tuple[Any, ...], str]]] = {
    bodies.CompletionBody: {
        **_BACKGROUND,
        "messages": (([],), "completions take `prompt`; messages go to /v1/chat/completions"),
        "top_logprobs": ((0,), "in completions `logprobs` is the number of alternatives"),
        "chat_template": ((), _CHAT),
        "continue_final_message": ((False,), _CHAT),
        "prediction": ((), _CHAT),
        "tool_choice": (("none", "auto"), _CHAT),
        "tools": (([],), _CHAT),
    },
    bodies.ChatBody: {
        **_SUFFIXES,
        **_BACKGROUND,
        **_FUNCTIONS,
        "echo": ((False,), "it belongs to /v1/completions"),
        "suffix": (("",), "it belongs to /v1/completions"),
        "prompt": (("", []), "chat takes `messages`; a prompt goes to /v1/completions"),
    },
    bodies.ResponseBody: {
        **_SUFFIXES,
        **_FUNCTIONS,
        "add_special_tokens": ((False,), "the chat template writes the special tokens"),
        **dict.fromkeys(("beam_width", "catalogue"), ((), _GENERATION)),
        "best_of": ((1,), _GENERATION),
        **dict.fromkeys(
            ("continuation_of", "continuation_suffix", "continuation_token_ids", "continuation_fallback"),
            (("", []), "a response continues another by `previous_response_id`"),
        ),
        "continuation_at": (("end",), "a response continues the end of another"),
        "continuation_choice": ((0,), "a response is one answer"),
        "conversation": ((), "this server keeps no conversations; use `previous_response_id`"),
        "early_stopping": ((False,), _GENERATION),
        "echo": ((False,), "it belongs to /v1/completions"),
        "grammar": (("",), "use `structured_outputs.grammar`"),
        "json_schema": ((), "use `text.format`"),
        "length_penalty": ((1.0,), _GENERATION),
        "logprobs": ((False,), 'use `include: ["message.output_text.logprobs"]`'),
        "max_completion_tokens": ((), "use `max_output_tokens`"),
        "max_tokens": ((), "use `max_output_tokens`"),
        "messages": (([],), "responses take `input`; messages go to /v1/chat/completions"),
        "n": ((1,), "a response is one answer"),
        "prediction": ((), _CHAT),
        "prompt": (("", []), "this server keeps no prompts; send `instructions` and `input`"),
        "prompt_logprobs": ((), _GENERATION),
        "response_format": (({"type": "text"},), "use `text.format`"),
        "return_hidden_states": ((False,), _GENERATION),
        "return_token_ids": ((False,), _GENERATION),
        "suffix": (("",), "it belongs to /v1/completions"),
        "truncate_prompt_tokens": ((), "use `truncation`"),
        "truncation_side": ((), "use `truncation`"),
        "use_beam_search": ((False,), _GENERATION),
    },
    bodies.HiddenStatesBody: {
        **_NO_GENERATION,
        "dimensions": ((), "it belongs to /v1/embeddings"),
        "normalize": ((False,), "it belongs to /v1/embeddings"),
    },
    bodies.EmbeddingsBody: {
        **{name: rule for name, rule in _NO_GENERATION.items() if name != "messages"},
        **dict.fromkeys(("continuation_of", "dtype", "layers", "positions"), ((), "it belongs to /v1/hidden_states")),
        "retain": ((False,), "embeddings leave no record"),
    },
}
# What an endpoint refuses and yet has names for: who slips in one of them is told, as with a name that it takes.
_KIN: dict[type[msgspec.Struct], frozenset[str]] = {
    bodies.ResponseBody: frozenset(bodies.GenerationBody.__struct_fields__)
}
# Names that other servers, or our own documents, have for something of ours.
_ALIASES = {
    "beam_size": "beam_width",
    "catalog": "catalogue",
    "continue_from": "continuation_of",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "hidden_states": "return_hidden_states",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_beams": "beam_width",
    "output_hidden_states": "return_hidden_states",
    "parent": "continuation_of",
    "parent_id": "continuation_of",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
_MOST_COMPARED = 16  # of unknown names in a body: comparing takes a quarter of a millisecond, while others wait
_LONGEST_NAME = 64  # that could be meant for one of ours
_NEAR = 0.85  # of difflib's ratio: one slip in a short name, two in a long one (`top_a` is not a slip of `top_k`)

# The names of objects inside of bodies, and of objects inside of those; None: what is in there has names of its own.
Shape = dict[str, "Shape | None"]
_FUNCTION: Shape = dict.fromkeys(("name", "description", "parameters", "strict"))
_SCHEMA: Shape = dict.fromkeys(("name", "description", "schema", "strict"))
_NESTED_TOOL: Shape = {"type": None, "function": _FUNCTION}
_NAMED_TOOL: Shape = {"type": None, "function": {"name": None}}
_GENERATION_SHAPE: Shape = {
    "stream_options": dict.fromkeys(bodies.StreamOptions.__struct_fields__),
    "response_format": {"type": None, "json_schema": _SCHEMA, "schema": None},
}
_SHAPES: dict[type[msgspec.Struct], Shape] = {
    bodies.CompletionBody: _GENERATION_SHAPE,
    bodies.ChatBody: {
        **_GENERATION_SHAPE,
        "tools": _NESTED_TOOL,
        "tool_choice": {
            **_NAMED_TOOL,
            "allowed_tools": {"mode": None, "tools": _NAMED_TOOL},
        },
    },
    bodies.ResponseBody: {
        **_GENERATION_SHAPE,
        "text": {"format": {"type": None, **_SCHEMA}, "verbosity": None},
        "tools": {"type": None, **_FUNCTION},
        "tool_choice": {"type": None, "name": None, "mode": None, "tools": {"type": None, "name": None}},
    },
    bodies.TokenizeBody: {"tools": _NESTED_TOOL},
}
# Objects whose names are ours, and other engines', alone: one that is not known was meant for us.
_OURS: dict[str, tuple[str, ...]] = {
    "return_hidden_states": bodies.GeneratedStates.__struct_fields__,
    "structured_outputs": bodies.STRUCTURED_FIELDS,
}


@dataclass(frozen=True)
class Rules:
    """What is peculiar to the fields of one body. A door's body has its own as the class variable `rules`."""

    elsewhere: Mapping[str, tuple[tuple[Any, ...], str]] = field(
        default_factory=dict
    )  # refused: idle values, the way out
    shape: Shape = field(default_factory=dict)  # of objects inside of it
    kin: frozenset[str] = frozenset()  # names that are not its own, and yet are ours


@cache
def _rules_of(body: type[msgspec.Struct]) -> tuple[Rules, frozenset[str]]:
    """Its rules, and the names of its fields."""
    own: Rules | None = getattr(body, "rules", None)
    rules = own or Rules(_ELSEWHERE.get(body, {}), _SHAPES.get(body, {}), _KIN.get(body, frozenset()))
    return rules, frozenset(body.__struct_fields__)


def read(raw: dict[str, Any], body: type[bodies.Body]) -> tuple[bodies.Body, list[str]]:
    """The typed body, and the names of the fields that were ignored."""
    rules, known = _rules_of(body)
    ignored: list[str] = []
    for name, value in raw.items():
        elsewhere = rules.elsewhere.get(name)
        if name in known and elsewhere is None:
            continue
        if elsewhere is not None or name in _REFUSED:
            _refuse_unless_idle(name, value, *(elsewhere or (_REFUSED[name], "")))
        elif meant := _near_miss(name, known | _REFUSED.keys() | rules.kin, len(ignored) < _MOST_COMPARED):
            message = f"`{reading.shorten(name)}` is not a parameter of this endpoint; did you mean `{meant}`?"
            raise ApiError(400, "unknown_parameter", message, param=reading.shorten(name))
        else:
            ignored.append(name)
    for name in _OURS.keys() & raw.keys() & known:
        _check_ours(name, raw[name])
    for name, shape in rules.shape.items():
        if name in raw and shape is not None:
            _note_ignored(raw[name], shape, name, ignored)
    return reading.convert(raw, body), ignored


def _check_ours(holder: str, given: Any) -> None:
    known = _OURS[holder]
    for name in given if isinstance(given, dict) else ():
        if name not in known and given[name] is not None:
            message = f"`{holder}` has no field {reading.shorten(repr(name))}; it has {', '.join(known)}."
            raise ApiError(400, "unknown_parameter", message, param=f"{holder}.{reading.shorten(name)}")


def _note_ignored(given: Any, shape: Shape, path: str, ignored: list[str]) -> None:
    """Adds the paths of what nobody will read, as with the fields of the body itself."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            _note_ignored(item, shape, f"{path}[{index}]", ignored)
    elif isinstance(given, dict):
        for name, value in given.items():
            inner, place = shape.get(name), f"{path}.{reading.shorten(name)}"
            if inner is not None:
                _note_ignored(value, inner, place, ignored)
            elif name in shape or value is None:
                continue
            elif meant := _near_miss(name, shape, len(ignored) < _MOST_COMPARED):
                message = f"`{path}` has no field {reading.shorten(repr(name))}; did you mean `{meant}`?"
                raise ApiError(400, "unknown_parameter", message, param=place)
            else:
                ignored.append(place)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Names are the client's, so they are quoted before they enter a header."""
    given = list(names)
    if not given:
        return {}
    quoted = [quote(reading.shorten(name), safe="[]():@!$*+/", errors="replace") for name in given[:_MOST_NAMED]]
    if len(given) > _MOST_NAMED:
        quoted.append(f"and-{len(given) - _MOST_NAMED}-more")
    return {IGNORED_HEADER: ", ".join(quoted)}


def _refuse_unless_idle(name: str, value: Any, idle: tuple[Any, ...], hint: str) -> None:
    if any((type(value) is type(default) and value == default) or _same_number(value, default) for default in idle):
        return
    reason = hint or "this server does not support it"
    raise unsupported(name, f"`{name}` cannot be used here: {reason}. Leave it out.")


def _same_number(value: Any, default: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(default, int | float)
    return numbers and not isinstance(value, bool) and not isinstance(default, bool) and value == default


def _near_miss(name: str, known: Collection[str], compare: bool) -> str | None:
    """The name of ours that was probably meant; `compare`: also one that merely looks like it."""
    if len(name) > _LONGEST_NAME:
        return None
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    if _ALIASES.get(plain) in known:
        return _ALIASES[plain]
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=1, cutoff=_NEAR) if compare else []
    return close[0] if close else None
