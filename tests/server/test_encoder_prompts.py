"""Prompts of encoder-decoder models in /v1/completions: every form, what becomes of it, and every complaint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bequest.engine.types import Request
from bequest.engine.types.encoder import EncoderInfo, TokenRules
from tests.server.fakes import BOS, EOS
from tests.server.front import Front

START = 7
INFO = EncoderInfo(
    takes="tokens",
    max_len=64,
    decoder_start_token_id=START,
    default_decoder_prompt=(START, 9),
    forced_bos_token_id=9,
    forced_eos_token_id=EOS,
    suppress_tokens=(3,),
    begin_suppress_tokens=(4,),
)
HI = [BOS, *b"hi"]


@pytest.fixture
def model(front: Front) -> Front:
    front.engine.info = replace(front.engine.info, encoder=INFO)
    return front


async def submitted(model: Front, prompt: Any, **fields: Any) -> list[Request]:
    before = len(model.engine.submitted)
    answer, body = await model.post("/v1/completions", {"prompt": prompt, **fields})
    assert answer.status == 200, body
    return model.engine.submitted[before:]


async def prompts_of(model: Front, prompt: Any, **fields: Any) -> tuple[list[int], list[int]]:
    """Encoder and decoder tokens of the one request."""
    [request] = await submitted(model, prompt, **fields)
    assert request.encoder is not None
    return list(request.encoder.token_ids), list(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("given", "encoder"),
    [
        ("hi", HI),
        ([1, 2, 3], [1, 2, 3]),
        ({"prompt": "hi"}, HI),
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"encoder_prompt": "hi"}, HI),
        ({"encoder_prompt": {"prompt": "hi"}, "decoder_prompt": None}, HI),
    ],
)
async def test_a_single_prompt_goes_to_the_encoder(model: Front, given: Any, encoder: list[int]) -> None:
    assert await prompts_of(model, given) == (encoder, [START, 9])


@pytest.mark.parametrize("first", ["hi", HI, {"prompt": "hi"}, {"prompt_token_ids": HI}])
@pytest.mark.parametrize(
    ("second", "decoder"),
    [
        ("ok", [START, *b"ok"]),
        ([20, 21], [START, 20, 21]),
        ({"prompt": "ok"}, [START, *b"ok"]),
        ({"prompt_token_ids": [START, 20]}, [START, 20]),
        ([START], [START]),
        ("", [START]),
        ([], [START]),
    ],
)
async def test_both_prompts_in_any_mix(model: Front, first: Any, second: Any, decoder: list[int]) -> None:
    assert await prompts_of(model, {"encoder_prompt": first, "decoder_prompt": second}) == (HI, decoder)


async def test_several_prompts_of_all_kinds(model: Front) -> None:
    pair = {"encoder_prompt": [5, 6], "decoder_prompt": "ok"}
    requests = await submitted(model, ["hi", [1, 2], {"prompt_token_ids": [3]}, pair])
    assert [r.encoder.token_ids for r in requests if r.encoder] == [tuple(HI), (1, 2), (3,), (5, 6)]
    assert [r.prompt_token_ids for r in requests] == [(START, 9)] * 3 + [(START, *b"ok")]


async def test_special_tokens_and_truncation_are_the_encoders(model: Front) -> None:
    assert (await prompts_of(model, "hi", add_special_tokens=False))[0] == list(b"hi")
    assert (await prompts_of(model, "x" * 200, truncate_prompt_tokens=-1))[0] == [ord("x")] * 64
    assert (await prompts_of(model, [1, 2, 3], truncate_prompt_tokens=2))[0] == [2, 3]


async def test_the_models_rules_come_with_the_request(model: Front) -> None:
    [plain] = await submitted(model, "hi")
    assert plain.params.rules == TokenRules((3,), (4,), None, EOS)
    [alone] = await submitted(model, {"encoder_prompt": "hi", "decoder_prompt": [START]})
    assert alone.params.rules == TokenRules((3,), (4,), 9, EOS), "BOS is forced right behind the start token"
    [endless] = await submitted(model, "hi", ignore_eos=True)
    assert endless.params.rules == TokenRules((3,), (4,), None, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_both_prompts_come_back(model: Front, stream: bool) -> None:
    body = {"prompt": {"encoder_prompt": "hi", "decoder_prompt": "ok"}, "return_token_ids": True, "stream": stream}
    answer, content = await model.post("/v1/completions", body)
    assert answer.status == 200
    if stream:
        assert b'"encoder_prompt_token_ids":[256,104,105]' in content and b'"prompt_token_ids":[7,111,107]' in content
        return
    choice = content["choices"][0]
    assert (choice["encoder_prompt_token_ids"], choice["prompt_token_ids"]) == (HI, [START, *b"ok"])


async def test_a_continuation_has_its_parents_input(model: Front) -> None:
    [parent] = await submitted(model, {"encoder_prompt": "hi", "decoder_prompt": "ok"}, request_id="p")
    [child] = await submitted(model, " so", continuation_of="p")
    assert child.encoder == parent.encoder
    assert child.prompt_token_ids[:3] == (START, *b"ok") and child.prompt_token_ids[-3:] == tuple(b" so")
    assert child.params.rules == TokenRules((3,), (), None, EOS), "it is not at the beginning"


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ("", "prompt", "nothing for the encoder to read"),
        ([], "prompt", "empty list"),
        ({"encoder_prompt": "", "decoder_prompt": "x"}, "prompt.encoder_prompt", "nothing for the encoder to read"),
        ({"encoder_prompt": {"prompt_token_ids": []}}, "prompt.encoder_prompt.prompt_token_ids", "is empty"),
        (["hi", ""], "prompt[1]", "is empty"),
        ({"decoder_prompt": "x"}, "prompt.encoder_prompt", "is missing"),
        ({}, "prompt", "neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "both"),
        ({"text": "a"}, "prompt.text", "is not known here"),
        ({"encoder_prompt": "a", "prompt": "b"}, "prompt.prompt", "is not known here"),
        ({"encoder_prompt": 3}, "prompt.encoder_prompt", "a string or a list of token ids"),
        ({"prompt_token_ids": "abc"}, "prompt.prompt_token_ids", "a list of token ids"),
        ({"encoder_prompt": ["a"]}, "prompt.encoder_prompt[0]", "a token id"),
        ({"encoder_prompt": [999]}, "prompt.encoder_prompt[0]", "not a token id of this model"),
        ({"encoder_prompt": "a", "decoder_prompt": [-1]}, "prompt.decoder_prompt[0]", "not a token id of this model"),
        ([1] * 65, "prompt", "maximum context length is 64 tokens"),
        ("x" * 100, "prompt", "maximum context length is 64 tokens"),
        ("x" * 10_000, "prompt", "maximum context length is 64 tokens"),
        ({"encoder_prompt": "a", "decoder_prompt": [8] * 512}, "prompt.decoder_prompt", "maximum context length"),
        ({"encoder_prompt": "a", "decoder_prompt": [8] * 500}, "prompt.decoder_prompt", "maximum context length"),
        ({"encoder_prompt": "a", "decoder_prompt": "x" * 5000}, "prompt.decoder_prompt", "maximum context length"),
    ],
)
async def test_complaints_name_the_field(model: Front, prompt: Any, param: str, says: str) -> None:
    answer, body = await model.post("/v1/completions", {"prompt": prompt, "max_tokens": 20})
    assert answer.status == 400 and body["error"]["param"] == param
    assert says in body["error"]["message"], body["error"]["message"]
    assert not model.engine.submitted


async def test_an_encoder_prompt_needs_an_encoder(front: Front) -> None:
    for given, param in (({"encoder_prompt": "a"}, "prompt.encoder_prompt"), (["x", {"encoder_prompt": [1]}], None)):
        answer, body = await front.post("/v1/completions", {"prompt": given})
        assert answer.status == 400 and "no encoder" in body["error"]["message"]
        assert body["error"]["param"] == (param or "prompt[1].encoder_prompt")
    [request] = await submitted(front, {"prompt_token_ids": [1, 2]})
    assert request.prompt_token_ids == (1, 2) and request.encoder is None and request.params.rules is None


async def test_chat_and_echo_and_audio_are_told_where_to_go(model: Front) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer, body = await model.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 400 and "/v1/completions" in body["error"]["message"]
    answer, body = await model.post("/v1/completions", {"prompt": "hi", "echo": True})
    assert (answer.status, body["error"]["param"]) == (400, "echo")
    model.engine.info = replace(model.engine.info, encoder=replace(INFO, takes="audio"))
    answer, body = await model.post("/v1/completions", {"prompt": "hi"})
    assert answer.status == 400 and "/v1/audio/transcriptions" in body["error"]["message"]
    model.engine.info = replace(model.engine.info, encoder=None)
    model.text.chat_template = None
    answer, body = await model.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 400 and "no chat template" in body["error"]["message"]


async def test_a_pair_cannot_continue(model: Front) -> None:
    await submitted(model, "hi", request_id="p")
    answer, body = await model.post("/v1/completions", {"prompt": {"encoder_prompt": "x"}, "continuation_of": "p"})
    assert (answer.status, body["error"]["param"]) == (400, "prompt.encoder_prompt")


@pytest.mark.parametrize(
    "prompt, param", [(list(range(65)), "prompt"), ({"encoder_prompt": "a" * 99}, "prompt.encoder_prompt")]
)
async def test_an_input_too_long_for_the_encoder(model: Front, prompt: Any, param: str) -> None:
    """Clients know the error by both halves of its sentence."""
    answer, body = await model.post("/v1/completions", {"prompt": prompt})
    error = body["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "This model's maximum context length is 64 tokens" in error["message"]
    assert "the prompt is too long: " in error["message"] and error["details"]["max_encoder_len"] == 64


@pytest.mark.parametrize("takes, where", [("tokens", "/v1/completions"), ("audio", "/v1/audio/transcriptions")])
async def test_responses_say_where_to_go(model: Front, takes: Any, where: str) -> None:
    model.engine.info = replace(model.engine.info, encoder=replace(INFO, takes=takes))
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answer, body = await model.post(path, {"input": "hi"})
        error = body["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "invalid_value", "input")
        assert where in error["message"]
