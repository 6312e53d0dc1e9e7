"""What the records of a tenant said: against a slow search, within bounds, and to nobody else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bequest.engine._C import Error, NgramIndex, SuffixIndex, TokenList
from bequest.engine.drafting.ngrams import NgramDrafter
from bequest.engine.drafting.suffixes import RecordTexts
from bequest.engine.types import Request, Retain, SamplingParams
from bequest.engine.types.speculation import Speculation
from tests.engine.harness import Setup, ask, request, running
from tests.engine.paged_fake import expected_tokens

PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def slow_find(kept: list[list[int]], tokens: list[int], n: int) -> tuple[int, list[int]]:
    """The longest run that `tokens` ends with, the latest of equal ones, and all that follows it in its text."""
    best: tuple[int, list[int]] = (0, [])
    for text in kept:
        for end in range(n, len(text)):
            length = 0
            while length < min(end, len(tokens), 64) and text[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= max(n, best[0]):
                best = (length, text[end:])
    return best


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_index_finds_what_a_slow_search_finds(n: int) -> None:
    """While everything fits; texts are short, because of more than 32 places only the latest are looked at."""
    draw = random.Random(n)
    for _ in range(60):
        index, texts = SuffixIndex(n, 1 << draw.choice([9, 12])), {}
        for _ in range(draw.randint(1, 9)):
            text = [draw.randrange(4 if n > 1 else 30) for _ in range(draw.randint(0, 12))]
            begin = draw.randint(0, len(text))
            texts[index.learn(TokenList(text), begin)] = text[begin:]
            if draw.random() < 0.2:
                span = draw.choice([*texts])
                index.forget(*span)
                del texts[span]
            asked = [draw.randrange(4 if n > 1 else 30) for _ in range(draw.randint(0, 9))]
            run, follows = slow_find([*texts.values()], asked, n)
            most = draw.randint(1, 6)
            assert index.run(TokenList(asked)) == run
            assert list(index.follow(TokenList(asked), most)) == follows[:most]


def test_only_the_latest_tokens_are_kept() -> None:
    draw = random.Random(5)
    index, texts = SuffixIndex(3, 256), []
    for _ in range(200):
        text = [draw.randrange(1 << 30) for _ in range(draw.randint(1, 60))]
        index.learn(TokenList(text))
        texts.append(text)
        assert len(index) <= 256
        num_behind = 0  # tokens learnt since
        for known in reversed(texts):
            num_behind += len(known) + 1
            if len(known) > 3:
                found = index.follow(TokenList([7, *known[:3]]), 99)
                assert list(found) == (known[3:] if num_behind <= 256 else [])
    index.learn(TokenList(range(1000, 2000)))
    assert index.follow(TokenList([1900, 1901, 1902]), 2) == (1903, 1904) and index.run(TokenList([1, 2, 1100])) == 0


def test_what_an_index_refuses() -> None:
    for n, most in ((0, 64), (3, 63), (3, 2), (4, 4)):
        with pytest.raises(Error):
            SuffixIndex(n, most)
    assert NgramIndex(2).run(TokenList([1, 2])) == 0


def suffix(prompt: Sequence[int], **fields: object) -> Request:
    return request(prompt, PARAMS, speculation=Speculation(method="suffix"), **fields)


async def test_a_tenant_is_drafted_for_from_its_own_records_alone() -> None:
    prompt = [11, 12, 13, 14, 15]
    said = expected_tokens(prompt, 40)
    drafter = NgramDrafter("ngram")
    setup = Setup(num_lease_blocks=50, drafter=drafter, corpus=drafter.texts)
    async with running(setup) as (engine, runner):

        async def steps(asked: Request) -> int:
            before = runner.num_steps
            assert (await ask(engine, asked)).token_ids[0] == said
            return runner.num_steps - before

        first = suffix(prompt)
        assert await steps(first) >= 40
        assert await steps(request(prompt, PARAMS)) >= 40, "ngrams look at the request alone"
        assert await steps(suffix(prompt)) < 25
        assert await steps(suffix(prompt, tenant="another")) >= 40
        assert await steps(suffix(prompt, cache_salt="another")) >= 40
        assert await steps(suffix(prompt, keep_record=False, tenant="third")) >= 40
        assert await steps(suffix(prompt, tenant="third")) >= 40, "what left no record is not learnt"
        for name, _ in engine.record_names("t"):
            engine.forget("t", name)
        assert await steps(suffix(prompt)) >= 40, "a record takes its text along"
        leased = suffix(prompt, retain=Retain(60.0), tenant="fourth")
        await ask(engine, leased)
        assert await steps(suffix(prompt, tenant="fourth")) < 25
        engine.forget("fourth", leased.id)


async def test_texts_are_bounded_by_tenants_too() -> None:
    texts = RecordTexts(tokens_kept=64, most_divisions=2)
    asked = [request([1], tenant=name) for name in "abc"]
    indexes = [texts.of(one) for one in asked]
    assert texts.of(asked[2]) is indexes[2] and texts.of(asked[1]) is indexes[1]
    assert texts.of(asked[0]) is not indexes[0], "the least recently used one went"
