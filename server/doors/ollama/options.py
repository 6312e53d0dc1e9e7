"""`options`: what they mean to the sampler, and how long an answer may become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bequest.engine.errors import context_exceeded
from bequest.server.asks.lengths import Length
from bequest.server.doors.ollama.body import Options
from bequest.server.wire.bodies import SampledBody
from bequest.server.wire.errors import ApiError, from_engine, invalid, unsupported
from bequest.server.wire.reading import shorten

# Our names of what has another one there.
_NAMES = {"repetition_penalty": "repeat_penalty"}
# What changes an answer and is not done here, with the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1.0,),
    "typical_p": (1.0,),
    "penalize_newline": (True,),
}


def sampled_by(options: Options) -> SampledBody:
    """What is left open is the model's own, as everywhere, and not Ollama's."""
    for name, idle in _REFUSED.items():
        value = getattr(options, name)
        if value is not None and value not in idle:
            param = f"options.{name}"
            raise unsupported(param, f"`{param}` cannot be used here: this server does not support it. Leave it out.")
    return SampledBody(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repeat_penalty,
    )


@contextmanager
def named_as_sent() -> Iterator[None]:
    """A complaint about a field of the sampler names the option."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        root = error.param.partition("[")[0]
        option = _NAMES.get(root, root)
        if option not in Options.__struct_fields__:
            raise
        param = f"options.{option}{error.param.removeprefix(root)}"
        message = error.message.replace(f"`{error.param}`", f"`{param}`")
        raise ApiError(error.status, error.code, message, param=param, details=error.details) from error


def length_of(options: Options, prompt_len: int) -> Length:
    """Behind a prompt. An answer that is asked to be longer than the window ends where the window does."""
    most = options.num_predict
    if most is not None and most < -2:
        param = "options.num_predict"
        shown = shorten(str(most))
        raise invalid(f"`{param}` must be at least 0, or -1 or -2 for what the window holds, not {shown}.", param)
    most = None if most is not None and most < 0 else most
    window = options.num_ctx
    if window is None:
        return Length(None, "options.num_predict", default=most)
    if prompt_len >= window:
        error, param = from_engine(context_exceeded(prompt_len, 1, window)), "options.num_ctx"
        message = f"{error.message} `{param}` is smaller than the model's own: leave it out."
        raise ApiError(error.status, error.code, message, param=param, details=error.details)
    room = window - prompt_len
    return Length(None, "options.num_predict", default=room if most is None else min(most, room))
