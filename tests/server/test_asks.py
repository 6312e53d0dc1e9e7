"""`Ask`: complete when it is made, and what the engine gets of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from bequest.engine.types import OutputMode, Retain, SamplingParams, Terms
from bequest.server.asks.ask import Ask
from bequest.server.asks.lengths import Length
from bequest.server.asks.prompt import Prompt, Truncation
from bequest.server.asks.sampling import NOTHING_CHOSEN, NOTHING_SAMPLED, Chosen
from bequest.server.asks.terms import AskTerms
from bequest.server.wire.errors import ApiError
from tests.server.front import Front

TERMS = AskTerms(
    tenant="t", priority=3, deadline=9.0, max_prompt_tokens=None, record=Terms(name="mine", keep_record=True)
)
PARAMS = SamplingParams(max_tokens=0)


def ask(*tokens: int, **fields: Any) -> Ask:
    prompts = tuple(Prompt((token,)) for token in tokens)
    return Ask(**{"id": "cmpl-1", "prompts": prompts, "params": (PARAMS,) * len(prompts), "terms": TERMS, **fields})


def test_a_request_for_each_prompt() -> None:
    first, second = ask(5, 6, output=OutputMode.FINAL).requests
    assert (first.id, first.terms.name, first.prompt_token_ids) == ("cmpl-1", "mine", (5,))
    assert (second.id, second.terms.name, second.prompt_token_ids) == ("cmpl-1-1", None, (6,))
    assert {r.tenant for r in (first, second)} == {"t"} and {r.output for r in (first, second)} == {OutputMode.FINAL}


def test_it_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ask(5).id = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields",
    [
        {"params": ()},
        {"terms": structs.replace(TERMS, record=Terms(retain=Retain(5.0)))},
        {"suffixes": ((1,),)},
    ],
)
def test_what_is_of_one_prompt_alone(fields: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        ask(5, 6, **fields)


def test_the_parents_salt_unless_the_client_has_its_own() -> None:
    prompt = Prompt((5,), cache_salt="parents")
    assert ask(5, prompts=(prompt,)).requests[0].cache_salt == "parents"
    own = structs.replace(TERMS, cache_salt="own")
    assert ask(5, prompts=(prompt,), terms=own).requests[0].cache_salt == "own"


def test_nothing_sampled_is_what_the_engine_takes_for_it(front: Front) -> None:
    assert NOTHING_SAMPLED.params(Prompt((1,)), front.engine.info) == SamplingParams(max_tokens=0, temperature=0.0)


def test_every_field_of_sampling_is_chosen_or_depends_on_the_prompt() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == Chosen.__annotations__.keys() | {"max_tokens", "min_tokens", "grammar", "grammar_field", "rules"}
    assert NOTHING_CHOSEN.keys() == Chosen.__annotations__.keys()


@pytest.mark.parametrize(
    ("length", "prompt_len", "limit"),
    [
        (Length(None), 10, 90),
        (Length(None, default=16), 10, 16),
        (Length(None, default=16), 95, 5),
        (Length(7, default=16), 10, 7),
        (Length(0), 100, 0),
    ],
)
def test_how_long_an_answer_may_become(length: Length, prompt_len: int, limit: int) -> None:
    assert length.within(prompt_len, 100, shortest=1) == limit


def test_what_is_kept_of_a_prompt() -> None:
    assert Truncation().of_prompt([1, 2, 3], 9) == (1, 2, 3)
    assert Truncation(2).of_prompt([1, 2, 3], 9) == (2, 3)
    assert Truncation(-1, completion=4).of_prompt(range(9), 6) == (7, 8)
    assert Truncation(-1, completion=4).of_encoder([1, 2, 3], 2) == [2, 3]
    with pytest.raises(ApiError, match="from 1 to 9"):
        Truncation(10).of_prompt([1], 9)
