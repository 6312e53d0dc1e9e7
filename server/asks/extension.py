"""A conversation that goes on: the prompt of its next turn, made such that it begins with tokens a parent has.

A parent's tokens stay as they were sampled, even where the tokenizer would have cut the same text differently. So the
text of the whole conversation is laid beside the parent's, and only what follows their common beginning is tokenised.
A template that rewrites history (drops earlier reasoning, trims an answer) merely makes that beginning shorter.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from bequest.engine.types import ParentChoice
from bequest.server.interfaces import TokenizerLike

_BROKEN = "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the prompt of a chat was made of: kept with its record, as `Terms.origin`."""

    messages: tuple[Mapping[str, Any], ...]  # as rendered, without the answer
    prompt_text: str  # the messages through the template, up to where the answer begins
    template: str | None = None  # the client's own; None: the model's
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None  # that the template was given
    continued: bool = False  # the last message is the beginning of the answer
    answer_at: int | None = (
        None  # tokens before the answer, where the prompt holds a part of it; None: all of the prompt
    )

    def answered(self, answer: str) -> tuple[Mapping[str, Any], ...]:
        """The messages with the answer."""
        if not self.continued:
            return (*self.messages, {"role": "assistant", "content": answer})
        *earlier, last = self.messages
        begun = last["content"]
        whole = begun + answer if isinstance(begun, str) else [*begun, {"type": "text", "text": answer}]
        return (*earlier, {**last, "content": whole})


@dataclass(frozen=True, slots=True)
class Extension:
    """A prompt that begins with tokens of a parent."""

    at: int  # tokens of the parent's choice that it begins with; 0: none
    suffix_ids: tuple[int, ...]


def answer_text(tokenizer: TokenizerLike, token_ids: Sequence[int], end_token_ids: Collection[int]) -> str:
    """The text of an answer as a message holds it: without its end token.

    Every token is written out, so that `extend` finds each of them again.
    """
    written = list(token_ids)
    while written and written[-1] in end_token_ids:
        written.pop()
    return b"".join(map(tokenizer.token_bytes, written)).decode("utf-8", "replace")


def extend(
    tokenizer: TokenizerLike, choice: ParentChoice, limit: int, prompt_text: str | None, rendered: str
) -> Extension:
    """The prompt for `rendered` that keeps as many of the parent's first `limit` tokens as it can.

    The parent's text is `prompt_text`, of which its prompt's tokens were made, and what its sampled tokens show.
    Tokens are kept as far as `rendered` has the same text, never into the middle of a character; the rest is
    tokenised alone. If not one can be kept that way, the tokens that `rendered` and the parent have in common are.
    """
    target = rendered.encode()
    text, ends = _layout(tokenizer, choice, limit, prompt_text)
    at = bisect_right(ends, common_length(text, target))
    while at and _inside_character(target, ends[at - 1]):
        at -= 1
    if at:
        rest = target[ends[at - 1] :].decode()
        return Extension(at, tuple(tokenizer.encode_behind(rest, choice.token_ids[at - 1])))
    ids = tuple(tokenizer.encode(rendered, add_special_tokens=False))
    at = common_length(ids, choice.token_ids[:limit])
    return Extension(at, ids[at:])


def _layout(
    tokenizer: TokenizerLike, choice: ParentChoice, limit: int, prompt_text: str | None
) -> tuple[bytes, list[int]]:
    """The text of the first `limit` tokens, and where in it each of them ends; never falling.

    The text of the prompt is what it was made of. Its tokens may spell more (a BOS, a first space), which lies outside
    of the text; or spell something else (after a normalisation), and then they are kept together or not at all.
    """
    num_prompt = min(choice.num_prompt, limit)
    spelled = list(map(tokenizer.token_bytes, choice.token_ids[: max(limit, choice.num_prompt)]))
    if prompt_text is None:
        return shown(spelled[:limit])
    whole = prompt_text.encode()
    prompt, prompt_ends = shown(spelled[: choice.num_prompt])
    before = prompt.find(whole)
    ends = [len(whole)] * num_prompt
    if before >= 0:
        ends = [min(max(end - before, 0), len(whole)) for end in prompt_ends[:num_prompt]]
    elif limit < choice.num_prompt:
        ends = []  # a part of tokens that only make sense together
    sampled, sampled_ends = shown(spelled[choice.num_prompt : limit])
    ends += [len(whole) + end for end in sampled_ends]
    return whole + sampled, ends


def shown(spelled: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """The text of tokens, given their bytes, and where in it each of them ends; never falling.

    Bytes that are no character are U+FFFD, as in what a client sees, and a token that ends among such bytes ends
    behind that. One that ends inside of a character does so in the text, too.
    """
    data = b"".join(spelled)
    try:
        data.decode()
    except UnicodeDecodeError:
        return _shown_broken(spelled)
    return data, list(accumulate(map(len, spelled)))


def _shown_broken(spelled: Sequence[bytes]) -> tuple[bytes, list[int]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, begun = bytearray(), b""
    ends: list[int] = []
    first = 0  # of the tokens that have `begun`, a part of a character
    for index, piece in enumerate((*spelled, b"")):
        start = len(text)
        text += decoder.decode(piece, final=index == len(spelled)).encode()
        if begun and text.startswith(_BROKEN, start):
            ends[first:] = [start + len(_BROKEN)] * (index - first)
        if not begun or len(text) > start:
            first = index
        begun, _ = decoder.getstate()
        ends.append(len(text) + len(begun))
    return bytes(text), ends[:-1]


_Items = TypeVar("_Items", bytes, str, tuple[int, ...])


def common_length(a: _Items, b: _Items) -> int:
    """How many items two sequences have in common at the beginning, by halving: slices compare at memory speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _inside_character(text: bytes, position: int) -> bool:
    return position < len(text) and text[position] & 0xC0 == 0x80
