"""A model with recurrent layers over HTTP: prefix hits, leases and continuation, with counts that tell the truth."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.test_end_to_end import Server
from tests.tiny_models import save_tiny_model

PROMPT = "the quick brown fox jumps over the lazy dog, and the cat sat on the mat"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = save_tiny_model("qwen3.5-wide", tmp_path_factory.mktemp("recurrent"))
    server = Server(str(directory), "--kv-cache-gb", "0.01", "--state-interval", "16", "--max-num-seqs", "8")
    yield server
    assert server.stop() == 0


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    asked = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_prefix_hits_and_continuation(server: Server) -> None:
    first = complete(server, prompt=PROMPT, request_id="tale", retain={"ttl": 60})
    num_prompt = first["usage"]["prompt_tokens"]
    again = complete(server, prompt=PROMPT)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
    child = complete(server, continuation_of="tale", prompt=" the end")
    told = child["continuation"]
    num_suffix = child["usage"]["prompt_tokens"] - told["at"]
    assert told["computed_tokens"] == num_suffix + 1 and told["source"] == "blocks"
    branch = complete(server, continuation_of="tale", continuation_at=20, prompt=" the end")
    told = branch["continuation"]
    assert told["at"] == 20 and told["inherited_tokens"] == 16
    assert told["inherited_tokens"] + told["computed_tokens"] == branch["usage"]["prompt_tokens"]
