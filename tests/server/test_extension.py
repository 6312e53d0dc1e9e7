"""The prompt of a conversation's next turn, against a slow search for the longest beginning that can be kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.types import ParentChoice
from bequest.server.asks.extension import Conversation, Extension, answer_text, extend

BOS, END = 0, 1
_PIECES = [
    b"<s>",
    b"<end>",
    *(bytes([i]) for i in range(256)),
    b"lo",
    b"hel",
    b"hello",
    b" wor",
    "é".encode(),
    b"\xf0\x9f",
    b"</",
]
END_PIECE = _PIECES[END]
IDS = {piece: index for index, piece in enumerate(_PIECES)}


class PieceTokenizer:
    """Longest piece first, from left to right; `prefix` is put before every text, as SentencePiece does."""

    max_chars_per_token = None

    def __init__(self, prefix: bytes = b"", fold_case: bool = False) -> None:
        self._prefix = prefix
        self._fold_case = fold_case

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        begun = self._prefix.decode() + text if text else text
        return [BOS] * add_special_tokens + self.encode_behind(begun)

    def encode_behind(self, text: str, last: int | None = None) -> list[int]:
        data, ids = (text.lower() if self._fold_case else text).encode(), []
        while data:
            piece = max((piece for piece in _PIECES if data.startswith(piece)), key=len)
            ids.append(IDS[piece])
            data = data[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return _PIECES[token_id]


PLAIN = PieceTokenizer()


def parent(prompt: str, sampled: Sequence[bytes], tokenizer: PieceTokenizer = PLAIN, bos: bool = False) -> ParentChoice:
    ids = tokenizer.encode(prompt, add_special_tokens=bos)
    tokens = (*ids, *(IDS[piece] for piece in sampled))
    return ParentChoice(tokens, len(ids), len(tokens))


def whole(choice: ParentChoice, extension: Extension) -> tuple[int, ...]:
    return choice.token_ids[: extension.at] + extension.suffix_ids


def test_keeps_tokens_as_sampled() -> None:
    choice = parent("ask:", [b"h", b"e", b"l", b"lo"])
    extension = extend(PLAIN, choice, 8, "ask:", "ask:hello\nmore")
    assert extension == Extension(8, tuple(PLAIN.encode("\nmore", False)))
    assert PLAIN.encode("hello", False) != list(choice.token_ids[4:]), "the tokenizer would have cut it differently"


def test_suffix_is_tokenised_alone() -> None:
    """`hel` + `lo` stays two tokens."""
    choice = parent("ask:", [b"hel"])
    assert extend(PLAIN, choice, 5, "ask:", "ask:hello") == Extension(5, (IDS[b"lo"],))


def test_nothing_new() -> None:
    choice = parent("ask:", [b"hel"])
    assert extend(PLAIN, choice, 5, "ask:", "ask:hel") == Extension(5, ())


def test_end_token_is_kept_where_the_template_writes_it() -> None:
    choice = parent("ask:", [b"hel", b"<end>"])
    rendered = "ask:hel<end>\nmore"
    assert extend(PLAIN, choice, 6, "ask:", rendered).at == 6
    shown = extend(PLAIN, choice, 5, "ask:", rendered)
    assert shown.at == 5 and shown.suffix_ids[0] == END
    assert extend(PLAIN, choice, 6, "ask:", "ask:hel\nmore").at == 5


def test_dropped_reasoning_shortens_it() -> None:
    choice = parent("ask:", [b"<", b"t", b">", b"</", b"t", b">", b"hel", b"lo"])
    extension = extend(PLAIN, choice, 12, "ask:", "ask:hello\nmore")
    assert extension.at == 4 and whole(choice, extension) == tuple(PLAIN.encode("ask:hello\nmore", False))


def test_branch_keeps_no_more_than_its_tokens() -> None:
    choice = parent("ask:", [b"hel", b"lo", b"!"])
    assert extend(PLAIN, choice, 5, "ask:", "ask:hello!") == Extension(5, tuple(PLAIN.encode("lo!", False)))


def test_never_splits_a_character() -> None:
    """Two sampled halves of 👋, and a rendering that has another character with the same first half."""
    choice = parent("ask:", [b"h", b"\xf0\x9f", b"\x91", b"\x8b"])
    extension = extend(PLAIN, choice, 8, "ask:", "ask:h😀")
    assert extension.at == 5 and PLAIN.decode(whole(choice, extension)) == "ask:h😀"
    assert extend(PLAIN, choice, 8, "ask:", "ask:h👋").at == 8


def test_bos_outside_of_the_text_is_kept() -> None:
    choice = parent("ask:", [b"hel"], bos=True)
    assert extend(PLAIN, choice, 6, "ask:", "ask:hel!").at == 6
    assert extend(PLAIN, choice, 6, "ask:", "asp").at == 3
    assert extend(PLAIN, choice, 6, "ask:", "other").at == 1


def test_first_space_of_sentencepiece() -> None:
    tokenizer = PieceTokenizer(prefix=b" ")
    choice = parent("ask:", [b"hel"], tokenizer)
    assert choice.num_prompt == 5
    assert extend(tokenizer, choice, 6, "ask:", "ask:hel!") == Extension(6, (IDS[b"!"],))
    assert extend(tokenizer, choice, 6, "ask:", "ask, then").at == 4


def test_normalised_prompt_is_kept_whole_or_by_its_tokens() -> None:
    tokenizer = PieceTokenizer(fold_case=True)
    choice = parent("Ask:", [b"hel"], tokenizer)
    assert extend(tokenizer, choice, 5, "Ask:", "Ask:hello") == Extension(5, (IDS[b"lo"],))
    # The bytes of its tokens are not its text: what the new tokens have in common with the old ones is kept.
    assert extend(tokenizer, choice, 5, "Ask:", "Asp:hello").at == 2
    assert extend(tokenizer, choice, 3, "Ask:", "Ask:hello").at == 3


def test_without_the_prompts_text() -> None:
    choice = parent("ask:", [b"hel"])
    assert extend(PLAIN, choice, 5, None, "ask:hello") == Extension(5, (IDS[b"lo"],))


@pytest.mark.parametrize("text", ["", "other"])
def test_nothing_in_common(text: str) -> None:
    choice = parent("ask:", [b"hel"])
    assert extend(PLAIN, choice, 5, "ask:", text) == Extension(0, tuple(PLAIN.encode(text, False)))


def test_broken_bytes_are_kept_where_they_are_shown() -> None:
    """Bytes that are no character are one U+FFFD in a text, in the middle of an answer and at its end."""
    choice = parent("ask:", [b"h", b"\xff", b"e", b"\xf0\x9f", b"l", b"\xf0\x9f"])
    shown = "ask:h\ufffde\ufffdl\ufffd"
    assert extend(PLAIN, choice, 10, "ask:", shown + "\nmore") == Extension(10, tuple(PLAIN.encode("\nmore", False)))
    assert extend(PLAIN, choice, 10, "ask:", "ask:h\ufffde!").at == 7
    assert extend(PLAIN, choice, 10, "ask:", "ask:h!").at == 5
    assert extend(PLAIN, choice, 8, "ask:", "ask:h\ufffde\ufffd!") == Extension(8, (IDS[b"!"],))
    assert extend(PLAIN, parent("ask:", [b"\xf0", END_PIECE]), 6, "ask:", "ask:\ufffd!").at == 5


def test_broken_bytes_of_an_earlier_answer_are_kept() -> None:
    """They are in the prompt of the second turn."""
    ids = (*PLAIN.encode("ask:", False), IDS[b"\xff"], *PLAIN.encode("\nmore", False), IDS[b"hel"])
    choice = ParentChoice(ids, len(ids) - 1, len(ids))
    prompt = "ask:\ufffd\nmore"
    assert extend(PLAIN, choice, len(ids), prompt, f"{prompt}hel!") == Extension(len(ids), (IDS[b"!"],))
    assert extend(PLAIN, choice, len(ids), prompt, "ask:\ufffd?") == Extension(5, (IDS[b"?"],))


pieces = st.lists(
    st.sampled_from([b"h", b"hel", b"lo", b" ", b"\xf0\x9f", b"\x91", b"\x8b", b"\xff", "é".encode(), b"<end>"])
)
texts = st.text(st.sampled_from("ahelo é👋😀"), max_size=12)
tails = st.text(st.sampled_from("ahelo é👋😀\ufffd"), max_size=12)


@given(prompt=texts, sampled=pieces, limit=st.integers(0, 30), cut=st.integers(0, 40), tail=tails)
def test_longest_prefix(prompt: str, sampled: list[bytes], limit: int, cut: int, tail: str) -> None:
    choice = parent(prompt, sampled)
    limit = min(limit, len(choice.token_ids))
    rendered = PLAIN.decode(choice.token_ids)[:cut] + tail
    extension = extend(PLAIN, choice, limit, prompt, rendered)
    assert PLAIN.decode(whole(choice, extension)) == rendered

    def kept(at: int) -> bool:
        """Where it ends inside of a character, that is broken off there."""
        head = PLAIN.decode(choice.token_ids[:at])
        known = PLAIN.decode(choice.token_ids[: max(limit, choice.num_prompt)])
        return known.startswith(head) and rendered.startswith(head)

    longest = max(at for at in range(limit + 1) if kept(at))
    assert extension.at == longest or (
        longest == 0 and whole(choice, extension) == tuple(PLAIN.encode(rendered, False))
    )


@given(sampled=pieces)
def test_answer_is_found_again(sampled: list[bytes]) -> None:
    """Whatever was sampled, a template that writes it back lets every token be kept."""
    choice = parent("ask:", sampled)
    answer = answer_text(PLAIN, choice.token_ids[4:], ())
    extension = extend(PLAIN, choice, len(choice.token_ids), "ask:", f"ask:{answer}\nmore")
    assert extension == Extension(len(choice.token_ids), tuple(PLAIN.encode("\nmore", False)))


def test_answer_text() -> None:
    assert answer_text(PLAIN, [IDS[b"hel"], END, IDS[b"lo"], END, END], {END}) == "hel<end>lo"
    assert answer_text(PLAIN, [IDS[b"hel"], IDS[b"\xf0\x9f"]], {END}) == "hel\ufffd"
    assert answer_text(PLAIN, [], {END}) == ""


def test_conversation_with_its_answer() -> None:
    ask = {"role": "user", "content": "ask"}
    begun = {"role": "assistant", "content": "hel"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "hel"}]}
    assert Conversation((ask,), "").answered("lo") == (ask, {"role": "assistant", "content": "lo"})
    assert Conversation((ask, begun), "", continued=True).answered("lo") == (ask, {**begun, "content": "hello"})
    [_, last] = Conversation((ask, parts), "", continued=True).answered("lo")
    assert [part["text"] for part in last["content"]] == ["hel", "lo"]
