"""`llm`, the command line, with an extra-openai-models.yaml: chat and Responses, and an answer that fails half-way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT, environment, program, run
from tests.test_end_to_end import Server

Ask = Callable[..., subprocess.CompletedProcess[str]]
QUESTION = "What is the capital of France?"


def models_of(folder: Path, url: str, name: str) -> Path:
    """Writes what `llm` knows of a server, as its documentation says; JSON is YAML."""
    shared = {"model_name": name, "api_base": f"{url}/v1", "supports_schema": True, "supports_tools": True}
    models = [{"model_id": "chat", **shared}, {"model_id": "responses", "responses": True, **shared}]
    models.append({"model_id": "completion", "completion": True, "model_name": name, "api_base": f"{url}/v1"})
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
    return folder


@pytest.fixture
def ask(server: Server, tmp_path: Path) -> Ask:
    llm = program("llm")
    (only,) = server.client().models.list().data
    folder = models_of(tmp_path, server.url, only.id)

    def asking(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(llm, *arguments, LLM_USER_PATH=str(folder))

    return asking


@pytest.mark.parametrize("model", ["chat", "responses"])
@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_an_answer(ask: Ask, model: str, flags: tuple[str, ...]) -> None:
    answer = ask("-m", model, "-o", "temperature", "0", *flags, QUESTION)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_a_conversation_goes_on(ask: Ask, model: str) -> None:
    assert ask("-m", model, "-o", "temperature", "0", QUESTION).returncode == 0
    answer = ask("-c", "-m", model, "-o", "temperature", "0", "Which country is that the capital of? One word.")
    assert answer.returncode == 0, answer.stderr
    assert "France" in answer.stdout


def test_a_completion(ask: Ask) -> None:
    answer = ask("-m", "completion", "-o", "temperature", "0", "-o", "max_tokens", "8", "The capital of France is")
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_a_schema(ask: Ask, model: str) -> None:
    answer = ask("-m", model, "--schema", "name, age int", "-o", "temperature", "0", "Invent a dog.")
    assert answer.returncode == 0, answer.stderr
    dog = json.loads(answer.stdout)
    assert isinstance(dog["name"], str) and isinstance(dog["age"], int)


def test_an_error_is_told(ask: Ask) -> None:
    answer = ask("-m", "chat", "-o", "max_tokens", "100000", QUESTION)
    assert answer.returncode == 1
    assert "maximum context length" in answer.stderr


@pytest.mark.parametrize("model", ["chat", "responses"])
def test_an_answer_that_fails_half_way_is_no_success(tmp_path: Path, model: str) -> None:
    llm = program("llm")
    command = [sys.executable, "-m", "tests.server.fake_process"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "ready on" in line)
        folder = models_of(tmp_path, line.split("ready on ")[1].split()[0], "fake/model")
        asking = subprocess.Popen(
            [str(llm), "-m", model, "hello"],
            env=environment(LLM_USER_PATH=str(folder), PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert asking.stdout is not None
        assert asking.stdout.read(5) == "word1"
        process.send_signal(signal.SIGTERM)
        next(line for line in process.stderr if "draining" in line)
        process.send_signal(signal.SIGTERM)
        _, told = asking.communicate(timeout=30)
        assert asking.returncode == 1, told
        assert "going down" in told
        process.communicate(timeout=30)
