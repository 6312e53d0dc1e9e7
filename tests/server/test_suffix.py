"""`suffix`: answers that stand between a prompt and what follows it."""

from __future__ import annotations

from tests.server.fakes import BOS
from tests.server.front import Front

MARKS = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}


async def test_the_prompt_is_put_around_the_gap(front: Front) -> None:
    front.text.tokenizer.added = dict(MARKS)
    for fields, begin in (({}, (BOS,)), ({"add_special_tokens": False}, ())):
        answer, _ = await front.post("/v1/completions", {"prompt": ["ab", [7, 8]], "suffix": "yz", **fields})
        assert answer.status == 200
        before, tokens = front.engine.submitted[-2:]
        assert before.prompt_token_ids == (*begin, 1, *b"ab", 2, *b"yz", 3)
        assert tokens.prompt_token_ids == (*begin, 1, 7, 8, 2, *b"yz", 3)


async def test_an_empty_suffix_is_none(front: Front) -> None:
    await front.post("/v1/completions", {"prompt": "ab", "suffix": ""})
    assert front.engine.submitted[-1].prompt_token_ids == (BOS, *b"ab")


async def test_refused(front: Front) -> None:
    answer, shown = await front.post("/v1/completions", {"prompt": "ab", "suffix": "c"})
    assert answer.status == 400 and shown["error"]["code"] == "unsupported_parameter"
    assert "no tokens for filling in the middle" in shown["error"]["message"]
    front.text.tokenizer.added = dict(MARKS)
    answer, shown = await front.post("/v1/completions", {"prompt": "ab", "suffix": "c", "echo": True})
    assert answer.status == 400 and shown["error"]["param"] == "echo"
