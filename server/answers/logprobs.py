"""Log-probabilities in the three shapes clients know: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Sequence
from typing import Any

from bequest.engine.types import TokenLogprob
from bequest.server.interfaces import TokenizerLike

VERY_UNLIKELY = -9999.0  # stands for -inf, which JSON cannot say


class Spelling:
    """How tokens are shown: as text, or as `token_id:N` where clients want them unambiguous."""

    def __init__(self, tokenizer: TokenizerLike, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


class Offsets:
    """Where tokens begin in the text of a choice, in characters. The bytes of a character may be many tokens, which all
    begin where it does; special tokens that are not shown begin where the next one does."""

    def __init__(self, tokenizer: TokenizerLike, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Those of an echoed prompt. It shows the special tokens that were sent, but none that were put around it, nor
        the space that some tokenizers put before it."""
        offsets = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if token_id in self._tokenizer.special_ids and not text.startswith(data.decode(), self._next):
                data = b""
            if self._next == 0 and data.startswith(b" ") and not text.startswith(" "):
                data = data[1:]
            offsets.append(self._step(data))
        self._decoder.reset()
        self._next = len(text)
        return offsets

    def of_answer(self, token_ids: Sequence[int]) -> list[int]:
        hidden: Collection[int] = () if self._shows_special else self._tokenizer.special_ids
        return [
            self._step(b"" if token_id in hidden else self._tokenizer.token_bytes(token_id)) for token_id in token_ids
        ]

    def _step(self, data: bytes) -> int:
        begun, _ = self._decoder.getstate()
        breaks_off = bool(begun and data) and not 0x80 <= data[0] < 0xC0
        begin = self._next + breaks_off  # what was begun has become one U+FFFD
        self._next += len(self._decoder.decode(data))
        return begin


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
    logprobs: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    top: int,
    spelling: Spelling,
) -> dict[str, Any]:
    """Parallel lists over tokens. None is the first token of a prompt, which nothing predicts. `top` is how many
    alternatives are shown (a prompt's entries may hold more)."""
    return {
        "tokens": [spelling.token(token_id) for token_id in token_ids],
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
