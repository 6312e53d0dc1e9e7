"""Token by token to text, so that a stream shows every character once, whole, and as early as it is known.

What a request sees is defined by its bytes: P of the prompt, O of the output, special tokens left out of both if they
are skipped. The steps and the flush together are the text of P + O without the text that P alone settles. A character
that the prompt began and the output completes thus belongs to the output; U+FFFD appears only where no later token can
mend the bytes.

Why not `tokenizers.decoders.DecodeStream`: it shows the prompt's last tokens again when the prompt ends inside a
character, holds malformed bytes back until valid ones follow, and redecodes everything it holds at each step.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.text.whole_answers import spell_answers

MAX_UTF8_BYTES = 4
# Prompt tokens that give the window its context, and output tokens that may wait for a character to complete.
CONTEXT_TOKENS = 8
MAX_HELD_TOKENS = 4

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """`step(token_id)` gives the text that the token completes, maybe ""; `flush()`, once at the end, what is left.

    `steps(token_ids)` is the text of several steps. `wholes(answers)` is all text of each of several answers, and
    changes nothing. REQUIRES for it: no step was made
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        kind: type[_ByteStream | _WindowStream] = _ByteStream if tokenizer.spelling.exact else _WindowStream
        stream = kind(tokenizer, prompt_token_ids, skip_special_tokens)
        self.step: Callable[[int], str] = stream.step
        self.steps: Callable[[Sequence[int]], str] = stream.steps
        self.flush: Callable[[], str] = stream.flush
        self.wholes: Callable[[Sequence[Sequence[int]]], list[str]] = stream.wholes
        self._stream = stream

    @property
    def inside_character(self) -> bool:
        """Whether the last tokens have begun a character that is not complete."""
        return self._stream.inside_character

    @property
    def settled(self) -> bool:
        """Whether the text of a token that spells whole characters is that of the token alone, from here on."""
        return self._stream.settled


class _ByteStream:
    """For tokens with exact bytes: an incremental UTF-8 decoder, well under a microsecond per token."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.bytes_by_id
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")
        self._decode = self._decoder.decode
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= MAX_UTF8_BYTES:  # an unfinished character is shorter than this
                break
            if token_id not in self._hidden:
                tail = self._bytes[token_id] + tail
        self._decode(tail)
        self._strip_space = tokenizer.spelling.strips_first_space and not tail

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        spelled = self._bytes[token_id]
        if self._decoder.buffer or not spelled.isascii():
            return self._strip(self._decode(spelled))
        text = spelled.decode("ascii")  # the quick way to the same
        return self._strip(text) if self._strip_space else text

    def steps(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self.step(token_ids[0])
        return self._strip(self._decode(self._shown_bytes(token_ids)))

    def wholes(self, answers: Sequence[Sequence[int]]) -> list[str]:
        begun = self._decoder.getstate()[0]  # of a character, by the prompt
        texts = spell_answers(self._bytes, self._hidden, begun, list(answers))
        return [text.removeprefix(" ") for text in texts] if self._strip_space else texts

    def _shown_bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._bytes[token_id] for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        return self._strip(self._decode(b"", True))

    @property
    def inside_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    @property
    def settled(self) -> bool:
        return not self._strip_space and not self._decoder.buffer

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For all other tokenizers: decodes the last few tokens with and without the new one; the difference is new."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [i for i in prompt_token_ids[-CONTEXT_TOKENS:] if i not in self._hidden]
        self._num_shown = len(self._window)  # tokens of the window whose text was shown
        self._shown = self._text(self._window).rstrip("\ufffd")

    def wholes(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return [self._whole(token_ids) for token_ids in answers]

    def _whole(self, token_ids: Sequence[int]) -> str:
        before = self._window, self._num_shown, self._shown
        self._window = list(self._window)
        text = self.steps(token_ids) + self.flush()
        self._window, self._num_shown, self._shown = before
        return text

    def steps(self, token_ids: Sequence[int]) -> str:
        return "".join([self.step(token_id) for token_id in token_ids])

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        held = len(self._window) - self._num_shown
        if len(text) <= len(self._shown) or (text.endswith("\ufffd") and held < MAX_HELD_TOKENS):
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._text(self._window))

    @property
    def inside_character(self) -> bool:
        return len(self._window) > self._num_shown

    settled = False  # what a token stands for depends on those before it

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        # What was new is the next step's context: a decoder may treat the first token of a text differently.
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._text(self._window)
        return new

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
