"""Matchers through llguidance's C interface, beside llguidance's own class for Python."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest

from bequest.engine import _C
from bequest.engine.constraints.grammar import (
    Grammar,
    GrammarError,
    GrammarMasks,
    GrammarSource,
    byte_tokens,
    compile_source,
    grammar_tokens,
)
from bequest.engine.types import IntArray, mask_words
from tests.engine.grammar_world import EOS, random_schema, tokenizer, vocabulary

BYTES = [bytes([byte]) for byte in range(256)]
SOURCES = [
    GrammarSource("json_schema", json.dumps({"type": "array", "minItems": 9, "items": {"enum": ["small", "large"]}})),
    GrammarSource("json_schema", json.dumps({"type": "string", "maxLength": 40})),
    GrammarSource("regex", r"[A-Z][a-z]+ (19|20)\d\d-(0[1-9]|1[0-2]), zwischenzeitlich(\.| oder nicht)"),
    GrammarSource(
        "lark", 'start: "the capital of " /[A-Z][a-z]{3,9}/ " is " place\nplace: "here" | "in the " /[a-z]+/'
    ),
    *(GrammarSource("json_schema", json.dumps(random_schema(random.Random(seed)))) for seed in range(6)),
]


@cache
def reference_tokenizer() -> llguidance.LLTokenizer:
    """Reads the tokenizer by itself."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(tokenizer().backend.to_str())
        file.flush()
        return llguidance.LLTokenizer(file.name, n_vocab=tokenizer().vocab_size, eos_token=EOS)


def reference(source: GrammarSource) -> llguidance.LLMatcher:
    make = llguidance.LLMatcher
    separators: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    text = {
        "json_schema": lambda: make.grammar_from_json_schema(source.text, overrides=separators),
        "regex": lambda: make.grammar_from_regex(source.text),
        "lark": lambda: source.text,
    }[source.kind]()
    return make(reference_tokenizer(), text, log_level=0)


def mask_of(matcher: llguidance.LLMatcher) -> IntArray:
    return np.frombuffer(matcher.compute_bitmask(), np.int32)[: mask_words(tokenizer().vocab_size)]


def allowed(mask: IntArray) -> list[int]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_every_mask_of_a_walk_is_llguidances(source: GrammarSource) -> None:
    draw = random.Random(5)
    for _ in range(2):
        masks, matcher, theirs = GrammarMasks(1), Grammar(source, vocabulary()).matcher(), reference(source)
        mask = np.empty((1, mask_words(tokenizer().vocab_size)), np.int32)
        for _ in range(60):
            masks.fill([matcher], mask)
            assert (mask[0] == mask_of(theirs)).all() and matcher.failed is None
            token = draw.choice(allowed(mask[0]))
            matcher.see([token])
            if matcher.ended:
                break
            assert theirs.consume_token(token)


def test_masks_behind_drafts_are_llguidances() -> None:
    draw = random.Random(6)
    matchers = [Grammar(source, vocabulary()).matcher() for source in SOURCES]
    drafts, masks_of = [], []
    for source in SOURCES:
        theirs, drafted, behind = reference(source), [], []
        for wrong in (False, False, False, True):  # the last one is refused, or it comes
            mask = mask_of(theirs)
            behind.append(mask)
            token = draw.randrange(tokenizer().vocab_size) if wrong else draw.choice(allowed(mask))
            if token == EOS:
                break
            drafted.append(token)
            if theirs.try_consume_tokens([token]) != 1:
                behind.append(np.zeros_like(mask))
                break
        else:
            behind.append(mask_of(theirs))
        drafts.append(tuple(drafted))
        masks_of.append(behind)
    masks = np.full((sum(1 + len(drafted) for drafted in drafts), mask_words(tokenizer().vocab_size)), 7, np.int32)
    GrammarMasks(1).fill(matchers, masks, drafts)
    assert sum(map(len, drafts)) >= 30
    assert (masks == np.concatenate(masks_of)).all()


def test_a_forced_text_is_tokenised_once() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(text.encode())

    tokens = grammar_tokens([*BYTES, b"<end>"], {256}, 256, encode)
    start = compile_source(GrammarSource("lark", f'start: "{"many words " * 20}" /[ab]/'), tokens)
    assert len(asked) == len(set(asked)) > 1, "the trial follows what is forced, token by token"
    before = len(asked)
    for _ in range(3):
        copy = start.copy()
        copy.try_first_masks()
        assert not copy.is_error
    assert len(asked) == before


def test_a_tokenizer_that_fails_is_told_and_does_no_harm() -> None:
    told: list[Any] = []

    def encode(text: str) -> list[int]:
        raise OSError("gone")

    tokens = grammar_tokens([*BYTES, b"<end>"], {256}, 256, encode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", told.append)
        with pytest.raises(GrammarError, match="no token of this model spells"):
            compile_source(GrammarSource("regex", "abc"), tokens)
    assert told and all(isinstance(one.exc_value, OSError) for one in told)


def test_a_zero_byte_is_a_part_of_the_grammar() -> None:
    start = compile_source(GrammarSource("regex", "a\x00b"), byte_tokens(0))
    assert start.count_valid(list(b"a\x00bc")) == 3


def test_another_library_is_refused() -> None:
    for library, why in (("/nowhere.so", "cannot be loaded"), (_C.__file__, "no function llg_")):
        with pytest.raises(_C.Error, match=why):
            _C.GrammarTokens(library, BYTES, 0, lambda text: [])


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    matcher = _C.GrammarMatcher(compile_source(GrammarSource("regex", "abc"), byte_tokens(0)), [256])
    mask = np.zeros(100, np.int32)
    with pytest.raises(_C.Error, match="a bit for each token"):
        _C.fill_masks([(matcher, 0)], _C.address(mask), 100, 1)
    with pytest.raises(_C.Error, match="a bit for each token"):
        _C.StepAnswers([matcher]).fill(_C.address(mask), 100, 1, None)
