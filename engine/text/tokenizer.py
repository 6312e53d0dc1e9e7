"""Text to token ids and back: a typed face over the `tokenizers` library.

Immutable after construction and safe to share between threads. `encode` and `decode` hold the interpreter lock for
milliseconds at a time, however long a text is, so a long one belongs on a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers.processors import TemplateProcessing

from bequest.engine.text.spelling import Spelling, component_steps, spelling_of

# No canonical composition turns more than four code points into one.
MAX_CHARS_COMPOSED = 4
_AT_ONCE = 1 << 14  # tokens whose text is put together in one go, for which nobody else can run
_MARK = "\x02"  # stands for a text before another: no token begins or ends with it and has more


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens with a role, by id. `add_bos` and `add_eos` None: as the tokenizer's own post-processor does.
    `others`: tokens that nobody but templates asks for, by role, such as `unk_token`."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    others: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Built by `hf_tokenizer.tokenizer_from_directory` or `gguf_tokenizer.tokenizer_from_gguf`."""

    def __init__(self, backend: tokenizers.Tokenizer, roles: SpecialTokens, name: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        if roles.add_bos is not None or roles.add_eos is not None:
            _set_post_processor(backend, roles)
        self.backend = backend
        self.name = name
        self.bos_token_id = roles.bos
        self.eos_token_id = roles.eos
        self.pad_token_id = roles.pad
        self._other_roles = roles.others
        vocabulary = backend.get_vocab(with_added_tokens=True)
        # Ids may have gaps; every id the tokenizer knows is below this.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.spelling = spelling_of(backend)
        # The most characters of text that one token can stand for; None where nothing bounds it. A text of more than
        # n times as many characters has more than n tokens: so much is known before it is tokenised. (Not counted are
        # characters the vocabulary cannot spell at all, which vanish; a few control characters, in some models.)
        self.max_chars_per_token = _max_chars_per_token(backend, self.spelling, vocabulary)
        self.bytes_by_id = _TokenBytes(backend, self.spelling)
        self._opens_with_space = self.spelling.exact and self._spelled(self.encode("a", False)) == b" a"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A special token spelled out in the text becomes that token.

        Raises ValueError for text with a lone surrogate, which has no UTF-8.
        """
        try:
            # Not `encode`, which holds the interpreter lock while it works.
            encodings = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValueError(_why_not_encodable(text)) from error
        ids: list[int] = encodings[0].ids
        return ids

    def encode_behind(self, text: str, last: int | None = None) -> list[int]:
        """Token ids of a text that goes on behind another, whose last token is `last`: without the space that
        SentencePiece puts before a beginning. What is meant as one word would be two otherwise, and " a" two spaces."""
        if not self._opens_with_space:
            return self.encode(text, add_special_tokens=False)
        # Behind a special token a tokenizer may begin anew, with a space; the library knows whether it does.
        mark = self.token_string(last) if last in self.special_ids else None
        before = self.encode(mark or _MARK, add_special_tokens=False)
        ids = self.encode((mark or _MARK) + text, add_special_tokens=False)
        whole = ids[: len(before)] == before
        return ids[len(before) :] if whole else self.encode(text, add_special_tokens=False)

    def _spelled(self, token_ids: Sequence[int]) -> bytes:
        if len(token_ids) <= _AT_ONCE:
            return b"".join([self.bytes_by_id[token] for token in token_ids])
        starts = range(0, len(token_ids), _AT_ONCE)
        return b"".join([self._spelled(token_ids[start : start + _AT_ONCE]) for start in starts])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids of no token become nothing."""
        if not self.spelling.exact:
            return self._decoded(list(token_ids), skip_special_tokens)
        hidden: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        text = self._spelled([i for i in token_ids if i not in hidden]).decode("utf-8", "replace")
        return text[1:] if self.spelling.strips_first_space and text[:1] == " " else text

    def _decoded(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if len(token_ids) <= _AT_ONCE:
            return str(self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        # Not `decode`, which holds the interpreter lock while it works: for seconds, of a million tokens.
        [text] = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    @property
    def spells_bytes(self) -> bool:
        """Whether a text is its tokens' bytes put together."""
        return self.spelling.exact

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, its leading space included; b"" for an id of no token."""
        return self.bytes_by_id[token_id]

    def token_text(self, token_id: int) -> str:
        r"""One token as log-probabilities show it: its text, or `bytes:\xe2\x96` where it is a part of a character."""
        data = self.bytes_by_id[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its string in the vocabulary."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    @property
    def role_tokens(self) -> dict[str, str]:
        """What templates know by name: `bos_token`, `eos_token`, `pad_token` and others, where there are such."""
        ids = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id, "pad_token": self.pad_token_id}
        found = {role: token for role, index in ids.items() if (token := self.token_string(index)) is not None}
        return {**self._other_roles, **found}

    def token_string(self, token_id: int | None) -> str | None:
        """A token's string in the vocabulary: the inverse of `id_of`."""
        if token_id is None or not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self.backend.id_to_token(token_id)
        return token


class _TokenBytes(dict[int, bytes]):
    """Id → bytes, filled as ids are met: the table of a whole vocabulary would take a noticeable time at the start."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling) -> None:
        self._backend = backend
        self._spelling = spelling
        # Added tokens are found in the text as they are written: at the byte level they do not use its alphabet.
        self._literal = backend.get_added_tokens_decoder() if spelling.kind == "byte_level" else {}

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        data = self[token_id] = token.encode() if token_id in self._literal else self._spelling.to_bytes(token)
        return data


def _set_post_processor(backend: tokenizers.Tokenizer, roles: SpecialTokens) -> None:
    bos = backend.id_to_token(roles.bos) if roles.add_bos and roles.bos is not None else None
    eos = backend.id_to_token(roles.eos) if roles.add_eos and roles.eos is not None else None
    pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    used = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=list(used.items()))


def _why_not_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        return f"the text is not valid Unicode: a lone surrogate (U+{surrogate:04X}) at character {error.start}"
    return "the text cannot be tokenised"


def _max_chars_per_token(backend: tokenizers.Tokenizer, spelling: Spelling, vocabulary: Iterable[str]) -> int | None:
    """None where a token can stand for any amount of text: an unknown-token, a dropped or a swallowed whitespace."""
    added = backend.get_added_tokens_decoder().values()
    if not spelling.exact or any(token.lstrip or token.rstrip for token in added):
        return None
    if any(
        step.get("behavior") == "Removed" or step["type"].startswith("Whitespace")
        for step in component_steps(backend.pre_tokenizer)
    ):
        return None
    factor = 1
    for step in component_steps(backend.normalizer):
        if step["type"] == "NFC":
            factor = MAX_CHARS_COMPOSED
        elif step["type"] not in ("Prepend", "Replace") or len(step.get("pattern", {}).get("String", "")) > len(
            step.get("content", "")
        ):
            return None
    # A character takes at least one byte, and a token's string has at least as many characters as its text.
    return factor * max(map(len, vocabulary), default=1)
