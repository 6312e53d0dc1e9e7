"""Log-probabilities in the three shapes clients know: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Sequence
from typing import Any

from bequest.engine.types import TokenLogprob
from bequest.server.interfaces import TokenizerLike

VERY_UNLIKELY = -9999.0  # stands for -inf, which JSON cannot say
_MOST_BLANKS = 64  # that are looked for before a token: a text whose tokens are spelt otherwise is not searched whole


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

    def __init__(self, tokenizer: TokenizerLike, shows_special: bool, prompt: Sequence[int] = ()) -> None:
        """`prompt`: the tokens that come before, some of which may decide how the first ones are shown."""
        self._tokenizer = tokenizer
        self._hidden: Collection[int] = () if shows_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0
        self._last = next(([token] for token in reversed(prompt) if token not in self._hidden), list[int]())

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Those of an echoed prompt. It shows the special tokens that were sent, but none that were put around it, nor
        the space that some tokenizers put before it."""
        place = self._place_of_bytes if self._tokenizer.spells_bytes else self._place_of_word
        self._last = []
        offsets = [place(token_id, text) for token_id in token_ids]
        self._decoder.reset()
        self._next = len(text)
        return offsets

    def of_answer(self, token_ids: Sequence[int]) -> list[int]:
        if not self._tokenizer.spells_bytes:
            return [self._next if token_id in self._hidden else self._word(token_id) for token_id in token_ids]
        return [
            self._step(b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id))
            for token_id in token_ids
        ]

    def _place_of_bytes(self, token_id: int, text: str) -> int:
        data = self._tokenizer.token_bytes(token_id)
        if token_id in self._tokenizer.special_ids and not text.startswith(data.decode(), self._next):
            data = b""
        if self._next == 0 and data.startswith(b" ") and not text.startswith(" "):
            data = data[1:]
        return self._step(data)

    def _place_of_word(self, token_id: int, text: str) -> int:
        """Found in the text, whose blanks the tokenizer may have dropped."""
        if token_id in self._tokenizer.special_ids:
            return self._next
        piece = self._piece(token_id)
        shown = piece if text.startswith(piece, self._next) else piece.strip()
        begin = text.find(shown, self._next, self._next + len(shown) + _MOST_BLANKS)
        if begin < 0:
            return self._next
        self._next = begin + len(shown)
        return begin + self._blanks_before(token_id, shown)

    def _word(self, token_id: int) -> int:
        """Of a tokenizer whose tokens are shown by what stands before them."""
        piece = self._piece(token_id)
        begin = self._next + self._blanks_before(token_id, piece)
        self._next += len(piece)
        return begin

    def _piece(self, token_id: int) -> str:
        """What a token adds to the text."""
        before = self._tokenizer.decode(self._last, skip_special_tokens=False)
        whole = self._tokenizer.decode([*self._last, token_id], skip_special_tokens=False)
        self._last = [token_id]
        return whole[len(before) :]

    def _blanks_before(self, token_id: int, piece: str) -> int:
        """Those that are not the token's own, but part it from the one before."""
        return 0 if self._tokenizer.token_text(token_id).startswith(" ") else len(piece) - len(piece.lstrip(" "))

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
