"""Values at the edge of what numbers can say, and a tokenizer that knows more than its model: an answer or a 400, and a
server that is there for the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file

from tests.test_end_to_end import Server
from tests.tiny_models import save_tiny_model

NUM_TOKENS = 300  # that the model has; the tokenizer has 320
SAT = " sat"  # token 317


def cut_vocabulary(directory: Path) -> None:
    """As files are whose tokenizer was given tokens that nobody made rows for."""
    tensors = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:NUM_TOKENS].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, change in (("config", {"vocab_size": NUM_TOKENS}), ("generation_config", {"eos_token_id": [0, 2, 310]})):
        path = directory / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("odd"))
    cut_vocabulary(directory)
    server = Server(str(directory), "--kv-cache-gb", "0.01", "--served-model-name", "odd")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e-40, "temperature": 0},
        {"temperature": 5e-324},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"min_p": 1},
        {"logit_bias": {"5": 5e-324, "6": 100, "7": -100}},
        {"logit_bias": {str(token): -100 for token in range(NUM_TOKENS)}},
        {"min_tokens": 3, "stop_token_ids": [5]},
        {"min_tokens": 3, "use_beam_search": True, "n": 2},
        {"bad_words": [SAT, "he"]},
        {"structured_outputs": {"regex": "[ab]{3}"}},
    ],
    ids=str,
)
def test_answers(server: Server, fields: dict[str, Any]) -> None:
    answer = server.client().completions.create(model="odd", prompt="The cat", max_tokens=4, extra_body=fields)
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8


def test_text_that_the_model_has_no_token_for(server: Server) -> None:
    client = server.client()
    parent = client.completions.create(model="odd", prompt="The cat", max_tokens=1)
    messages = [{"role": "user", "content": SAT}]
    child = {"continuation_of": parent.id}
    calls = {
        "prompt": ("completions", {"prompt": "The cat" + SAT}),
        "prompt[1]": ("completions", {"prompt": ["The cat", SAT]}),
        "continuation_suffix": ("completions", {"continuation_suffix": SAT} | child),
        "continuation_suffixes[0]": ("completions", {"continuation_suffixes": [SAT], "max_tokens": 0} | child),
        "messages": ("chat/completions", {"messages": messages}),
        "input": ("responses", {"input": SAT}),
        "input[1]": ("embeddings", {"input": ["The cat", SAT]}),
        "documents[0]": ("rerank", {"query": "The cat", "documents": [SAT]}),
    }
    for param, (path, body) in calls.items():
        with pytest.raises(openai.BadRequestError, match="tokens are 0 to 299") as caught:
            client.post(f"/{path}", body=body, cast_to=object)
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)
    with pytest.raises(openai.BadRequestError) as told:
        client.post("/messages", body={"messages": messages, "max_tokens": 4, "model": "odd"}, cast_to=object)
    assert told.value.param == "messages"
