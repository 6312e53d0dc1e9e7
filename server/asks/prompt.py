"""A prompt as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bequest.engine.types import Lineage
from bequest.engine.types.encoder import EncoderInput
from bequest.server.asks import sampling
from bequest.server.wire.bodies import GenerationBody
from bequest.server.wire.errors import invalid


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, and where it comes from."""

    token_ids: tuple[int, ...]
    text: str = ""  # what `echo` gives back
    lineage: Lineage | None = None  # of a continuation, even if nothing of its parent is in it
    cache_salt: str = ""  # the parent's
    origin: object = None  # what the tokens were made from, for whoever continues
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose decoder's prompt is `token_ids`
    param: str | None = None  # the field that `token_ids` came in, where it is not `prompt`


def truncated(ids: Sequence[int], body: GenerationBody, max_model_len: int) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` of a prompt; -1 keeps what leaves room for the completion."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tuple(ids)
    if keep == -1:
        asked = sampling.max_tokens(body)
        keep = max(max_model_len - (1 if asked is None else asked), 1)
    if not 1 <= keep <= max_model_len:
        raise invalid(
            f"`truncate_prompt_tokens` must be from 1 to {max_model_len}, or -1 for what fits, not {keep}.",
            "truncate_prompt_tokens",
        )
    return tuple(ids[-keep:])


def check_not_empty(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise invalid(f"`{param}` is empty: there is no token to begin from.", param)
    return prompt
