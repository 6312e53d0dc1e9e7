"""Streamed text is the text of prompt and output together, without what the prompt alone settles."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.text import IncrementalDetokenizer, TextBundle, Tokenizer


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    """The text of each step and of the flush; several steps at once, and all of them, must give the same."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    whole = detokenizer.wholes([output, output])
    pieces = [*map(detokenizer.step, output), detokenizer.flush()]
    assert whole == ["".join(pieces)] * 2
    at_once = IncrementalDetokenizer(tokenizer, prompt, skip)
    half = len(output) // 2
    assert at_once.steps(output[:half]) == "".join(pieces[:half])
    assert at_once.steps(output[half:]) + at_once.flush() == "".join(pieces[half:])
    return pieces


def settled_text(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> str:
    """The prompt's text without a character it leaves unfinished."""
    hidden = tokenizer.special_ids if skip else frozenset()
    data = b"".join(tokenizer.token_bytes(i) for i in prompt if i not in hidden)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    return text.removeprefix(" ") if tokenizer.spelling.strips_first_space else text


# Ids past the vocabulary included: a model may have more logits than its tokenizer has tokens.
TOKEN_IDS = st.lists(st.integers(0, 275), max_size=24)


@given(TOKEN_IDS, TOKEN_IDS, st.booleans())
def test_any_tokens_at_the_byte_level(byte_level: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> None:
    shown = "".join(stream(byte_level, prompt, output, skip))
    assert settled_text(byte_level, prompt, skip) + shown == byte_level.decode(prompt + output, skip)


@given(TOKEN_IDS, TOKEN_IDS, st.booleans())
def test_any_tokens_with_byte_fallback(
    byte_fallback: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    shown = "".join(stream(byte_fallback, prompt, output, skip))
    assert settled_text(byte_fallback, prompt, skip) + shown == byte_fallback.decode(prompt + output, skip)


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12), st.booleans())
def test_any_tokens_without_exact_bytes(metaspace: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> None:
    # A short prompt: of a longer one the window sees the end alone, which gives the same text.
    shown = "".join(stream(metaspace, prompt[-8:], output, skip))
    assert metaspace.decode(prompt[-8:], skip) + shown == metaspace.decode(prompt[-8:] + output, skip)


# Characters whose bytes the embedded vocabulary has; it lacks some control characters and the last planes.
SPELLABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"]), max_size=40)


@given(SPELLABLE, SPELLABLE)
def test_real_text_is_shown_whole_and_never_replaced(embedded: TextBundle, before: str, after: str) -> None:
    tokenizer = embedded.tokenizer
    pieces = stream(tokenizer, tokenizer.encode(before), tokenizer.encode(after), skip=False)
    assert "".join(pieces) == after
    assert pieces[-1] == ""
    if "\ufffd" not in after:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_in_parts_is_shown_with_its_last_part(byte_level: Tokenizer) -> None:
    llama = list("🦙".encode())
    assert stream(byte_level, [ord("x")], [*llama, ord("!")]) == ["", "", "", "🦙", "!", ""]


def test_a_character_begun_in_the_prompt_is_shown_whole_and_the_prompt_is_not(byte_level: Tokenizer) -> None:
    llama = list("🦙".encode())
    assert stream(byte_level, [*b"abc", *llama[:3]], [llama[3], ord("!")]) == ["🦙", "!", ""]


def test_broken_bytes_are_replaced_as_soon_as_nothing_can_mend_them(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [ord("x")], [0xF0, 0x9F, ord("a"), 0xFF, 0xE2]) == [
        "",
        "",
        "\ufffda",
        "\ufffd",
        "",
        "\ufffd",
    ]


def test_a_genuine_replacement_character_is_text_like_any_other(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [ord("x")], list("\ufffd".encode())) == ["", "", "\ufffd", ""]


def test_special_tokens_neither_show_nor_interrupt_a_character(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_token_id or -1
    first, second = "é".encode()
    assert stream(byte_level, [ord("x")], [first, eos, second]) == ["", "", "é", ""]
    assert stream(byte_level, [ord("x")], [ord("a"), eos], skip=False) == ["a", "</s>", ""]


def test_the_first_space_is_dropped_only_at_the_beginning_of_the_text(byte_fallback: Tokenizer) -> None:
    a = byte_fallback.id_of("▁a") or -1
    assert stream(byte_fallback, [1], [a, a]) == ["a", " a", ""]  # after BOS alone
    assert stream(byte_fallback, [1, a], [a, a]) == [" a", " a", ""]
    assert stream(byte_fallback, [1], [a, a], skip=False) == [" a", " a", ""]  # after a visible BOS


def test_words_without_exact_bytes_keep_their_spaces(metaspace: Tokenizer) -> None:
    the, cat, s, dog = (metaspace.id_of(token) or -1 for token in ("▁the", "cat", "s", "▁dog"))
    assert stream(metaspace, [the, cat], [s, dog, the, 1]) == ["s", " dog", " the", "", ""]
    assert stream(metaspace, [0], [the, cat]) == ["the", "cat", ""]


def test_a_long_prompt_is_not_gone_through(byte_level: Tokenizer) -> None:
    class Watched(list[int]):
        reads = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for item in super().__reversed__():
                Watched.reads += 1
                yield item

    IncrementalDetokenizer(byte_level, Watched([ord("a")] * 10_000))
    assert 0 < Watched.reads < 10
