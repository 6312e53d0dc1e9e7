"""Images over HTTP across kill -9: a durable lease is continued as it would have been. And how closely images are
looked at, by a model that takes images of any size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_end_to_end import Server
from tests.test_end_to_end_images import cached, chat, post, said
from tests.tiny_seeing import PICTURES, image_part, picture, save_seeing, text_part

WHERE = "messages[0].content[0].image_url"


class Lives:
    """A server that is killed and started again over the same files."""

    def __init__(self, model: str, estates: Path) -> None:
        self._flags = (model, "--kv-cache-gb", "0.02", "--estate-dir", str(estates))
        self.now = Server(*self._flags)

    def again(self) -> Server:
        self.now.process.kill()
        self.now.stop()
        self.now = Server(*self._flags)
        return self.now


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    directory = save_seeing("qwen2.5-vl", tmp_path_factory.mktemp("qwen"))
    lives = Lives(str(directory), tmp_path_factory.mktemp("estates"))
    yield lives
    assert lives.now.stop() == 0


def next_turn(server: Server) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "and what else?"}], "continuation_of": "trip", "max_tokens": 8}
    return post(server, "/v1/chat/completions", asked | {"temperature": 0, "ignore_eos": True})


def test_how_closely_an_image_is_looked_at(lives: Lives) -> None:
    server = lives.now

    def tokens(part: dict[str, Any], **fields: Any) -> int:
        count: int = chat(server, part, text_part("what?"), max_tokens=1, **fields)["usage"]["prompt_tokens"]
        return count

    plain = tokens(image_part(PICTURES[1]))
    small = image_part(PICTURES[1])
    small["image_url"]["max_pixels"] = 256
    assert tokens(small) < plain
    assert tokens(image_part(PICTURES[1]), mm_processor_kwargs={"max_pixels": 256}) == tokens(small)
    large = image_part(picture(16, 24, 1))
    large["image_url"]["min_pixels"] = 2000
    assert tokens(large) > tokens(image_part(picture(16, 24, 1)))
    assert tokens(image_part(PICTURES[1], detail="high")) == plain
    for field, value in (("max_pixels", 10**9), ("min_pixels", 1), ("max_pixels", "256"), ("detail", "huge")):
        wrong = image_part(PICTURES[1])
        wrong["image_url"][field] = value
        refused = chat(server, wrong)
        assert refused["status"] == 400 and refused["param"] == f"{WHERE}.{field}", refused


@pytest.mark.timeout(300)  # a server starts in between
def test_a_durable_lease_with_an_image(lives: Lives) -> None:
    server = lives.now
    kept = {"retain": {"ttl": 600, "durable": True}, "request_id": "trip"}
    parts = text_part("look at "), image_part(PICTURES[0]), text_part(" and tell")
    parent = chat(server, *parts, **kept)
    assert parent["retained"]["durable"] is True, parent
    child = next_turn(server)
    other = chat(server, image_part(PICTURES[2]))
    server = lives.again()
    assert said(chat(server, image_part(PICTURES[2]))) == said(other), "ids begin anew, with another image"
    again = next_turn(server)
    assert said(again) == said(child)
    assert again["usage"]["prompt_tokens"] == child["usage"]["prompt_tokens"]
    assert cached(again) == cached(child) > 0.9 * parent["usage"]["total_tokens"]
    repeated = chat(server, *parts)
    assert said(repeated) == said(parent) and cached(repeated) > 0, "the same file has the ids that came back"
