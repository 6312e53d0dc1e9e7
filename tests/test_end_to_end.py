"""The server as a user starts it: a process, the embedded model, the official client."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from openai import OpenAI

from tests.forked import Forked, run_program

ROOT = Path(__file__).parent.parent
_PATIENCE = 300.0  # seconds to be ready; a test's own limit is shorter where it says nothing else
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Server:
    """A server process. `log` holds what it wrote to stderr."""

    def __init__(self, *flags: str, forked: bool = True) -> None:
        """With `forked` it has its libraries from the beginning (tests/forked.py); else it starts as a user's does."""
        arguments = ["bequest", "serve", "--port", "0", *flags]
        self.process: Forked | subprocess.Popen[str]
        if forked:
            self.process = Forked(arguments)
        else:
            command = [sys.executable, "-m", *arguments]
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = ""
        self._client: OpenAI | None = None
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        assert ready.wait(_PATIENCE) and self.url, "".join(self.log)

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"ready on (http://\S+)", line):
                self.url = match[1]
                ready.set()
        ready.set()

    def client(self) -> OpenAI:
        if self._client is None:
            self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none", _strict_response_validation=True)
        return self._client

    def stop(self) -> int:
        """Its exit code after SIGTERM, once it has ended."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join()
        if self._client is not None:
            self._client.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def server(embedded_server: Server) -> Server:
    return embedded_server


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    (only,) = server.client().models.list().data
    return only.id


def streamed_text(client: OpenAI, model: str, **fields: object) -> str:
    chunks = client.chat.completions.create(model=model, messages=QUESTION, stream=True, **fields)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_the_capital_of_france_streamed_and_not(server: Server, model: str) -> None:
    client = server.client()
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    text = whole.choices[0].message.content
    assert text is not None and "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert streamed_text(client, model, temperature=0) == text


def test_a_seed_repeats_a_sampled_answer(server: Server, model: str) -> None:
    client = server.client()
    texts = [streamed_text(client, model, seed=7, max_tokens=24) for _ in range(2)]
    assert texts[0] == texts[1]
    assert streamed_text(client, model, seed=8, max_tokens=24) != texts[0]


def test_completion_with_logprobs(server: Server, model: str) -> None:
    answer = server.client().completions.create(
        model=model, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=2
    )
    choice = answer.choices[0]
    assert "Paris" in choice.text
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text


def test_scores_are_the_log_probabilities_of_the_whole_text(server: Server, model: str) -> None:
    completions = server.client().completions
    wanted = {"retain": True, "return_token_ids": True}
    parent = completions.create(model=model, prompt="Paris is", max_tokens=6, temperature=0, extra_body=wanted)
    told = parent.choices[0].model_extra or {}
    tokens = [*told["prompt_token_ids"], *told["token_ids"]]
    asked = {"continuation_of": parent.id, "continuation_suffixes": [" in France.", [100, 200, 300], " on Mars!"]}
    scored = completions.create(model=model, prompt="", max_tokens=0, extra_body=asked)
    assert scored.continuation["source"] == "blocks"  # type: ignore[attr-defined]
    assert [choice.text for choice in scored.choices][::2] == [" in France.", " on Mars!"]
    for choice in scored.choices:
        suffix = (choice.model_extra or {})["token_ids"]
        plain = {"prompt_logprobs": 0, "cache_salt": "apart"}
        whole = completions.create(model=model, prompt=tokens + suffix, max_tokens=0, extra_body=plain)
        entries = (whole.choices[0].model_extra or {})["prompt_logprobs"][len(tokens) :]
        expected = [entry[str(token)]["logprob"] for entry, token in zip(entries, suffix, strict=True)]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
        assert (choice.model_extra or {})["cumulative_logprob"] == pytest.approx(sum(expected), abs=1e-3)


def test_a_continuation_is_what_the_whole_text_would_have_been(server: Server, model: str) -> None:
    completions = server.client().completions
    text = "The three largest cities of France are"
    first = completions.create(model=model, prompt=text, max_tokens=20, temperature=0, extra_body={"retain": True})
    asked = {"continuation_of": first.id, "continuation_suffix": " In short:"}
    second = completions.create(model=model, prompt="", max_tokens=8, temperature=0, extra_body=asked)
    assert second.continuation["source"] == "blocks"  # type: ignore[attr-defined]
    assert second.continuation["at"] == first.retained["tokens"]  # type: ignore[attr-defined]
    text += first.choices[0].text + asked["continuation_suffix"]
    whole = completions.create(model=model, prompt=text, max_tokens=8, temperature=0)
    assert second.choices[0].text == whole.choices[0].text


def test_a_chat_goes_on_from_its_parents_tokens(server: Server, model: str) -> None:
    chats = server.client().chat.completions
    first = chats.create(model=model, messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    more = {"role": "user", "content": "And of Italy?"}
    second = chats.create(model=model, messages=[more], temperature=0, extra_body={"continuation_of": first.id})  # type: ignore[list-item]
    assert first.usage is not None and second.continuation["at"] == first.usage.total_tokens - 1  # type: ignore[attr-defined]
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    whole = chats.create(model=model, messages=[*QUESTION, answer, more], temperature=0)  # type: ignore[list-item]
    assert second.choices[0].message.content == whole.choices[0].message.content
    assert second.usage is not None and whole.usage is not None
    assert second.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_response_goes_on_from_its_parents_tokens(server: Server, model: str) -> None:
    responses = server.client().responses
    first = responses.create(model=model, input="What is the capital of France?", temperature=0)
    assert "Paris" in first.output_text and first.usage is not None
    with responses.stream(model=model, input="And of Italy?", previous_response_id=first.id, temperature=0) as stream:
        second = stream.get_final_response()
    assert second.continuation["source"] == "blocks"  # type: ignore[attr-defined]
    assert second.continuation["inherited_tokens"] == first.usage.total_tokens - 1  # type: ignore[attr-defined]
    history = [*QUESTION, *first.output, {"role": "user", "content": "And of Italy?"}]
    whole = responses.create(model=model, input=history, temperature=0, store=False)  # type: ignore[arg-type]
    assert whole.output_text == second.output_text


def test_the_start_up_log_tells_phases_and_memory(server: Server) -> None:
    log = "".join(server.log)
    for phase in ("libraries", "tokenizer", "weights", "cache"):
        assert re.search(rf"{phase}.*: \d+\.\d+ s", log)
    assert re.search(r"memory: weights in .+ \S+ GiB, .*; cache \S+ GiB \([\d,]+ blocks of 16 tokens", log)


def test_sigterm_lets_a_running_stream_finish_and_exits_0() -> None:
    server = Server("--kv-cache-gb", "0.5")
    client = server.client()
    name = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=name, messages=QUESTION, stream=True, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}
    )  # type: ignore[call-overload]
    first = next(chunks)
    server.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert server.process.wait(30) == 0
    server.stop()
    assert first.choices[0].delta.role == "assistant"
    assert rest[-1].choices[0].finish_reason == "length"


def test_a_start_without_a_model_says_why_and_fails() -> None:
    command = [sys.executable, "-m", "bequest", "serve", "--port", "0", "/no/such/model"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    check_failure(ended, "/no/such/model: no such file or directory")


def test_a_start_without_room_says_why_and_fails() -> None:
    """In a fork: the model is loaded before its room is counted, and torch before the model."""
    arguments = ["serve", "--port", "0", "--num-blocks", "10", "--max-model-len", "4096"]
    ended = run_program(f"from bequest.__main__ import main; main({arguments!r})", timeout=90)
    check_failure(ended, "--num-blocks 257")


def check_failure(ended: subprocess.CompletedProcess[str], message: str) -> None:
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
