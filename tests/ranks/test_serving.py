"""Two ranks behind one server, as a user starts it, against a server of one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_end_to_end import Server

pytestmark = pytest.mark.timeout(600)  # several processes load torch, on a busy machine one after the other
FLAGS = ("--device", "cpu", "--num-blocks", "64", "--threads", "1")
PROMPT = "the quick brown fox jumps over the lazy dog; the quick brown fox"


KEYS = """
[[keys]]
name = "mover"
key = "m"
permissions = ["estates"]
"""


def send(server: Server, method: str, route: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    headers = {"Authorization": "Bearer m", "Content-Type": kind}
    request = urllib.request.Request(server.url + route, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
        return found


def post(server: Server, route: str, **body: object) -> Any:
    return json.loads(send(server, "POST", route, json.dumps(body).encode()))


def complete(server: Server, **body: object) -> Any:
    return post(server, "/v1/completions", **{"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | body)


def told(answer: Any) -> list[tuple[str, Any]]:
    return [(choice["text"], choice["logprobs"] and choice["logprobs"]["tokens"]) for choice in answer["choices"]]


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def started(path: Path, size: int, *flags: str) -> Server:
    return Server(str(path), "--tensor-parallel-size", str(size), *FLAGS, *flags)


@pytest.fixture(scope="module")
def servers(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Of one rank and of two."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda size: started(path, size, "--api-key-file", str(keys)), (1, 2))
    yield one, two
    assert one.stop() == 0
    assert two.stop() == 0


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1, "seed": 7, "n": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"20": 5}},
        {"temperature": 0, "structured_outputs": {"regex": "[a-c]{4,9}"}},
        {"temperature": 0, "prompt_logprobs": 1},
        {"use_beam_search": True, "n": 3, "beam_width": 4, "max_tokens": 5},
        {"temperature": 0, "speculation": {"method": "ngram", "max_tokens": 3}},
    ],
    ids=lambda body: "-".join(body),
)
def test_two_ranks_say_what_one_says(servers: tuple[Server, Server], body: dict[str, object]) -> None:
    one, two = (complete(server, **body) for server in servers)
    assert told(two) == told(one)
    for mine, other in zip(two["choices"], one["choices"], strict=True):
        if mine["logprobs"]:
            near = pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
            assert mine["logprobs"]["token_logprobs"] == near


def test_hidden_states_are_whole(servers: tuple[Server, Server]) -> None:
    one, two = (
        np.array(post(server, "/v1/hidden_states", input=PROMPT, layers="all", positions="all")["data"][0]["data"])
        for server in servers
    )
    assert one.size and np.abs(one - two).max() < 1e-4 * np.abs(one).max()


def test_a_child_goes_on_from_blocks_in_parts(servers: tuple[Server, Server]) -> None:
    answers = []
    for server in servers:
        parent = complete(server, temperature=0, retain=True)
        child = complete(server, continuation_of=parent["id"], prompt=" and then", temperature=0)
        assert child["continuation"]["source"] == "blocks"
        answers.append(told(child))
    assert answers[0] == answers[1]


def test_an_estate_of_two_ranks_is_one_of_a_whole_model(servers: tuple[Server, Server]) -> None:
    """What two ranks export a single one goes on with, and the other way round."""
    for giver, taker in (servers, servers[::-1]):
        parent = complete(giver, temperature=0, retain=True)
        estate = send(giver, "GET", f"/v1/continuations/{parent['id']}/estate")
        name = f"from-{giver.process.pid}"
        send(taker, "PUT", f"/v1/continuations/{name}/estate", estate, "application/octet-stream")
        child = complete(taker, continuation_of=name, prompt=" and then", temperature=0)
        own = complete(giver, continuation_of=parent["id"], prompt=" and then", temperature=0)
        assert child["continuation"]["source"] == own["continuation"]["source"] == "blocks"
        assert told(child) == told(own)


@pytest.mark.cluster
def test_a_durable_lease_outlives_its_ranks(path: Path, tmp_path: Path) -> None:
    """Two ranks write it and are killed; one rank goes on with it, for as many computed tokens."""
    files = ("--estate-dir", str(tmp_path), "--estate-gb", "1", "--durable-wait", "60")
    asked = {"temperature": 0, "retain": {"ttl": 600, "durable": True}, "request_id": "kept"}
    answers = []
    with doomed(path, *files) as two:
        assert complete(two, **asked)["retained"]["durable"]
        answers.append(complete(two, continuation_of="kept", prompt=" and then", temperature=0))
    one = started(path, 1, *files)
    try:
        answers.append(complete(one, continuation_of="kept", prompt=" and then", temperature=0))
    finally:
        assert one.stop() == 0
    assert told(answers[0]) == told(answers[1])
    assert [answer["continuation"]["source"] for answer in answers] == ["blocks", "file"]
    assert len({answer["continuation"]["computed_tokens"] for answer in answers}) == 1


def ranks_of(server: Server) -> list[int]:
    """Process ids."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and b"ranks.following" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@contextmanager
def doomed(path: Path, *flags: str) -> Iterator[Server]:
    """A server of two ranks that ends by itself."""
    server = started(path, 2, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.stop()


def ends(server: Server, act: Callable[[int], None], patience: float) -> tuple[int, object]:
    """The exit code of a server whose second rank something happens to in the middle of an answer, and what the client
    of that was told."""
    (rank,) = ranks_of(server)
    os.kill(rank, signal.SIGSTOP)  # so the answer is in its middle, however fast the others are
    heard: list[object] = []

    def ask() -> None:
        try:
            heard.append(complete(server, max_tokens=150, temperature=0))
        except urllib.error.HTTPError as error:
            heard.append(json.load(error)["error"]["code"])

    asking = threading.Thread(target=ask)
    asking.start()
    until = time.monotonic() + patience
    while not num_running(server):
        assert time.monotonic() < until
        time.sleep(0.01)
    act(rank)
    asking.join(patience)
    assert not asking.is_alive(), "".join(server.log)
    code = server.process.wait(patience)
    assert not is_alive(rank)
    return code, heard[0]


def num_running(server: Server) -> float:
    found = re.search(rb"^vllm:num_requests_running\{[^}]*\} (\S+)$", send(server, "GET", "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def is_alive(process: int) -> bool:
    """A process that has ended and that nobody has asked about is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_rank_ends_the_engine(path: Path) -> None:
    with doomed(path) as server:
        assert ends(server, lambda rank: os.kill(rank, signal.SIGKILL), 20) == (1, "engine_dead")
        assert any("the engine died" in line for line in server.log)


@pytest.mark.cluster
def test_a_rank_that_hangs_ends_the_engine(path: Path) -> None:
    with doomed(path, "--step-timeout", "2") as server:
        assert ends(server, lambda rank: os.kill(rank, signal.SIGSTOP), 30) == (1, "engine_dead")


@pytest.mark.cluster
def test_a_rank_that_dies_while_nobody_asks_is_noticed(path: Path) -> None:
    with doomed(path) as server:
        os.kill(ranks_of(server)[0], signal.SIGKILL)
        assert server.process.wait(20) == 1
        assert any("rank 1 ended (signal 9)" in line for line in server.log)


@pytest.mark.cluster
def test_ranks_end_with_a_server_that_is_killed(path: Path) -> None:
    with doomed(path) as server:
        (rank,) = ranks_of(server)
        server.process.kill()
        server.process.wait(10)
        until = time.monotonic() + 10
        while is_alive(rank) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_alive(rank)
