"""The tokenizer rebuilt from GGUF metadata, against transformers, llama.cpp's tokens, and published vocabularies.

llama.cpp carries vocabularies with texts and their tokens (models/ggml-vocab-*.gguf, .inp, .out; also in the source
archive of llama-cpp-python). Name that folder in BEQUEST_GGUF_VOCABS and they are checked too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from bequest.engine.errors import ModelError
from bequest.engine.formats.gguf_file import GGUFFile
from bequest.engine.text import TextBundle
from bequest.engine.text.gguf_tokenizer import SPLITS, tokenizer_from_gguf

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text(encoding="utf-8"))
VOCABULARIES = sorted(Path(os.environ.get("BEQUEST_GGUF_VOCABS", os.devnull)).glob("ggml-vocab-*.gguf"))


@pytest.mark.parametrize("case", GOLDEN, ids=[repr(case["text"])[:30] for case in GOLDEN])
def test_embedded_model_tokenises_as_llama_cpp(embedded: TextBundle, case: dict[str, Any]) -> None:
    assert embedded.tokenizer.encode(case["text"]) == case["ids"]
    assert embedded.tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_embedded_model_tokenises_as_transformers(
    embedded: TextBundle, embedded_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    # The library reads 200,000 numbers and strings one by one: of a mapped file each is half as quick as of an array.
    monkeypatch.setattr(np, "memmap", lambda path, mode, dtype=np.uint8: np.fromfile(path, dtype))
    reference = transformers.AutoTokenizer.from_pretrained(embedded_path.parent, gguf_file=embedded_path.name)
    for case in GOLDEN:
        text = case["text"]
        # transformers leaves out the split of single digits. It matters after a space, for number characters alone that
        # have merges with one (as " ½" has): no ASCII digit does.
        if any(char.isnumeric() and not char.isascii() for char in text):
            continue
        assert embedded.tokenizer.encode(text) == reference.encode(text), text


def test_embedded_model_roles(embedded: TextBundle) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.token_string(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.token_string(tokenizer.bos_token_id) == "<|im_start|>"
    assert tokenizer.vocab_size == 49152
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_published_vocabularies(path: Path) -> None:
    inputs, outputs = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    if not outputs.exists():
        pytest.skip("no expected tokens with this vocabulary")
    try:
        tokenizer = tokenizer_from_gguf(GGUFFile(path).metadata, path.name)
    except ModelError as error:
        pytest.skip(str(error))
    expected = [[int(i) for i in line.split()] for line in outputs.read_text(encoding="utf-8").split("\n")]
    texts = inputs.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    checked = 0
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
        checked += 1
    assert checked > 40


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["h", "i", "hi", "<s>", "</s>", "<tool>", "1", "2", "12"],
        "token_type": np.array([1, 1, 1, 3, 3, 4, 1, 1, 1]),
        "merges": ["h i", "1 2"],
        "bos_token_id": 3,
        "eos_token_id": 4,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def test_token_types_and_flags() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True), "m")
    assert tokenizer.encode("hi<tool>h") == [3, 2, 5, 0, 4]
    assert tokenizer.special_ids == {3, 4}  # what the user defined is text
    assert tokenizer.decode([3, 2, 5, 4]) == "hi<tool>"


@pytest.mark.parametrize(
    ("pre", "ids"),
    [("gpt-2", [8]), ("smollm", [6, 7]), ("qwen2", [6, 7]), ("llama-bpe", [3, 8]), ("tekken", [3, 6, 7]), (None, [8])],
)
def test_the_pre_tokenizer_decides_how_digits_split(pre: str | None, ids: list[int]) -> None:
    assert tokenizer_from_gguf(byte_level_metadata(pre=pre), "m").encode("12") == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'; supported are 'gpt2', 'llama' and 'gemma4'"),
        ({"model": None}, "supported are"),
        ({"pre": "viking"}, "'viking'; supported are .*qwen2.*smollm"),
        ({"tokens": None}, "no array tokenizer.ggml.tokens"),
        ({"merges": None}, "no array tokenizer.ggml.merges"),
        ({"merges": ["hi"]}, "'hi' in tokenizer.ggml.merges is not a pair"),
        ({"merges": ["h z"]}, "do not fit together"),
        ({"tokens": ["h"] * 9}, "same token twice"),
        ({"token_type": np.array([1])}, "9 tokens, but 1 token types"),
        ({"model": "llama", "scores": np.zeros(2)}, "9 tokens, but 2 scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_a_model_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(byte_level_metadata(**changes), "m")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "HelloWorld DON'T", ["Hello", "World", " DON'T"]),
        ("gpt-4o", "12345 a//\n b\n\nc  d", ["123", "45", " a", "//\n", " b", "\n\n", "c", " ", " d"]),
        ("gpt-4o", "été ÉTÉ naïve", ["été", " ÉTÉ", " naïve"]),
        ("tekken", "HelloWorld DON'T 12", ["Hello", "World", " DON", "'T", " ", "1", "2"]),
        ("qwen35", "कि_y it's 12", ["कि", "_y", " it", "'s", " ", "1", "2"]),
        ("qwen2", "कि", ["क", "ि"]),
        ("glm4", "it's 12345", ["it", "'s", " ", "123", "45"]),
    ],
)
def test_words(pre: str, text: str, words: list[str]) -> None:
    pieces = [text]
    for pattern in SPLITS[pre]:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        pieces = [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)]
    assert pieces == words


def test_every_named_pattern_is_a_valid_one() -> None:
    for pre in SPLITS:
        assert tokenizer_from_gguf(byte_level_metadata(pre=pre), "m").encode("hi", add_special_tokens=False) == [2]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    normal = len(tokens) - 259
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * normal]),
        "scores": np.array([0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -1.0, -3.0]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_sentencepiece_joins_the_best_score_first() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), "m")
    strings = [tokenizer.token_string(i) for i in tokenizer.encode("ab a é")]
    # "ab" beats "▁a", and then "▁" joins it; "é" is not in the vocabulary.
    assert strings == ["<s>", "▁ab", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab a é")) == "ab a é"


def test_sentencepiece_without_a_leading_space() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "m")
    assert [tokenizer.token_string(i) for i in tokenizer.encode("ab")] == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_gemma4_merges_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    merges = ["a b", "▁ ab", "ab ab", "\n \n", "▁ ▁", "▁▁ ▁"]
    extra = ["\n", "ab▁", "abab", "\n\n", "▁▁", "▁▁▁", "<turn|>"]
    plain = sentencepiece_metadata(model="gemma4", scores=None, merges=merges, add_space_prefix=False)
    tokens = [*plain["tokenizer.ggml.tokens"], *extra]
    types = np.concatenate([plain["tokenizer.ggml.token_type"], [1] * (len(extra) - 1), [3]])
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = tokenizer_from_gguf({**plain, **changes}, "m")
    reference = transformers.GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        additional_special_tokens=["<turn|>"],
    )
    for text in ("ab", " ab", "abab ab", "a\n\n\nb", "   a    b", "é ab<turn|>\nab", "\n \n", "aba"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<turn|>", "")
    assert tokenizer.encode("a")[0] == 1
