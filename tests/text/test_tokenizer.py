from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.text import TextBundle, Tokenizer

TEXTS = ["", " ", "a", " a", "  a  b ", "naïve café", "日本語 🦙", "\n\t\r\n", "a\x00b", "all all"]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_encoded_decodes_to_itself(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, byte_fallback):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 265), max_size=40), st.booleans())
def test_byte_level_decode_is_the_librarys(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    ids = [i for i in ids if i != byte_level.id_of("ü")]  # which the library takes for the byte of that name
    assert byte_level.decode(ids, skip) == byte_level.backend.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=" abé▁ü日🦙\n", max_size=12), st.booleans())
def test_byte_fallback_decode_is_the_librarys_for_valid_text(byte_fallback: Tokenizer, text: str, skip: bool) -> None:
    ids = byte_fallback.encode(text)
    assert byte_fallback.decode(ids, skip) == byte_fallback.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_a_long_text_in_pieces_is_the_same(
    byte_level: Tokenizer, byte_fallback: Tokenizer, metaspace: Tokenizer, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    texts = {byte_level: "a 日本語 🦙", byte_fallback: "a 日本語 🦙", metaspace: "the cat, a dogs"}
    ids = {tokenizer: tokenizer.encode(text) for tokenizer, text in texts.items()}
    whole = {tokenizer: [tokenizer.decode(ids[tokenizer], skip) for skip in (False, True)] for tokenizer in texts}
    monkeypatch.setattr("bequest.engine.text.tokenizer._AT_ONCE", at_once)
    for tokenizer in texts:
        assert [tokenizer.decode(ids[tokenizer], skip) for skip in (False, True)] == whole[tokenizer]


def test_special_tokens_are_added_only_if_asked_for_but_always_parsed(byte_level: Tokenizer) -> None:
    bos, eos = byte_level.id_of("<s>"), byte_level.id_of("</s>")
    assert (byte_level.bos_token_id, byte_level.eos_token_id) == (bos, eos)
    assert byte_level.special_ids == {bos, eos}
    assert byte_level.encode("a")[0] == bos
    assert byte_level.encode("a</s>", add_special_tokens=False) == [ord("a"), eos]
    assert byte_level.decode([bos, ord("a"), eos]) == "a"
    assert byte_level.decode([bos, ord("a"), eos], skip_special_tokens=False) == "<s>a</s>"


def test_end_token_is_added_where_the_model_wants_it(metaspace: Tokenizer) -> None:
    assert metaspace.encode("the cat") == [*metaspace.encode("the cat", add_special_tokens=False), 1]


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a" * 1000 + "\ud83d"])
def test_a_lone_surrogate_is_a_clear_value_error(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=rf"lone surrogate \(U\+D[0-9A-F]+\) at character {len(text) - 1}"):
        byte_level.encode(text)


def test_tokens_one_by_one(byte_level: Tokenizer, byte_fallback: Tokenizer, metaspace: Tokenizer) -> None:
    assert byte_level.token_text(0x61) == "a"
    assert byte_level.token_text(byte_level.id_of("Ġa") or -1) == " a"
    part_of_a_llama = byte_level.id_of("ðŁ¦") or -1
    assert byte_level.token_bytes(part_of_a_llama) == "🦙".encode()[:3]
    assert byte_level.token_text(part_of_a_llama) == r"bytes:\xf0\x9f\xa6"
    assert byte_level.token_text(byte_level.id_of("ü") or -1) == "ü"
    assert byte_level.token_text(byte_level.eos_token_id or -1) == "</s>"
    assert byte_fallback.token_bytes(3 + 0xE2) == b"\xe2"
    assert byte_fallback.token_text(byte_fallback.id_of("▁a") or -1) == " a"
    assert metaspace.token_text(metaspace.id_of("▁the") or -1) == " the"


def test_an_id_of_no_token_is_no_text(byte_level: Tokenizer) -> None:
    for unknown in (-1, byte_level.vocab_size, 2**40):
        assert byte_level.token_text(unknown) == ""
        assert byte_level.token_string(unknown) is None
        assert byte_level.decode([unknown, ord("a")]) == "a"
    assert byte_level.id_of("nothing of the kind") is None


def test_no_text_has_fewer_tokens_than_the_bound_says(embedded: TextBundle) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.max_chars_per_token is not None
    for unit in (" ", "=", "-", "a", "\n", "the ", "🦙", "<|im_start|>"):
        text = unit * 500
        assert len(tokenizer.encode(text)) * tokenizer.max_chars_per_token >= len(text)


def test_there_is_no_bound_where_an_unknown_token_swallows_any_text(metaspace: Tokenizer) -> None:
    assert metaspace.max_chars_per_token is None
    assert len(metaspace.encode("ж" * 1000, add_special_tokens=False)) <= 2


def test_other_threads_run_while_a_text_is_tokenised(embedded: TextBundle) -> None:
    text = "the interpreter lock is a budget. " * 20_000
    done = threading.Event()

    def tokenise() -> None:
        embedded.tokenizer.encode(text)
        done.set()

    worker = threading.Thread(target=tokenise)
    worker.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.001)
    worker.join()
    # Were the lock held, this thread would have had it before and after, and hardly between.
    assert turns > 10


def test_the_text_side_does_not_import_torch() -> None:
    code = "import sys, bequest.engine.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("text", ["a", " a", "  a", "b", "", "é", "</s>", "</s>a", "a</s>a"])
def test_what_goes_on_is_tokenised_as_in_the_middle_of_a_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        before, whole = tokenizer.encode("b"), tokenizer.encode("b" + text)
        assert before + tokenizer.encode_behind(text, before[-1]) == whole
        ended = [*before, tokenizer.eos_token_id]
        assert ended + tokenizer.encode_behind(text, ended[-1]) == tokenizer.encode("b</s>" + text)
