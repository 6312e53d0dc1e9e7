"""Log-probabilities in the three shapes clients know: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.types import TokenLogprob
from server.interfaces import TokenizerLike

VERY_UNLIKELY = -9999.0  # stands for -inf, which JSON cannot say


class Spelling:
    """How tokens are shown: as text, or as `token_id:N` where clients want them unambiguous."""

    def __init__(self, tokenizer: TokenizerLike, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def length(self, token_id: int) -> int:
        """Characters of the token's text, however it is shown."""
        return len(self._tokenizer.token_text(token_id))

    def bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    return logprob if logprob > VERY_UNLIKELY else VERY_UNLIKELY


def finite_sum(logprob: float) -> float:
    """Of many tokens: it may well lie below what stands for -inf."""
    return logprob if math.isfinite(logprob) else VERY_UNLIKELY


def chat_logprobs(logprobs: Sequence[TokenLogprob], spelling: Spelling) -> dict[str, Any]:
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, spelling),
            "top_logprobs": [_chat_token(token_id, logprob, spelling) for token_id, logprob in entry.top],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    return {"token": spelling.token(token_id), "logprob": finite(logprob), "bytes": spelling.bytes(token_id)}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None], token_ids: Sequence[int], top: int, spelling: Spelling, offset: int
) -> dict[str, Any]:
    """Parallel lists over tokens. None is the first token of a prompt, which nothing predicts.

    `top` is how many alternatives are shown (a prompt's entries may hold more); `offset` is where the first
    token's text begins in the whole text of the choice.
    """
    tokens = [spelling.token(token_id) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += spelling.length(token_id)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [None if entry is None else _alternatives(entry, top, spelling) for entry in logprobs],
        "text_offset": offsets,
    }


def _alternatives(entry: TokenLogprob, top: int, spelling: Spelling) -> dict[str, float]:
    """The best tokens and the sampled one. Two tokens with one spelling share a key: the likelier keeps it."""
    shown: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
        shown.setdefault(spelling.token(token_id), finite(logprob))
    return shown


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob | None], top: int, tokenizer: TokenizerLike
) -> list[dict[str, Any] | None]:
    """For each prompt token, by token id: log-probability, rank and text of the token and of the best ones."""
    return [None if entry is None else _prompt_entry(entry, top, tokenizer) for entry in logprobs]


def _prompt_entry(entry: TokenLogprob, top: int, tokenizer: TokenizerLike) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:top], 1)]
    shown: dict[str, Any] = {}
    for token_id, logprob, rank in ranked:
        text = tokenizer.token_text(token_id)
        shown.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": text})
    return shown
