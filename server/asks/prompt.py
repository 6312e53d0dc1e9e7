"""A prompt as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bequest.engine.types import Lineage
from bequest.engine.types.encoder import EncoderInput
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


@dataclass(frozen=True, slots=True)
class Truncation:
    """`truncate_prompt_tokens`: the last so many tokens are kept; -1 keeps what leaves room for the completion."""

    keep: int | None = None
    completion: int = 1  # tokens that -1 leaves room for

    def of_prompt(self, ids: Sequence[int], max_model_len: int) -> tuple[int, ...]:
        return tuple(ids[-self._kept(max_model_len, max(max_model_len - self.completion, 1)) :])

    def of_encoder(self, ids: Sequence[int], max_len: int) -> Sequence[int]:
        """An encoder has its room to itself."""
        return ids[-self._kept(max_len, max_len) :]

    def _kept(self, most: int, fitting: int) -> int:
        if self.keep is None:
            return 0  # as a slice: all of them
        keep = fitting if self.keep == -1 else self.keep
        if not 1 <= keep <= most:
            raise invalid(
                f"`truncate_prompt_tokens` must be from 1 to {most}, or -1 for what fits, not {keep}.",
                "truncate_prompt_tokens",
            )
        return keep


def check_not_empty(prompt: Prompt, param: str) -> Prompt:
    if not prompt.token_ids:
        raise invalid(f"`{param}` is empty: there is no token to begin from.", param)
    return prompt
