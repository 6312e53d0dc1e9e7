"""What followed the same tokens before: against a slow search, and what it is worth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bequest.engine._C import Error, NgramIndex, TokenList
from bequest.engine.drafting.ngrams import NgramDrafter, NgramGuesses
from bequest.engine.drafting.pace import Account, Pace
from bequest.engine.runner.cuda_times import draft_times
from bequest.engine.types import SamplingParams
from bequest.engine.types.speculation import ON_CPU, ON_GPU, Speculation, parse_speculative
from tests.engine.harness import Setup, ask, ask_all, request, running
from tests.engine.paged_fake import expected_tokens
from tests.engine.test_differential import check, crowd


def slow_follow(text: list[int], tokens: list[int], n: int, most: int) -> list[int]:
    """The longest run that `tokens` ends with, the latest of equal ones, by trying all of them."""
    best, longest = 0, n - 1
    for end in range(n, len(text)):
        length = 0
        while length < min(end, len(tokens), 64) and text[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= n and length >= longest + (length == longest == n - 1):
            best, longest = end, max(longest, length)
    found: list[int] = []
    while best and len(found) < most:
        at = best + len(found)
        found.append(text[at] if at < len(text) else found[at - len(text)])
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_index_finds_what_a_slow_search_finds(n: int) -> None:
    draw = random.Random(n)
    for _ in range(60):
        index, tokens = NgramIndex(n), TokenList()
        for _ in range(draw.randint(1, 40)):
            tokens.extend(draw.randrange(3 if n > 1 else 20) for _ in range(draw.randint(1, 3)))
            index.learn(tokens)
            most = draw.randint(1, 6)
            # Of more than 32 places only the latest are looked at, so texts are short.
            assert list(index.follow(tokens, most)) == slow_follow(tokens.to_list(), tokens.to_list(), n, most)
        assert len(index) == len(tokens)


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    index, tokens = NgramIndex(2), TokenList([1, 2, 3, 1, 2, 3, 1])
    index.learn(tokens)
    assert index.follow(tokens, 7) == (2, 3, 1, 2, 3, 1, 2)
    assert index.follow(TokenList([9, 9]), 3) == () and index.follow(TokenList([1]), 3) == ()


def test_a_text_that_became_shorter_is_refused() -> None:
    index = NgramIndex(2)
    index.learn(TokenList([1, 2, 3]))
    with pytest.raises(Error, match="shorter"):
        index.learn(TokenList([1, 2]))
    with pytest.raises(Error, match="at least one"):
        NgramIndex(0)


def test_long_texts_stay_findable_as_the_index_grows() -> None:
    draw = random.Random(1)
    text = [draw.randrange(1 << 30) for _ in range(5000)]
    index, tokens = NgramIndex(3), TokenList()
    for token in text:
        tokens.append(token)
        index.learn(tokens)
    for at in (0, 17, 2500, 4990):
        assert list(index.follow(TokenList([7, *text[at : at + 3]]), 5)) == text[at + 3 : at + 8]


def test_the_length_follows_what_was_right() -> None:
    pace = Pace(ON_CPU)
    begins = pace.length(8)
    assert 1 <= begins <= 4
    for _ in range(6):
        pace.note(4, 4)
    assert pace.length(16) > begins and pace.length(2) == 2
    rests = 0
    for _ in range(40):
        if pace.rests():
            rests += 1
        elif count := pace.length(8):
            pace.note(count, 0)
    assert rests > 20, "what is always wrong is seldom tried"


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "plain"])
@pytest.mark.parametrize("num_blocks", [400, 42], ids=["ample", "tiny"])
async def test_answers_are_the_same_with_ngrams(num_blocks: int, pipelined: bool) -> None:
    """The fake says what nobody could guess, but it says it twice: what was said before stands in the prompt."""
    jobs = []
    for prompt, params in crowd(seed=3, count=12):
        said = expected_tokens(prompt, 12)
        jobs.append(([*prompt, *said, *prompt][-60:], params))
    setup = Setup(num_blocks, chunk=16, pipelined=pipelined, max_model_len=160, drafter=NgramDrafter("ngram"))
    async with running(setup) as (engine, _):
        for (prompt, params), answer in zip(jobs, await ask_all(engine, [request(*job) for job in jobs]), strict=True):
            check(prompt, params, answer.token_ids)


async def test_a_prediction_is_drafted_and_counted() -> None:
    prompt, params = [11, 12, 13], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    said = expected_tokens(prompt, 40)
    steps = {}
    for name, expected in (
        ("right", said),
        ("wrong", [*said[:3], *[5] * 37]),
        ("half", [*said[:20], 9, 9, *said[20:]]),
        ("none", []),
    ):
        wish = Speculation(prediction=tuple(expected))
        async with running(Setup(drafter=NgramDrafter("ngram"))) as (engine, runner):
            answer = await ask(engine, request(prompt, params, speculation=wish))
            assert answer.token_ids[0] == said, name
            steps[name] = runner.num_steps
            usage = answer.usage
        assert usage is not None
        right, wrong = usage.predicted_tokens, usage.mispredicted_tokens
        assert (right is None) == (name == "none")
        if name == "right":
            assert right is not None and right > 25 and wrong < 4
        if name == "wrong":
            assert right is not None and right <= 3 and wrong > 0
    assert steps["right"] * 2 < steps["none"] and steps["half"] < steps["none"]


async def test_a_request_may_refuse_drafts() -> None:
    prompt = [1, 2, 3, 4]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    said = expected_tokens(prompt, 30)
    async with running(Setup(drafter=NgramDrafter("ngram"))) as (engine, runner):
        wish = Speculation(method="off", prediction=tuple(said))
        answer = await ask(engine, request(prompt, params, speculation=wish))
        assert answer.token_ids[0] == said and runner.num_steps >= 30
    async with running(Setup(drafter=NgramDrafter("off"))) as (engine, runner):
        assert (await ask(engine, request(prompt, params))).token_ids[0] == said and runner.num_steps >= 30
        before = runner.num_steps
        await ask(engine, request(prompt, params, speculation=Speculation(prediction=tuple(said))))
        assert runner.num_steps - before < 20, "who predicts asks for drafts"


def test_words() -> None:
    assert parse_speculative("auto") == ("auto", None) and parse_speculative("ngram:4") == ("ngram", 4)
    assert parse_speculative("suffix") == ("suffix", None) and parse_speculative("suffix:2") == ("suffix", 2)
    for wrong in ("", "ngrams", "ngram:", "ngram:0", "ngram:17", "off:2", "ngram:x", "suffix:0"):
        with pytest.raises(ValueError, match="speculative"):
            parse_speculative(wrong)


def test_beside_others_a_draft_has_to_bring_more() -> None:
    """It costs a step more: what pays alone does not, and a first try hopes for much."""
    alone, beside = Pace(ON_CPU), Pace(ON_CPU)
    beside.beside = True
    assert alone.length(8) > 0 and beside.length(8) > 2
    for pace in (alone, beside):
        for _ in range(4):
            pace.note(2, 1)  # half of them
    assert alone.length(1) == 1 and not alone.rests() and beside.rests()
    for _ in range(8):
        beside.note(8, 8)
    assert beside.length(8) == 8


def test_behind_an_edit_two_tokens_are_enough_and_have_a_pace_of_their_own() -> None:
    text = list(range(100, 160))
    said = TokenList([*text, 7, *text[:12], 8, *text[13:15]])  # another token for the thirteenth, and two of the rest
    guesses = NgramGuesses(len(text) + 1, (), 8, ON_CPU)
    guesses.look(said, 8, beside=False)
    assert guesses.waits
    drafts = guesses.draft(said, 8)
    assert drafts == tuple(text[15 : 15 + len(drafts)]) and drafts
    for _ in range(4):
        guesses.learn(len(drafts), 0)  # pairs are wrong: they rest, and runs do not
    guesses.look(said, 8, beside=False)
    assert not guesses.waits
    said.append(text[15])
    guesses.look(said, 8, beside=False)
    assert guesses.waits


def test_lengths_stop_where_the_next_row_costs_a_third_of_a_step() -> None:
    """Steps of one, two, four, eight and sixteen rows have kernels; beyond that nothing was measured."""
    times = draft_times((1, 2, 4, 8, 16), (3.76e-3, 3.7e-3, 3.8e-3, 5.4e-3, 5.5e-3), one_pass=0.4e-3)
    assert times.steps[:5] == pytest.approx((1.08, 1.08, 1.09, 1.09, 1.516), abs=2e-3) and len(times.steps) == 16
    costs = replace(ON_GPU, steps=times.steps)
    pace = Pace(costs)
    for most, best in ((2, 2), (4, 3), (7, 7), (16, 15)):
        for _ in range(12):  # which are all right
            pace.note(most, most)
        assert pace.length(most) == best, most
    assert times.one_pass is not None
    by_model = costs.by_model(times.one_pass)
    assert by_model.of(3, beside=False) == pytest.approx(costs.of(3, beside=False) + 4 * times.one_pass)
    assert by_model.of(3, beside=True) == pytest.approx(costs.of(3, beside=True) + 4 * times.one_pass)


@pytest.mark.parametrize("beside", [False, True])
def test_an_account_bounds_what_wrong_guesses_cost(beside: bool) -> None:
    """Whatever they are made by: here by three kinds in turn, which are always wrong."""
    costs = replace(ON_GPU, steps=(1.1, 1.14, 1.22, 1.22, *(1.4,) * 12))
    account = Account()
    paces = [Pace(costs, account=account) for _ in range(3)]
    seconds, tries = 0.0, 0
    for number in range(200):
        account.note_tokens(1)
        pace = paces[number % 3]
        pace.beside = beside
        length = 0 if pace.rests() else pace.length(16)
        seconds += 1 if not length else (1 if beside else 0) + costs.of(length, beside=beside)
        if length:
            tries += 1
            pace.note(length, 0)
    assert tries > 1 and seconds < 200 * 1.02
    paces[0].note(8, 8)
    assert paces[0].length(8) > 0, "what it brings pays for more"
