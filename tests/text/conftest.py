from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bequest.engine.errors import ModelError
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.text import TextBundle, Tokenizer, load_text
from bequest.engine.text.spelling import BYTE_LEVEL_ALPHABET
from bequest.engine.text.tokenizer import SpecialTokens


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    try:
        return embedded_model_path()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def embedded(embedded_path: Path) -> TextBundle:
    return load_text(embedded_path)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """One token per byte and a few merges, so that single tokens are parts of characters."""
    vocabulary = dict(BYTE_LEVEL_ALPHABET)
    merges = [("l", "l"), ("Ġ", "a"), ("ð", "Ł"), ("ðŁ", "¦")]  # the last two: three bytes of a llama
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["ü"])  # a character of the byte alphabet, but meant as itself
    roles = SpecialTokens(bos=backend.token_to_id("<s>"), eos=backend.token_to_id("</s>"), add_bos=True)
    return Tokenizer(backend, roles, "byte-level")


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return make_byte_fallback()


def make_byte_fallback() -> Tokenizer:
    """SentencePiece's way: spaces marked, unknown characters as byte tokens, the first space dropped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "▁▁"]
    backend = Backend(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [("▁", "a"), ("▁", "▁")],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, SpecialTokens(bos=1, eos=2, add_bos=True), "byte-fallback")


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A vocabulary without exact bytes, as T5 has it."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁a", "cat", "s", "▁dog", ","]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return Tokenizer(backend, SpecialTokens(eos=1, pad=0, add_eos=True), "metaspace")
