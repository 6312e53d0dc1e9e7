"""A prompt as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bequest.engine.types import Lineage
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.image import Image, without_images
from bequest.server.wire.errors import invalid
from bequest.server.wire.reading import shorten


class Prompt(msgspec.Struct, frozen=True):
    """A tokenised prompt, and where it comes from."""

    token_ids: tuple[int, ...]
    text: str = ""  # what `echo` gives back
    lineage: Lineage | None = None  # of a continuation, even if nothing of its parent is in it
    cache_salt: str = ""  # the parent's
    origin: object = None  # what the tokens were made from, for whoever continues
    adapter: AdapterRef | None = None  # the parent's
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose decoder's prompt is `token_ids`
    images: tuple[Image, ...] = ()  # whose ids are among `token_ids`
    param: str | None = None  # the field that `token_ids` came in, where it is not `prompt`

    @property
    def said_ids(self) -> tuple[int, ...]:
        """Without its images."""
        return without_images(self.token_ids) if self.images else self.token_ids


class Truncation(msgspec.Struct, frozen=True):
    """`truncate_prompt_tokens`: so many tokens are kept, the last ones unless `truncation_side` is the right; -1 keeps
    what leaves room for the completion."""

    keep: int | None = None
    completion: int = 1  # tokens that -1 leaves room for
    side: str | None = None  # where tokens are left out

    def of_prompt(self, ids: Sequence[int], max_model_len: int) -> tuple[int, ...]:
        return tuple(self._cut(ids, max_model_len, max(max_model_len - self.completion, 1)))

    def of_encoder(self, ids: Sequence[int], max_len: int) -> Sequence[int]:
        """An encoder has its room to itself."""
        return self._cut(ids, max_len, max_len)

    def _cut(self, ids: Sequence[int], most: int, fitting: int) -> Sequence[int]:
        if self.side not in (None, "left", "right"):
            given = shorten(repr(self.side))
            raise invalid(f"`truncation_side` must be 'left' or 'right', not {given}.", "truncation_side")
        kept = len(ids) if self.keep is None else self._kept(self.keep, most, fitting)
        return ids[:kept] if self.side == "right" else ids[max(len(ids) - kept, 0) :]

    def _kept(self, asked: int, most: int, fitting: int) -> int:
        keep = fitting if asked == -1 else asked
        if not 1 <= keep <= most:
            raise invalid(
                f"`truncate_prompt_tokens` must be from 1 to {most}, or -1 for what fits, not {keep}.",
                "truncate_prompt_tokens",
            )
        return keep


def check_not_empty(prompt: Prompt, param: str) -> Prompt:
    """The prompt, which knows its field from then on."""
    if not prompt.token_ids:
        raise invalid(f"`{param}` is empty: there is no token to begin from.", param)
    return prompt if param == "prompt" else msgspec.structs.replace(prompt, param=param)
