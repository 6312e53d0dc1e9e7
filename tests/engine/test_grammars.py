"""Rows with a grammar in the engine: what they say is what the grammar describes, however the engine runs them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from bequest.engine._C import Error, StepAnswers
from bequest.engine.config import EngineConfig
from bequest.engine.constraints.grammar import (
    UNSPELLABLE,
    Grammar,
    GrammarError,
    GrammarMasks,
    GrammarSource,
    Vocabulary,
    lark_of_any,
)
from bequest.engine.constraints.grammar_check import GrammarCheck
from bequest.engine.errors import EngineDraining, GrammarTooLarge, InternalError, InvalidRequest
from bequest.engine.kernels.flag import Flag
from bequest.engine.types import Delta, OutputMode, Request, SamplingParams, mask_words
from tests.engine.direct import LLM
from tests.engine.grammar_world import (
    EOS,
    check_answers_follow_their_grammars,
    logits_at,
    random_engine,
    random_schema,
    tokenizer,
    vocabulary,
)
from tests.text.conftest import make_byte_fallback

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def grammar(source: str | dict[str, object]) -> Grammar:
    if isinstance(source, dict):
        return Grammar(GrammarSource("json_schema", json.dumps(source)), vocabulary())
    return Grammar(GrammarSource("regex", source), vocabulary())


def request(number: int, rule: Grammar | None, **fields: object) -> Request:
    params = SamplingParams(**{"max_tokens": 100, "seed": number, "grammar": rule, **fields})  # type: ignore[arg-type]
    name = f"r{number}-{id(rule)}-{sorted(fields)}"
    return Request(name, "t", (5, 6, 7, number % 50 + 20), params, output=OutputMode.FINAL)


async def answer(engine: object, asked: Request) -> Delta:
    [delta] = [delta async for delta in engine.generate(asked)]  # type: ignore[attr-defined]
    return delta


async def test_answers_to_200_random_schemas_are_valid() -> None:
    draw = random.Random(7)
    schemas = [random_schema(draw) for _ in range(200)]
    rules = [grammar(schema) for schema in schemas]
    check = jsonschema.Draft202012Validator.FORMAT_CHECKER
    whole = 0
    async with random_engine() as engine:
        asked = [request(i, rule, max_tokens=200, temperature=0.8) for i, rule in enumerate(rules)]
        answers = await asyncio.gather(*(answer(engine, one) for one in asked))
    for schema, delta in zip(schemas, answers, strict=True):
        [choice] = delta.choices
        if choice.finish_reason == "stop":
            whole += 1
            validator = jsonschema.Draft202012Validator(schema, format_checker=check)
            validator.validate(json.loads(choice.text))
    assert whole >= 190, f"only {whole} of 200 answers came to their end"


@pytest.mark.parametrize("num_blocks", [2000, 12])
async def test_the_plain_loop_and_preemption_change_nothing(num_blocks: int) -> None:
    rule = grammar(PERSON)
    told = []
    for pipelined, blocks, queues in (
        (True, 2000, False),
        (False, 2000, False),
        (True, num_blocks, False),
        (True, num_blocks, True),
    ):
        async with random_engine(num_blocks=blocks, pipelined=pipelined, queues=queues) as engine:
            asked = [request(i, rule if i % 3 else None, temperature=0.9, max_tokens=60) for i in range(9)]
            answers = await asyncio.gather(*(answer(engine, one) for one in asked))
            told.append([delta.choices[0].token_ids for delta in answers])
    assert told[0] == told[1] == told[2] == told[3]


async def test_beside_penalties_choices_and_logprobs() -> None:
    rule = grammar(PERSON)
    async with random_engine() as engine:
        fields = {"n": 5, "temperature": 1.0, "logprobs": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        asked = request(3, rule, bad_words=((tokenizer().encode("a", False)[0],),), **fields)
        delta = await answer(engine, asked)
    assert len({choice.text for choice in delta.choices}) == 5
    for choice in delta.choices:
        jsonschema.validate(json.loads(choice.text), PERSON)
        assert choice.logprobs is not None
        for step, (token, told) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            raw = logits_at(3, choice.index, len(asked.prompt_token_ids) + step).astype(np.float64)
            raw -= np.log(np.exp(raw).sum())
            assert abs(raw[token] - told.logprob) < 1e-3  # the model's own, before the mask
            assert [token for token, _ in told.top] == np.argsort(-raw)[:3].tolist()


async def test_the_end_token_comes_at_the_end_and_there_alone() -> None:
    async with random_engine() as engine:
        delta = await answer(engine, request(1, grammar("abc|abd"), ignore_eos=True))
        [choice] = delta.choices
        assert choice.text in ("abc", "abd") and choice.token_ids[-1] == EOS and choice.finish_reason == "stop"
        cut = await answer(engine, request(2, grammar("[ab]{40}"), max_tokens=3))
        assert cut.choices[0].finish_reason == "length" and EOS not in cut.choices[0].token_ids
        other = tuple(tokenizer().encode("xyz", False))
        words = tuple((token,) for token in tokenizer().encode("a", False))
        rules = {"min_tokens": 9, "bad_words": words, "allowed_token_ids": other}
        for field, rule in rules.items():
            with pytest.raises(InvalidRequest, match="Nothing is allowed to follow") as caught:
                await answer(engine, request(3, grammar("a"), **{field: rule}))
            assert caught.value.field == field
        # The others were not touched by it.
        assert (await answer(engine, request(4, grammar("yes|no")))).choices[0].text in ("yes", "no")


async def test_stop_strings_cut_it() -> None:
    async with random_engine() as engine:
        delta = await answer(engine, request(1, grammar("[xy]{5}END[xy]+"), stop=("END",)))
    assert re.fullmatch("[xy]{5}", delta.choices[0].text) and delta.choices[0].stop_reason == "END"


async def test_a_grammar_that_grows_fails_its_request_alone() -> None:
    blowing = grammar({"type": "string", "pattern": "^(.*a.{15}b.*)$", "maxLength": 100_000})
    async with random_engine() as engine:
        broken = asyncio.ensure_future(answer(engine, request(1, blowing)))
        fine = asyncio.ensure_future(answer(engine, request(2, grammar(PERSON))))
        with pytest.raises(GrammarTooLarge, match="became too large: lexer error: too many expressions"):
            await broken
        jsonschema.validate(json.loads((await fine).choices[0].text), PERSON)


async def test_aborted_and_stopped_engines_do_not_hang() -> None:
    rule = grammar("[ab]{500}")
    async with random_engine() as engine:
        tasks = [asyncio.ensure_future(answer(engine, request(i, rule, max_tokens=400))) for i in range(4)]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        await asyncio.sleep(0.02)
        await engine.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineDraining | asyncio.CancelledError) for result in results)


@pytest.mark.parametrize("num_blocks", [400, 14])
def test_on_a_model(num_blocks: int, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", block_size=16, max_model_len=160, num_blocks=num_blocks
    )
    with LLM(config) as llm:
        check_answers_follow_their_grammars(llm)


# --- compiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, text, too_large",
    [
        ("json_schema", '{"type": "thing"}', False),
        ("json_schema", '{"not": {"type": "string"}}', False),
        ("json_schema", "[1", False),
        ("regex", "(a", False),
        ("regex", "(?=a)b", False),
        ("lark", "start: missing", False),
        ("json_schema", '{"type": "integer", "multipleOf": 829345351}', True),
    ],
)
def test_errors_of_grammars(kind: str, text: str, too_large: bool) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar(GrammarSource(kind, text), vocabulary())  # type: ignore[arg-type]
    assert caught.value.too_large == too_large and 5 < len(str(caught.value)) <= 500


def test_what_its_library_fails_at_is_said_without_its_source() -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar(GrammarSource("json_schema", json.dumps({"type": "integer", "minimum": "é" * 60})), vocabulary())
    assert str(caught.value) == "what compiles grammars cannot read it"


def test_bnf_is_taken_for_lark() -> None:
    assert Grammar(GrammarSource("lark", lark_of_any('root ::= "a" root | "b"')), vocabulary())
    with pytest.raises(GrammarError):
        lark_of_any('root ::= "a')


@pytest.mark.parametrize("rows", [0, -1], ids=["all", "fewer"])
def test_a_tokenizer_that_opens_with_a_space(rows: int) -> None:
    """SentencePiece's puts one before a text: what a grammar forces has none that it does not ask for."""
    known = make_byte_fallback()
    words = Vocabulary(known, known.vocab_size + rows, (2,))
    for text in ("b</s>a", "b a", " a"):
        forced = forced_tokens(Grammar(GrammarSource("json_schema", json.dumps({"const": text})), words))
        assert b"".join(map(known.token_bytes, forced)) == json.dumps(text).encode() + known.token_bytes(2)


def forced_tokens(rule: Grammar) -> list[int]:
    """Up to the end token, or to where there is a choice."""
    matcher, masks, tokens = rule.matcher(), GrammarMasks(1), []
    mask = np.empty((1, mask_words(rule.vocab_size)), np.int32)
    while not matcher.ended:
        masks.fill([matcher], mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        if len(allowed) != 1:
            break
        tokens += allowed
        matcher.see(allowed)
    return tokens


def test_special_tokens_are_no_text() -> None:
    """A string that spells a special token is written out in others."""
    rule = Grammar(GrammarSource("lark", 'start: "<|im_start|>x"'), vocabulary())
    ids = [token for part in ("<", "|", "im", "_", "start", "|", ">", "x") for token in tokenizer().encode(part, False)]
    assert follows(rule, [*ids, EOS])
    assert not follows(rule, [1])  # the special token itself
    assert not follows(rule, ids[:-1] + ids[:1])


def follows(rule: Grammar, token_ids: list[int]) -> bool:
    masks, matcher = GrammarMasks(1), rule.matcher()
    for token in token_ids:
        matcher.see([token])
    masks.fill([matcher], np.empty((1, mask_words(rule.vocabulary.vocab_size)), np.int32))
    return matcher.failed is None


def test_a_vocabulary_with_rows_that_no_token_has() -> None:
    """As many models have it: those rows are never allowed."""
    wide = Vocabulary(tokenizer(), tokenizer().vocab_size + 70, (EOS,))
    rule = Grammar(GrammarSource("regex", ".*"), wide)
    mask = np.empty((1, mask_words(wide.vocab_size)), np.int32)
    GrammarMasks(1).fill([rule.matcher()], mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert allowed[: tokenizer().vocab_size].sum() > 40_000 and not allowed[tokenizer().vocab_size :].any()


def test_the_check_stops_what_does_not_end() -> None:
    check = GrammarCheck(1.0, 50_000)
    bomb = "start: A\nA: /(.*a.{18})/ & /(.*b.{17})/ & /(.*c.{16}.*)/ & ~/(.*d.{15})/"
    try:
        check.check(GrammarSource("regex", "a+"))
        with pytest.raises(GrammarError, match="seconds") as caught:
            check.check(GrammarSource("lark", bomb))
        assert caught.value.too_large
        with pytest.raises(GrammarError, match="unclosed group"):
            check.check(GrammarSource("regex", "(a"))
        check.check(GrammarSource("json_schema", "{}", whitespace=" ?"))
        # Tokens by their ids, as marks of calls and thoughts are: those of a model are far above the bytes.
        check.check(GrammarSource("lark", "start: <[49999]> /[a-z]+/"))
        check.check(GrammarSource("regex", "a+", lead="lead: <[40000]>"))
        with pytest.raises(GrammarError, match="50000"):
            check.check(GrammarSource("lark", "start: <[50000]>"))
    finally:
        check.close()


def test_where_one_end_token_may_come_all_may() -> None:
    """Rows that may end, that may not, that have ended and that have failed, against one end token and bit by bit."""
    ends = (EOS, 0, 31, 32, 1000)
    several = Vocabulary(tokenizer(), tokenizer().vocab_size, ends)
    rows = {}
    for known in (vocabulary(), several):
        matchers = [Grammar(GrammarSource("regex", text), known).matcher() for text in ("abc", "(abc)?", "abc", "abc")]
        matchers[2].ended = True
        matchers[3].failed = "too large"
        rows[known] = np.zeros((4, mask_words(known.vocab_size)), np.int32)
        GrammarMasks(1).fill(matchers, rows[known])
    for row, (plain, more) in enumerate(zip(rows[vocabulary()], rows[several], strict=True)):
        allowed = np.unpackbits(plain.view(np.uint8), bitorder="little")
        if row in (0, 1):
            assert allowed[EOS] == row
        allowed[list(ends)] = allowed[EOS]
        assert (np.unpackbits(more.view(np.uint8), bitorder="little") == allowed).all()


def test_many_rows_in_several_threads_are_as_each_alone() -> None:
    texts = ["abc", "x(abc)?", "[0-9]+", "a.c"]
    rules = [Grammar(GrammarSource("regex", text), vocabulary()) for text in texts]
    matchers = [rules[row % 4].matcher() for row in range(200)]
    masks = np.zeros((200, mask_words(vocabulary().vocab_size)), np.int32)
    several = GrammarMasks(4)
    several.fill(matchers, masks)
    alone = np.zeros((4, masks.shape[1]), np.int32)
    for row, rule in enumerate(rules):
        GrammarMasks(1).fill([rule.matcher()], alone[row : row + 1])
    assert (masks == np.tile(alone, (50, 1))).all()
    first = [int(np.unpackbits(row.view(np.uint8), bitorder="little").argmax()) for row in alone]
    for row, matcher in enumerate(matchers):
        matcher.see([first[row % 4]])
    several.fill(matchers, masks)
    assert all(matcher.num_seen == 1 and matcher.failed is None for matcher in matchers)


def test_a_step_tells_its_answers_what_each_has_said() -> None:
    """One goes on, one ends, one could say nothing; the step behind it waits for all of them."""
    rule, (a, b) = grammar("a(b|c)*"), (tokenizer().encode(letter, False)[0] for letter in "ab")
    matchers = [rule.matcher() for _ in range(3)]
    first, second = StepAnswers(matchers), StepAnswers(matchers[:1])
    assert first.ready and not second.ready
    tokens, bad = np.asarray([7, a, EOS, b], np.int32), np.asarray([False, False, False, True])
    first.see(tokens, bad, 1)
    assert second.ready and [matcher.ended for matcher in matchers] == [False, True, True]
    assert [matcher.num_seen for matcher in matchers] == [1, 1, 1]
    masks = np.zeros((3, mask_words(vocabulary().vocab_size)), np.int32)
    GrammarMasks(1).fill_step(first, matchers, masks)
    allowed = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    assert allowed[b] and allowed[EOS] and not allowed[a] and (masks[1:] == -1).all()
    second.see(tokens, bad, 1)  # no "a" behind the first one
    GrammarMasks(1).fill_step(second, matchers[:1], masks)
    assert matchers[0].failed is not None and matchers[0].done and not masks[0].any()
    with pytest.raises(Error, match="no sample"):
        first.see(tokens, bad, 2)


def test_a_flag_is_set_when_masks_are_there_and_no_matcher_failed() -> None:
    """Whoever samples would find nothing, and the event loop would not know why."""
    rule, word = grammar("ab*"), np.zeros(1, np.uint32)
    flag = Flag(word.ctypes.data, 7)
    (a,) = tokenizer().encode("a", False)
    matchers = [rule.matcher(), rule.matcher()]
    masks = np.zeros((2, mask_words(vocabulary().vocab_size)), np.int32)
    first, second = StepAnswers(matchers), StepAnswers(matchers)
    assert GrammarMasks(1).fill_step(first, matchers, masks, flag) and word[0] == 7 and masks.any(1).all()
    word[0] = 0
    first.see(np.asarray([a, EOS + 1], np.int32), np.zeros(2, bool), 0)
    assert not GrammarMasks(1).fill_step(second, matchers, masks, flag) and word[0] == 0
    assert matchers[1].failed is not None and masks.any(1).tolist() == [True, False]


def test_a_model_with_fewer_tokens_than_its_tokenizer_spells_with_those_it_has() -> None:
    fewer = Vocabulary(tokenizer(), 2000, (EOS,))
    for text, spelled in (("(a|b) Republican", True), ("[a-c]zwischenzeitlich", True), ("(a|b)é", False)):
        matcher, masks = Grammar(GrammarSource("regex", text), fewer).matcher(), GrammarMasks(1)
        mask, said = np.empty((1, mask_words(2000)), np.int32), b""
        while True:
            masks.fill([matcher], mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            if len(allowed) == 0 or EOS in allowed:
                break
            said += tokenizer().token_bytes(int(allowed[-1]))
            matcher.see([int(allowed[-1])])
        assert bool(re.fullmatch(text, said.decode())) == spelled == (matcher.failed is None)
        assert spelled or matcher.failed == UNSPELLABLE


async def test_a_token_that_does_not_match_is_no_limit_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = grammar("abc")
    matcher, masks = rule.matcher(), GrammarMasks(1)
    mask = np.empty((1, mask_words(vocabulary().vocab_size)), np.int32)
    masks.fill([matcher], mask)
    matcher.see(tokenizer().encode("x", False))  # as if the sampler had not seen the mask
    monkeypatch.setattr(rule, "matcher", lambda: matcher)
    async with random_engine() as engine:
        with pytest.raises(InternalError, match='left the grammar: token "x" doesn\'t satisfy') as caught:
            await answer(engine, request(1, rule))
    assert caught.value.reason == "grammar_left" and not isinstance(caught.value, InvalidRequest)


async def test_text_that_no_token_spells_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = grammar("abc")
    matcher = rule.matcher()
    matcher.failed = UNSPELLABLE  # as it is with the vocabulary above
    monkeypatch.setattr(rule, "matcher", lambda: matcher)
    async with random_engine() as engine:
        with pytest.raises(InvalidRequest, match="no token of this model spells") as caught:
            await answer(engine, request(1, rule, grammar_field="text.format.schema"))
    assert (caught.value.reason, caught.value.field) == ("grammar_endless", "text.format.schema")
