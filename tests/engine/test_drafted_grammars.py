"""Drafts of rows with a grammar: one mask behind each, and the answers of a run without."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bequest.engine.constraints.grammar import Grammar, GrammarMasks, GrammarSource
from bequest.engine.errors import GrammarTooLarge
from bequest.engine.types import Request, mask_words
from tests.engine.drafters import RecordedDrafter
from tests.engine.grammar_world import EOS, random_engine, tokenizer, vocabulary
from tests.engine.test_grammars import PERSON, answer, grammar, request

Answers = dict[tuple[str, int], tuple[object, ...]]  # by id and choice


def num_words() -> int:
    return mask_words(vocabulary().vocab_size)


def requests() -> list[Request]:
    """With a grammar and without, several choices, penalties, a stop string, a length that cuts."""
    person, line = grammar(PERSON), grammar("([a-f]{2}-){3,9}END[0-9]*")
    fields: list[dict[str, object]] = [
        {"temperature": 0.9, "max_tokens": 70},
        {"temperature": 0.0, "max_tokens": 30, "logprobs": 2},
        {"temperature": 1.0, "n": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2, "max_tokens": 50},
        {"temperature": 0.8, "max_tokens": 9, "stop": ("END",)},
    ]
    rules = [person, line, person, line, None, person, line, line]
    return [request(i, rule, **fields[i % 4]) for i, rule in enumerate(rules)]


async def answers(asked: list[Request], **fields: object) -> Answers:
    async with random_engine(**fields) as engine:  # type: ignore[arg-type]
        told = await asyncio.gather(*(answer(engine, one) for one in asked))
    return {
        (one.id, choice.index): (choice.token_ids, choice.text, choice.finish_reason, choice.logprobs)
        for one, delta in zip(asked, told, strict=True)
        for choice in delta.choices
    }


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests()


@pytest.fixture(scope="module")
def plain(asked: list[Request]) -> Answers:
    """What is said without drafts."""
    return asyncio.run(answers(asked))


@pytest.mark.parametrize("num_blocks, pipelined", [(2000, True), (2000, False), (16, True)])
@pytest.mark.parametrize("truth", [0.0, 0.7, 1.0])
async def test_answers_are_those_without_drafts(
    truth: float, num_blocks: int, pipelined: bool, asked: list[Request], plain: Answers
) -> None:
    said = {key: [*map(int, told[0])] for key, told in plain.items()}  # type: ignore[call-overload]
    drafter = RecordedDrafter(num_blocks, truth, said)
    assert await answers(asked, num_blocks=num_blocks, pipelined=pipelined, drafter=drafter) == plain
    assert drafter.num_drafted > 100


def test_masks_behind_drafts_are_those_of_one_token_at_a_time() -> None:
    """Drafts that the grammar takes, that it refuses in the middle, and behind the end."""
    rule = grammar("(ab|cd)+x")
    a, b, c, d, x = (tokenizer().encode(letter, False)[0] for letter in "abcdx")
    drafts: list[tuple[int, ...]] = [(a, b, c), (), (a, x, b), (a, b, x, EOS, a), (EOS,)]
    matchers = [rule.matcher() for _ in drafts]
    masks = np.full((sum(1 + len(drafted) for drafted in drafts), num_words()), 7, np.int32)
    GrammarMasks(1).fill(matchers, masks, drafts)
    row, counts = 0, []
    for drafted in drafts:
        alone, matcher, one = GrammarMasks(1), rule.matcher(), np.empty((1, num_words()), np.int32)
        for number in range(1 + len(drafted)):
            alone.fill([matcher], one)
            if not matcher.ended:
                assert (masks[row + number] == one).all()
            counts.append(number)
            token = drafted[number] if number < len(drafted) else EOS
            if not one[0, token // 32] >> (token % 32) & 1:
                break
            matcher.see([token])
        row += 1 + len(drafted)
    assert len(counts) > 10
    again = np.empty((len(drafts), num_words()), np.int32)
    GrammarMasks(1).fill(matchers, again)
    assert (again == again[0]).all(), "a walk moves nobody"
    several = GrammarMasks(1)
    matchers[0].see([a, b, c])
    assert matchers[0].num_seen == 1
    several.fill(matchers[:1], again[:1])
    assert np.unpackbits(again[0].view(np.uint8), bitorder="little").nonzero()[0].tolist().count(d) == 1


async def test_a_limit_behind_a_draft_fails_where_it_is_reached() -> None:
    """Whether the drafts before it were right or wrong: as without."""
    source = GrammarSource("json_schema", '{"type": "string", "pattern": "^(.*a.{15}b.*)$", "maxLength": 100000}')
    blowing = Grammar(source, vocabulary())
    quote = tokenizer().encode('"', False)[0]
    matcher, masks = blowing.matcher(), np.full((4, num_words()), 7, np.int32)
    GrammarMasks(1).fill([matcher], masks, [(quote, 40, 41)])
    assert matcher.failed is None and matcher.failed_ahead is not None and matcher.why_nothing
    assert masks[0].any() and not masks[3].any()
    GrammarMasks(1).fill([matcher], masks[:2], [(EOS,)])
    assert matcher.why_nothing is None, "another draft does not run into it"
    said = {(request(1, blowing).id, 0): [quote, 40, 41, 42, 43]}
    async with random_engine(drafter=RecordedDrafter(1, 1.0, said)) as engine:
        with pytest.raises(GrammarTooLarge):
            await answer(engine, request(1, blowing))
