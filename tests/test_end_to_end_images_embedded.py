"""Vectors of images over HTTP: those of transformers' hidden states, however the images come; and bad input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.engine.test_images_against_transformers import library_states
from tests.test_end_to_end import Server
from tests.test_end_to_end_images import post
from tests.tiny_seeing import PICTURES, data_url, encoded, image_part, save_seeing, text_part

PATH = "/v1/embeddings"
NAMES = ["smolvlm", "qwen3-vl-moe"]


@pytest.fixture(scope="module", params=NAMES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    directory = save_seeing(request.param, tmp_path_factory.mktemp("seeing"))
    server = Server(str(directory), "--kv-cache-gb", "0.02", "--max-images", "4")
    yield request.param, server
    assert server.stop() == 0


def expected(name: str, server: Server, messages: list[Any], pictures: list[Any], pooling: str) -> Any:
    """What the library makes of the tokens that the server makes of messages."""
    told = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    states = library_states(name, torch.tensor([told["tokens"]]), pictures)[-1].numpy().astype(np.float64)
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / np.linalg.norm(vector)


def vectors(answer: dict[str, Any]) -> npt.NDArray[np.float64]:
    assert "data" in answer, answer
    return np.asarray([entry["embedding"] for entry in answer["data"]])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_the_library(seeing: tuple[str, Server], pooling: str) -> None:
    name, server = seeing
    pictures = [PICTURES[1], PICTURES[0]]
    first, second = map(image_part, pictures)
    messages = [{"role": "user", "content": [text_part("is it "), first, text_part(" or "), second, text_part("?")]}]
    answer = post(server, PATH, {"messages": messages, "pooling": pooling})
    wanted = expected(name, server, messages, pictures, pooling)
    assert np.abs(vectors(answer)[0] - wanted).max() < 2e-5 * np.abs(wanted).max()
    assert answer["usage"]["prompt_tokens"] > 40 and len(answer["data"]) == 1


def test_objects_are_messages_of_their_own(seeing: tuple[str, Server]) -> None:
    """By the official client, which insists on `input`."""
    _, server = seeing
    url = data_url(encoded(PICTURES[0]))
    objects: Any = [{"image": url}, {"text": "a cat"}, {"image": url, "text": "a cat"}]
    client = server.client()
    floats: Any = {"encoding_format": "float"}
    model = client.models.list().data[0].id
    found = [entry.embedding for entry in client.embeddings.create(model=model, input=objects, **floats).data]
    parts = [[image_part(PICTURES[0])], [text_part("a cat")], [image_part(PICTURES[0]), text_part("a cat")]]
    for vector, content in zip(found, parts, strict=True):
        body: Any = {"messages": [{"role": "user", "content": content}]}
        [alone] = client.embeddings.create(model=model, input="", extra_body=body, **floats).data
        assert np.allclose(vector, alone.embedding, atol=1e-5), "a crowd changes nothing"
    assert len({tuple(np.round(vector, 3)) for vector in found}) == 3


def test_what_is_refused(seeing: tuple[str, Server]) -> None:
    _, server = seeing
    url = data_url(encoded(PICTURES[0]))
    messages = [{"role": "user", "content": "a cat"}]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": messages, "input": "a cat"}, "input"),
        ({"messages": []}, "messages"),
        ({"input": [{"image": url}, "a cat"]}, "input[1]"),
        ({"input": [{"text": "a cat"}, {"picture": url}]}, "input[1].picture"),
        ({"input": {}}, "input.text"),
        ({"input": {"image": 5}}, "input.image"),
        ({"input": [{"image": url}] * 5}, "input[4].image"),
        ({"input": [{"image": "data:image/png;base64,aGk="}]}, "input[0].image"),
        ({"messages": messages, "mm_processor_kwargs": {"crop": 1}}, "mm_processor_kwargs.crop"),
        ({"messages": messages, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ]
    for body, param in wrong:
        refused = post(server, PATH, body)
        assert refused.get("status") == 400 and refused["param"] == param, (body, refused)
