"""Beams and catalogues with the embedded model over HTTP: every item is a member, every score is the model's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import openai
import pytest

from tests.test_end_to_end import QUESTION, Server

PROMPT = "The three largest cities of France are"
VOCABULARY, EOS, FIRST_PLAIN = 49152, 2, 17  # of the embedded model; tokens before the last are special ones


@pytest.fixture(scope="module")
def server(embedded_server: Server) -> Server:
    return embedded_server


@pytest.fixture(scope="module")
def items(server: Server) -> set[tuple[int, ...]]:
    """In the catalogue `items`: 3,000 of one to four random tokens, some of them special."""
    draw = random.Random(0)
    made = {tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 4))) for _ in range(3000)}
    rows = np.full((len(made), 4), -1, "<i4")
    for row, item in zip(rows, sorted(made), strict=True):
        row[: len(item)] = item
    told: Any = server.client().post(
        "/catalogues",
        content=rows.tobytes(),
        options={"headers": {"Content-Type": "application/octet-stream"}, "params": {"name": "items", "width": 4}},
        cast_to=object,
    )
    assert told["items"] == len(made) and told["depth"] == 4
    return made


def complete(server: Server, **fields: Any) -> Any:
    model = server.client().models.list().data[0].id
    extra = {"return_token_ids": True, **fields}
    return server.client().completions.create(model=model, prompt=extra.pop("prompt", PROMPT), extra_body=extra)


def test_one_beam_is_greedy(server: Server) -> None:
    beam = complete(server, use_beam_search=True, max_tokens=12)
    assert beam.choices[0].token_ids == complete(server, temperature=0, max_tokens=12).choices[0].token_ids


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_scores_are_those_of_the_tokens(server: Server, penalty: float) -> None:
    answer = complete(server, use_beam_search=True, n=4, beam_width=6, max_tokens=5, length_penalty=penalty, logprobs=2)
    prompt = answer.choices[0].prompt_token_ids
    scores = [choice.beam_score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True) and len({tuple(c.token_ids) for c in answer.choices}) == 4
    for choice in answer.choices:
        read = complete(server, prompt=[*prompt, *choice.token_ids], max_tokens=0, prompt_logprobs=0)
        given = read.choices[0].prompt_logprobs[len(prompt) :]
        alone = [entry[str(token)]["logprob"] for entry, token in zip(given, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(alone), abs=1e-3)
        assert choice.logprobs.token_logprobs == pytest.approx(alone, abs=1e-3)
        assert choice.beam_score == pytest.approx(choice.cumulative_logprob / len(choice.token_ids) ** penalty)
    assert answer.usage.prompt_tokens == len(prompt), "the prompt is counted once"
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"prompt": [PROMPT, "Once"]}], ids=["plain", "echo", "two"])
def test_choices_tell_the_same_however_much_is_told(server: Server, fields: dict[str, Any]) -> None:
    """Those that tell little are written in one go."""
    asked = {"use_beam_search": True, "n": 4, "max_tokens": 3, "ignore_eos": True, "cache_salt": "columns", **fields}
    more = [choice.to_dict() for choice in complete(server, **asked).choices]
    for choice in more:
        del choice["token_ids"], choice["prompt_token_ids"]
    few = [choice.to_dict() for choice in complete(server, **asked, return_token_ids=False).choices]
    assert few == more and all(choice["finish_reason"] == "length" and choice["text"] for choice in few)
    assert [list(choice) for choice in few] == [list(choice) for choice in more]


def test_beams_of_a_leased_parent(server: Server) -> None:
    parent = complete(server, max_tokens=20, temperature=0, retain=True)
    asked = {"use_beam_search": True, "n": 3, "beam_width": 5, "max_tokens": 4}
    child = complete(server, prompt=" In short:", continuation_of=parent.id, retain={"ttl": 60}, **asked)
    assert child.continuation["source"] == "blocks" and child.retained["id"] == child.id
    whole = complete(server, prompt=child.choices[0].prompt_token_ids, cache_salt="afresh", **asked)
    assert [c.token_ids for c in child.choices] == [c.token_ids for c in whole.choices]
    assert [c.beam_score for c in child.choices] == pytest.approx([c.beam_score for c in whole.choices], abs=1e-4)
    second = complete(server, prompt="", continuation_of=child.id, continuation_choice=2, max_tokens=1)
    assert second.continuation["at"] == child.usage.prompt_tokens + 4


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True, "max_tokens": 30},
        {"n": 12, "temperature": 1.5, "seed": 1},
        {"n": 5, "top_p": 0.9, "max_tokens": 4, "repetition_penalty": 1.2},
        {"use_beam_search": True, "n": 16},
        {"use_beam_search": True, "n": 7, "beam_width": 40, "max_tokens": 4, "ignore_eos": True},
        {"use_beam_search": True, "n": 3, "length_penalty": 2, "early_stopping": "never"},
        {"use_beam_search": True, "n": 3, "beam_width": 40, "early_stopping": True, "min_tokens": 3},
    ],
)
def test_every_answer_is_an_item(server: Server, items: set[tuple[int, ...]], fields: dict[str, Any]) -> None:
    answer = complete(server, catalogue="items", **fields)
    assert len(answer.choices) == fields.get("n", 1)
    client: Any = server.client()
    for choice in answer.choices:
        item = tuple(token for token in choice.token_ids if token != EOS)
        assert item in items and choice.finish_reason in ("stop", "length")
        shown = client.post(f"{server.url}/detokenize", body={"tokens": list(item)}, cast_to=object)
        assert choice.text == shown["prompt"]
    if fields.get("use_beam_search"):
        assert len({tuple(choice.token_ids) for choice in answer.choices}) == len(answer.choices)


def test_a_search_that_is_wide_enough_ranks_the_whole_catalogue(server: Server) -> None:
    draw = random.Random(1)
    items = sorted({tuple(draw.randrange(FIRST_PLAIN, VOCABULARY) for _ in range(3)) for _ in range(9)})
    client: Any = server.client()
    client.post("/catalogues", body={"name": "nine", "items": items}, cast_to=object)
    answer = complete(server, use_beam_search=True, n=20, max_tokens=3, catalogue="nine")
    prompt = answer.choices[0].prompt_token_ids
    expected = {}
    for item in items:
        read = complete(server, prompt=[*prompt, *item], max_tokens=0, prompt_logprobs=0)
        given = read.choices[0].prompt_logprobs[len(prompt) :]
        expected[item] = sum(entry[str(token)]["logprob"] for entry, token in zip(given, item, strict=True)) / 3
    ranked = sorted(items, key=lambda item: -expected[item])
    assert [tuple(choice.token_ids) for choice in answer.choices] == ranked, "all of them, though more were asked for"
    assert [c.beam_score for c in answer.choices] == pytest.approx([expected[item] for item in ranked], abs=1e-3)


def test_a_chat_answers_with_an_item(server: Server) -> None:
    client: Any = server.client()
    client.post("/catalogues", body={"name": "cities", "items": ["London", "Paris", "Rome"]}, cast_to=object)
    model = client.models.list().data[0].id
    for fields in ({}, {"use_beam_search": True, "n": 2, "beam_width": 3}):
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, extra_body={"catalogue": "cities", **fields}
        )
        assert answer.choices[0].message.content == "Paris"
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, extra_body={"catalogue": "cities"}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Paris"


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True, "n": 2}])
def test_what_leaves_nothing_to_say_is_the_clients_mistake(
    server: Server, items: set[tuple[int, ...]], fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="allowed to follow"):
        complete(server, catalogue="items", allowed_token_ids=[EOS], **fields)
    with pytest.raises(openai.BadRequestError, match="allowed to follow"):
        complete(server, catalogue="items", min_tokens=5, max_tokens=9, **fields)


def test_more_ends_than_can_be_ranked(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="send fewer stop_token_ids") as caught:
        complete(server, use_beam_search=True, beam_width=500, max_tokens=2, stop_token_ids=list(range(20, 30)))
    assert caught.value.param == "stop_token_ids"
