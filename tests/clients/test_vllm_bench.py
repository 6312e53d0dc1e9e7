"""`vllm bench serve`, unchanged: it measures the server through its own reading of the API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.text import load_text
from tests.clients.conftest import program, run
from tests.test_end_to_end import Server

COUNT, INPUT, OUTPUT = 6, 20, 12


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend, path", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_every_request_counts(server: Server, tmp_path: Path, backend: str, path: str) -> None:
    python = program("vllm").with_name("python")
    (only,) = server.client().models.list().data
    load_text(embedded_model_path()).tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    flags = f"--backend {backend} --base-url {server.url} --endpoint {path} --model {only.id} --tokenizer {tmp_path}"
    flags += f" --dataset-name random --random-input-len {INPUT} --random-output-len {OUTPUT} --ignore-eos"
    flags += f" --num-prompts {COUNT} --disable-tqdm --save-result --result-dir {tmp_path} --result-filename told.json"
    done = run(python, Path(__file__).with_name("vllm_bench.py"), *flags.split(), seconds=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed"], told["failed"]) == (COUNT, 0), told
    assert told["total_output_tokens"] == COUNT * OUTPUT
