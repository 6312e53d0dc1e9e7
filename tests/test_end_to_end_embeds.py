"""`prompt_embeds` over HTTP: a prompt of rows is the prompt of the tokens that have them, whatever is done with it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from tests.test_end_to_end import Server
from tests.test_end_to_end_images import cached, post
from tests.tiny_models import make_reference, save_tiny_model

IDS = [5, 9, 31, 8] * 10
HIDDEN = 64
WHOLE = len(IDS) // 16 * 16  # tokens of blocks that are full


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    server = Server(model, "--kv-cache-gb", "0.02", "--allow-prompt-embeds")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def closed(model: str) -> Iterator[Server]:
    server = Server(model, "--kv-cache-gb", "0.01")
    yield server
    assert server.stop() == 0


def rows(ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        given: torch.Tensor = make_reference("llama").get_input_embeddings()(torch.tensor(ids)).clone()
    return given


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64_of(file.getvalue())


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True} | fields
    return post(server, "/v1/completions", body)


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    assert "choices" in answer, answer
    return [choice["token_ids"] for choice in answer["choices"]]


def test_rows_are_the_prompt_of_their_tokens(server: Server) -> None:
    expected = tokens(complete(server, prompt=IDS))
    answer = complete(server, prompt_embeds=saved(rows(IDS)), prompt="")
    assert tokens(answer) == expected and answer["usage"]["prompt_tokens"] == len(IDS)
    assert answer["choices"][0]["prompt_token_ids"] == [0] * len(IDS)
    assert cached(answer) == 0 and cached(complete(server, prompt_embeds=saved(rows(IDS)))) == WHOLE
    again = complete(server, prompt_embeds=base64_of(save_safetensors({"x": rows(IDS)[None]})))
    assert tokens(again) == expected and cached(again) == WHOLE, "the same rows in another file"
    assert cached(complete(server, prompt_embeds=saved(rows(IDS)), cache_salt="other")) == 0


def test_rows_come_before_texts(server: Server) -> None:
    embeds = [saved(rows(IDS)), saved(rows(IDS[1:]))]
    answer = complete(server, prompt_embeds=embeds, prompt=[IDS[2:], IDS[3:]], n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    expected = [tokens(complete(server, prompt=IDS[at:]))[0] for at in range(4) for _ in range(2)]
    assert tokens(answer) == expected


def test_the_official_client(server: Server) -> None:
    client = server.client()
    name = client.models.list().data[0].id
    extra = {"prompt_embeds": saved(rows(IDS)), "ignore_eos": True}
    answer = client.completions.create(model=name, prompt="", max_tokens=8, temperature=0, extra_body=extra)
    assert answer.choices[0].text == complete(server, prompt=IDS)["choices"][0]["text"]


def test_a_child_inherits_rows_and_brings_others(server: Server) -> None:
    parent = complete(server, prompt_embeds=saved(rows(IDS)), retain=True)
    [said] = tokens(parent)
    child = complete(server, prompt_embeds=saved(rows(IDS[:6])), continuation_of=parent["id"], retain=True)
    assert tokens(child) == tokens(complete(server, prompt=[*IDS, *said, *IDS[:6]]))
    assert cached(child) == len(IDS) + len(said) - 1
    more = complete(server, prompt=[7, 8], continuation_of=child["id"])
    assert tokens(more) == tokens(complete(server, prompt=[*IDS, *said, *IDS[:6], *tokens(child)[0], 7, 8]))
    branch = complete(server, prompt=[7, 8], continuation_of=parent["id"], continuation_at=13)
    assert tokens(branch) == tokens(complete(server, prompt=[*IDS[:13], 7, 8]))
    two = complete(server, prompt_embeds=saved(rows(IDS)), prompt=[7], continuation_of=parent["id"])
    assert two["status"] == 400 and two["param"] == "prompt_embeds"


def test_suffixes_behind_rows_are_scored(server: Server) -> None:
    fields: Any = {"continuation_suffixes": [[4, 5], [6]], "max_tokens": 0, "return_token_ids": False}
    ours = complete(server, prompt_embeds=saved(rows(IDS)), **fields)["choices"]
    theirs = complete(server, prompt=IDS, **fields)["choices"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)


def test_hidden_states_and_truncation(server: Server) -> None:
    fields: Any = {"return_hidden_states": {"layers": [1], "positions": "all"}, "return_token_ids": False}
    prompts: list[dict[str, Any]] = [{"prompt_embeds": saved(rows(IDS))}, {"prompt": IDS}]
    answers = [complete(server, **prompt, **fields) for prompt in prompts]
    found = [answer["choices"][0]["hidden_states"] for answer in answers]
    assert found[0]["shape"] == found[1]["shape"]
    kept = complete(server, prompt_embeds=saved(rows(IDS)), truncate_prompt_tokens=5)
    assert kept["usage"]["prompt_tokens"] == 5 and tokens(kept) == tokens(complete(server, prompt=IDS[-5:]))


def test_what_is_refused(server: Server, closed: Server) -> None:
    given = saved(rows(IDS))
    off = complete(closed, prompt_embeds=given)
    assert off["status"] == 400 and off["param"] == "prompt_embeds" and "--allow-prompt-embeds" in off["message"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt_embeds": "no base64!"}, "prompt_embeds"),
        ({"prompt_embeds": ""}, "prompt_embeds"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": [given, saved(torch.zeros(3, HIDDEN + 1))]}, "prompt_embeds[1]"),
        ({"prompt_embeds": saved(torch.zeros(3, HIDDEN, dtype=torch.int32))}, "prompt_embeds"),
        ({"prompt_embeds": saved(torch.full((3, HIDDEN), float("nan")))}, "prompt_embeds"),
        ({"prompt_embeds": given, "echo": True}, "echo"),
        ({"prompt_embeds": given, "suffix": "end"}, "suffix"),
        ({"prompt_embeds": given, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": saved(torch.zeros(300, HIDDEN))}, "prompt_embeds"),
    ]
    for fields, param in wrong:
        refused = complete(server, **fields)
        assert refused.get("status") == 400 and refused["param"] == param, (param, refused)
    assert refused["code"] == "context_length_exceeded"
    assert tokens(complete(server, prompt_embeds=given)) == tokens(complete(server, prompt=IDS))
