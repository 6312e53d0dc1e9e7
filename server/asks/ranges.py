"""Numbers that clients send: whether they are within their ranges, and agree with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten

_AT_ONCE = 1 << 16  # ids that are compared together
MAX_TIMEOUT = 7 * 86400.0
_Value = TypeVar("_Value")


def between(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        shown = f"{value:g}" if isinstance(value, float) else shorten(str(value))  # an integer has any size
        raise invalid(f"`{param}` must be between {low:g} and {high:g}, not {shown}.", param)


def agreed(param: str, value: _Value | None, other: str, others: _Value | None) -> tuple[str, _Value | None]:
    """What two fields of one meaning say, and the field that says it. One that would be ignored is told of."""
    if value is None:
        return other, others
    if others is not None and others != value:
        raise invalid(
            f"`{param}` ({shorten(str(value))}) and `{other}` ({shorten(str(others))}) mean the same, but differ: send "
            "one of them.",
            param,
        )
    return param, value


def check_ids(ids: Sequence[int], vocab_size: int, param: str, hint: str = "") -> Sequence[int]:
    """The ids, if all are in the vocabulary. `hint` follows the complaint."""
    for start in range(0, len(ids), _AT_ONCE):  # in pieces, since each holds the interpreter
        piece = ids if len(ids) <= _AT_ONCE else ids[start : start + _AT_ONCE]
        if min(piece) >= 0 and max(piece) < vocab_size:
            continue
        index, wrong = next((i, t) for i, t in enumerate(piece, start) if not 0 <= t < vocab_size)
        raise invalid(
            f"`{param}[{index}]` is {shorten(str(wrong))}, which is not a token id of this model (0 to "
            f"{vocab_size - 1}).{hint}",
            f"{param}[{index}]",
        )
    return ids


def timeout_seconds(value: float | None, keys: float | None) -> float | None:
    """What a request asks for, or its key's own: the most that the key may have."""
    most = MAX_TIMEOUT if keys is None else keys
    if value is not None and not 0 < value <= most:
        where = "" if keys is None else " with this key"
        raise invalid(f"`timeout` must be above 0 and at most {most:g} seconds{where}, not {value:g}.", "timeout")
    return keys if value is None else value


def priority(value: int | None, least: int) -> int:
    """`least` is what the key may claim; who claims nothing gets the default, or that if it comes later."""
    number = max(0, least) if value is None else value
    if not least <= number < 2**31:
        raise invalid(
            f"`priority` must be at least {least} for this key and below {2**31}, not {shorten(str(number))}; "
            "lower is earlier.",
            "priority",
        )
    return number
