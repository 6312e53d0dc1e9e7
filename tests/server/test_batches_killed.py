"""A batch whose server is killed in the middle, twice, ends with exactly one answer for each line."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.forked import Forked

NUM_LINES = 60


class Server:
    """A process of tests/server/fake_process.py, which runs four lines at once and says a word every 20 ms."""

    def __init__(self, directory: Path) -> None:
        self.process = Forked(["tests.server.fake_process", "--files-dir", str(directory)])
        line = next(line for line in self.process.stderr if "ready on" in line)
        url = line.split("ready on ")[1].split()[0]
        http = openai.DefaultHttpxClient(verify=False)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", http_client=http)

    def end(self, number: signal.Signals) -> int:
        self.client.close()
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.process.stderr.close()
        return code

    def until(self, batch: Batch, enough: Callable[[Batch], bool]) -> Batch:
        for _ in range(600):
            found = self.client.batches.retrieve(batch.id)
            if enough(found):
                return found
            time.sleep(0.02)
        raise AssertionError(found)


def completed(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Iterator[Server]]:
    """One after another; what a failed test leaves is ended."""
    started: list[Server] = []

    def starting() -> Iterator[Server]:
        while True:
            started.append(Server(tmp_path))
            yield started[-1]

    yield starting()
    for server in started:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_in_the_middle(tmp_path: Path, servers: Iterator[Server], end: signal.Signals) -> None:
    body = {"prompt": "a", "max_tokens": 3}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(NUM_LINES)]
    lines[7]["body"] = {"prompt": "a", "max_tokens": -3}
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    server = next(servers)
    file = server.client.files.create(file=data, purpose="batch")
    batch = server.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    for enough in (8, 24):
        counted = completed(server.until(batch, lambda found, enough=enough: completed(found) >= enough))  # type: ignore[misc]
        assert counted < NUM_LINES - 8, "it ends in the middle"
        assert server.end(end) == (-9 if end is signal.SIGKILL else 0)
        server = next(servers)
        assert completed(server.client.batches.retrieve(batch.id)) >= counted, "what is counted is answered for good"
    done = server.until(batch, lambda found: found.status == "completed")
    assert done.output_file_id and done.error_file_id and completed(done) == NUM_LINES - 1
    answers = [json.loads(text) for text in server.client.files.content(done.output_file_id).text.splitlines()]
    failures = [json.loads(text) for text in server.client.files.content(done.error_file_id).text.splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == [i for i in range(NUM_LINES) if i != 7]
    assert [failure["custom_id"] for failure in failures] == ["7"]
    assert all(answer["response"]["body"]["choices"][0]["finish_reason"] == "length" for answer in answers)
    assert done.usage is not None and done.usage.output_tokens == 3 * (NUM_LINES - 1)
    assert server.end(signal.SIGTERM) == 0
    assert not list((tmp_path / "batches").glob("*.new")) and len(list((tmp_path / "files").iterdir())) == 4
