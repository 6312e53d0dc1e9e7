"""An encoder-decoder model behind the server as a user starts it: prompts, continuation, leases, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.engine.test_encoder_decoder_models import save_model
from tests.test_end_to_end import QUESTION, Server
from tests.tiny_encoder_decoders import make_encoder_decoder

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = save_model("bart", tmp_path_factory.mktemp("bart"))
    flags = ["--block-size", "4", "--num-blocks", "200", "--max-encoder-len", "40", "--threads", "1"]
    server = Server(str(directory), "--device", "cpu", *flags)
    yield server
    assert server.stop() == 0


def complete(server: Server, **fields: Any) -> Any:
    model = server.client().models.list().data[0].id
    extra = {"return_token_ids": True, "max_tokens": 8, "temperature": 0, **fields}
    return server.client().completions.create(model=model, prompt=extra.pop("prompt", TEXT), extra_body=extra)


def test_every_form_of_a_prompt_gives_the_same_answer(server: Server) -> None:
    plain = complete(server).choices[0]
    encoder = plain.encoder_prompt_token_ids
    assert plain.prompt_token_ids == [2, 0] and len(encoder) > 2
    assert plain.finish_reason == "stop" and plain.token_ids[-1] == 2, "the end is forced at the last length"
    forms: list[Any] = [
        encoder,
        {"prompt": TEXT},
        {"prompt_token_ids": encoder},
        {"encoder_prompt": TEXT, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": encoder}, "decoder_prompt": {"prompt_token_ids": [2, 0]}},
        {"encoder_prompt": TEXT, "decoder_prompt": [0]},
    ]
    for form in forms:
        choice = complete(server, prompt=form).choices[0]
        assert (choice.token_ids, choice.prompt_token_ids) == (plain.token_ids, [2, 0])
        assert choice.encoder_prompt_token_ids == encoder
    begun = complete(server, prompt={"encoder_prompt": TEXT, "decoder_prompt": [2]}, max_tokens=9).choices[0]
    assert begun.token_ids == [0, *plain.token_ids], "BOS is forced behind the start token"
    usage = complete(server, max_tokens=3).usage
    assert usage.prompt_tokens == len(encoder) + 2


def test_scores_of_answers(server: Server) -> None:
    """Suffixes stand in the decoder, behind the encoder's input or behind a parent that had it."""
    parent = complete(server, retain={"ttl": 60})
    answer = parent.choices[0].token_ids[:-1]
    asked = {"continuation_suffixes": [answer, [7, 8]], "max_tokens": 0}
    fresh = complete(server, **asked)
    for choice, suffix in zip(fresh.choices, asked["continuation_suffixes"], strict=True):
        pair = {"encoder_prompt": TEXT, "decoder_prompt": [2, 0, *suffix]}
        whole = complete(server, prompt=pair, prompt_logprobs=0, max_tokens=0).choices[0]
        expected = [e[str(t)]["logprob"] for e, t in zip(whole.prompt_logprobs[2:], suffix, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    behind = complete(server, prompt="", continuation_of=parent.id, continuation_at=2, **asked)
    assert [c.cumulative_logprob for c in behind.choices] == [c.cumulative_logprob for c in fresh.choices]


def test_a_continuation_inherits_the_input(server: Server) -> None:
    parent = complete(server, ignore_eos=True, retain={"ttl": 60})
    tokens = parent.choices[0].token_ids
    child = complete(server, prompt=[9, 10], continuation_of=parent.id, ignore_eos=True)
    assert child.continuation["source"] == "blocks"
    assert (child.continuation["inherited_tokens"], child.continuation["computed_tokens"]) == (9, 3)
    assert child.choices[0].encoder_prompt_token_ids == parent.choices[0].encoder_prompt_token_ids
    whole = {"encoder_prompt": TEXT, "decoder_prompt": [2, 0, *tokens, 9, 10]}
    again = complete(server, prompt=whole, ignore_eos=True, cache_salt="afresh")
    assert again.choices[0].token_ids == child.choices[0].token_ids


def test_beams(server: Server) -> None:
    answer = complete(server, use_beam_search=True, n=3, beam_width=4)
    scores = [choice.beam_score for choice in answer.choices]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert all(choice.token_ids[-1] == 2 for choice in answer.choices)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ({"encoder_prompt": "", "decoder_prompt": "x"}, "prompt.encoder_prompt"),
        (list(range(3, 44)), "prompt"),
        ({"encoder_prompt": TEXT, "decoder_prompt": [3] * 64}, "prompt.decoder_prompt"),
    ],
)
def test_bad_prompts(server: Server, prompt: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, prompt=prompt)
    assert caught.value.param == param


def test_there_is_no_chat(server: Server) -> None:
    model = server.client().models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        server.client().chat.completions.create(model=model, messages=QUESTION)  # type: ignore[arg-type]


def test_hidden_states_and_embeddings_are_those_of_transformers(server: Server) -> None:
    reference = make_encoder_decoder("bart")
    ids = complete(server, max_tokens=1).choices[0].encoder_prompt_token_ids
    with torch.no_grad():
        found = reference(
            torch.tensor([ids]), decoder_input_ids=torch.tensor([[2, 0, 9]]), output_hidden_states=True, use_cache=False
        )
    encoder = torch.stack(found.encoder_hidden_states)[:, 0].numpy()  # [L + 1, positions, H]
    decoder = torch.stack(found.decoder_hidden_states)[:, 0].numpy()
    pair = {"encoder_prompt": TEXT, "decoder_prompt": [2, 0, 9]}
    for given, expected in ((TEXT, encoder), (pair, decoder)):
        body = {"input": given, "layers": "all", "positions": "all"}
        answer: Any = server.client().post("/hidden_states", body=body, cast_to=object)
        np.testing.assert_allclose(np.asarray(answer["data"][0]["data"]), expected, rtol=1e-3, atol=1e-4)
    wanted = {"stack": "encoder", "layers": "all", "positions": "all"}
    shown = complete(server, n=2, seed=1, temperature=1, return_hidden_states=wanted)
    for choice in shown.choices:
        np.testing.assert_allclose(np.asarray(choice.hidden_states["data"]), encoder, rtol=1e-3, atol=1e-4)
    model = server.client().models.list().data[0].id
    vector = server.client().embeddings.create(model=model, input=TEXT, encoding_format="float").data[0].embedding
    mean = encoder[-1].mean(axis=0)
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-4)


def test_what_an_encoder_does_not_know(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="fill in the middle") as caught:
        complete(server, suffix="the end")
    assert caught.value.param == "suffix"
