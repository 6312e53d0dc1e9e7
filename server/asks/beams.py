"""`use_beam_search`: the fields of a search, and those that cannot be used beside it."""

from __future__ import annotations

from typing import Any, Literal

from bequest.engine.types import MAX_BEAM_WIDTH, BeamParams
from bequest.server.wire.bodies import GenerationBody
from bequest.server.wire.errors import invalid, unsupported
from bequest.server.wire.reading import shorten

# A longest text of a million tokens to this power is still a float32.
LARGEST_LENGTH_PENALTY = 5.0

# What belongs to sampling, and the values that ask for nothing. A seed asks for the same answer again: beams give that.
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "bad_words": ([],),
    "stop": ([],),
    "stream": (False,),
}
# Without a search, the values that ask for nothing.
_ONLY_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "beam_width": (),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}


def beam_params(body: GenerationBody) -> BeamParams | None:
    """The search that a body asks for, once its other fields are known to agree with that."""
    if not body.use_beam_search:
        _check_no_search(body)
        return None
    for name, idle in _NOT_WITH_BEAMS.items():
        value = getattr(body, name)
        if value is not None and value not in idle:
            raise unsupported(name, f"`{name}` cannot be used with `use_beam_search`. Leave it out.")
    if body.temperature not in (None, 0, 1):
        raise invalid(
            f"`temperature` must be 0 or 1, or be left out, with `use_beam_search`, not {body.temperature:g}: a search "
            "does not sample.",
            "temperature",
        )
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not abs(penalty) <= LARGEST_LENGTH_PENALTY:
        most = f"{LARGEST_LENGTH_PENALTY:g}"
        raise invalid(f"`length_penalty` must be between -{most} and {most}, not {penalty:g}.", "length_penalty")
    return BeamParams(_width(body), penalty, _early_stopping(body.early_stopping))


def _check_no_search(body: GenerationBody) -> None:
    for name, idle in _ONLY_WITH_BEAMS.items():
        value = getattr(body, name)
        if value is not None and value not in idle:
            raise invalid(f"`{name}` needs `use_beam_search: true`.", name)
    # It would compute choices and throw them away; as many as are returned asks for nothing.
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of", "`best_of` needs beam search (`use_beam_search`); ask for more choices with `n`.")


def _width(body: GenerationBody) -> int:
    n = 1 if body.n is None else body.n
    given = {name: value for name in ("beam_width", "best_of") if (value := getattr(body, name)) is not None}
    if len(set(given.values())) > 1:
        raise invalid("`beam_width` and `best_of` mean the same here, but differ: send one of them.", "best_of")
    name, width = next(iter(given.items()), ("n", n))
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise invalid(f"`{name}` must be between 1 and {MAX_BEAM_WIDTH}, not {shorten(str(width))}.", name)
    if width < n:
        raise invalid(f"`{name}` must be at least `n` ({n}), the beams that are returned, not {width}.", name)
    return width


def _early_stopping(given: bool | str | None) -> Literal[True, False, "never"]:
    if given is None or given is False:
        return False
    if given is True:
        return True
    if given == "never":
        return "never"
    raise invalid(f'`early_stopping` must be true, false or "never", not {shorten(repr(given))}.', "early_stopping")
