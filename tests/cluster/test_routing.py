"""Where a real HAProxy sends requests to servers of a fake engine."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from bequest.cluster.haproxy import Holder
from bequest.server.wire.replicas import tag_of
from tests.cluster.places import Routed, fake

pytestmark = pytest.mark.cluster
TAGS = ("r1", "r2", "r3")
LONG = "x" * 300_000  # far more than the router reads


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("routed")
    servers = [fake(tag, folder, "--files-dir", str(_made(folder / f"files-{tag}"))) for tag in TAGS]
    with Routed(folder, servers) as routed:
        yield routed


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def ask(routed: Routed, fields: dict[str, Any], headers: dict[str, str] | None = None) -> requests.Response:
    body = {"prompt": "x", "max_tokens": 2, **fields}
    return requests.post(f"{routed.url}/v1/completions", json=body, headers=headers, timeout=20)


def on(answer: requests.Response) -> str:
    assert answer.ok, answer.text
    return answer.headers["X-Bequest-Replica"]


def test_a_child_reaches_the_server_that_made_the_id(routed: Routed) -> None:
    for tag in TAGS * 3:
        parent = ask(routed, {}, {"X-Bequest-Replica": tag})
        assert on(parent) == tag == tag_of(parent.json()["id"])
        assert on(ask(routed, {"continuation_of": parent.json()["id"]})) == tag


def test_a_name_is_learned_from_the_answer(routed: Routed) -> None:
    for number, tag in enumerate(TAGS * 3):
        name = f"learned-{number}"
        assert on(ask(routed, {"request_id": name}, {"X-Bequest-Replica": tag})) == tag
        assert f"key={name}/- " in routed.router.ask("show table replicas"), "nobody has to be asked for it"
        assert on(ask(routed, {"continuation_of": name})) == tag
        assert on(requests.get(f"{routed.url}/v1/continuations/{name}", timeout=5)) == tag


def test_a_name_that_nobody_has_learned_is_asked_for(routed: Routed) -> None:
    """Given to a replica past the router, as if the router had lost its table."""
    for number, tag in enumerate(TAGS * 3):
        name = f"unknown-{number}"
        body = {"prompt": "x", "max_tokens": 2, "request_id": name}
        assert requests.post(f"{routed.servers[tag].url}/v1/completions", json=body, timeout=20).ok
        assert on(ask(routed, {"continuation_of": name})) == tag
    assert ask(routed, {"continuation_of": "nobody"}).status_code == 404


def test_a_long_body_is_sent_on_by_the_answer(routed: Routed) -> None:
    """The parent stands behind what the router reads: a replica says whose it is, and the client goes there."""
    parent = ask(routed, {}, {"X-Bequest-Replica": "r2"}).json()["id"]
    long = {"continuation_fallback": LONG, "continuation_of": parent}
    answers = [ask(routed, {"prompt": f"{number}", **long}) for number in range(12)]
    assert {on(answer) for answer in answers} == {"r2"}
    redirects = [answer.history[0].status_code for answer in answers if answer.history]
    assert redirects and set(redirects) == {307}
    named = ask(routed, long, {"X-Bequest-Parent": parent})
    assert on(named) == "r2" and not named.history, "with the header nobody is asked in vain"


def test_whom_a_replica_names_is_asked(routed: Routed) -> None:
    """It knows better than what was learned; and what the router writes into a query does not reach anybody."""
    assert on(ask(routed, {"request_id": "moved"}, {"X-Bequest-Replica": "r1"})) == "r1"
    name = f"{routed.url}/v1/continuations/moved"
    for query in ("?bequest-owner=r2", "?a=1&bequest-owner=r2&bequest-again=1"):
        answer = requests.get(name + query, timeout=5)
        assert (answer.status_code, answer.headers["X-Bequest-Replica"]) == (404, "r2")
    files = requests.get(f"{routed.url}/v1/files?limit=1&bequest-owner=r2&order=asc&bequest-again=1", timeout=5)
    assert on(files) == "r2" and "X-Bequest-Ignored" not in files.headers
    assert on(requests.get(name, timeout=5)) == "r1"


def test_an_item_is_found_by_its_id(routed: Routed) -> None:
    told = requests.post(f"{routed.url}/v1/responses", json={"input": "x"}, headers={"X-Bequest-Replica": "r3"})
    items = [{"type": "item_reference", "id": told.json()["output"][0]["id"]}, {"role": "user", "content": "more"}]
    for _ in range(4):
        body = {"input": items, "max_output_tokens": 1}
        assert on(requests.post(f"{routed.url}/v1/responses", json=body, timeout=20)) == "r3"


def test_the_official_client_follows(routed: Routed) -> None:
    parent = ask(routed, {}, {"X-Bequest-Replica": "r3"}).json()["id"]
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="any", max_retries=0) as client:
        for number in range(6):
            more = {"continuation_fallback": LONG, "continuation_of": parent}
            answer = client.completions.create(model="fake/model", prompt=f"{number}", max_tokens=2, extra_body=more)
            assert tag_of(answer.id) == "r3"


def test_a_replica_that_is_not_there_is_not_replaced(routed: Routed) -> None:
    """Whoever uploads something to each replica would believe that it is there."""
    for answer in (
        ask(routed, {}, {"X-Bequest-Replica": 'r"9'}),
        requests.get(f"{routed.url}/health?bequest-replica=r9"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "replica_not_found", "X-Bequest-Replica")
        assert "r1, r2, r3" in error["message"], "and the message says which there are"
    cookie = {"bequest-replica": "r9"}  # a console that was opened before its replica went
    assert requests.get(f"{routed.url}/health", cookies=cookie, timeout=5).ok


def test_what_a_router_answers_itself_is_json(tmp_path: Path) -> None:
    """Not an HTML page, of which a client shows the first line at best."""
    server = fake("r1", tmp_path)
    with Routed(tmp_path, [server]) as alone:
        server.kill()
        for _ in range(2):
            answer = ask(alone, {})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["param"]) == (503, "server_error", None)
            assert error["code"] == "no_replica" and answer.headers["Retry-After"] == "1"


def test_many_headers_are_for_the_server_to_judge(routed: Routed) -> None:
    """Beyond a number of its own the router would answer with a page that no client reads."""
    assert requests.get(f"{routed.url}/health", headers={f"X-{number}": "a" for number in range(110)}, timeout=5).ok
    answer = requests.get(f"{routed.url}/health", headers={f"X-{number}": "a" for number in range(300)}, timeout=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_an_owner_that_ended_a_moment_ago(tmp_path: Path) -> None:
    """Its health has not been looked at since. Another replica believes that it runs: the client asks once more."""
    servers = [fake(tag, tmp_path) for tag in ("r1", "r2")]
    with Routed(tmp_path, servers) as pair:
        parent = ask(pair, {}, {"X-Bequest-Replica": "r2"}).json()["id"]
        wrong = ask(pair, {"continuation_of": parent}, {"X-Bequest-Replica": "r1"})
        assert wrong.status_code == 421, "whoever was named has answered"
        pair.router.ask("disable health replicas/r2")
        servers[1].kill()
        answer = ask(pair, {"continuation_of": parent})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_failed"), answer.text
        assert answer.headers["Retry-After"] == "1"
        pair.router.ask("enable health replicas/r2")
        end = time.monotonic() + 20
        while (answer := ask(pair, {"continuation_of": parent})).status_code == 503:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert answer.json()["error"]["code"] == "continuation_parent_not_found"


def test_prompts_that_begin_alike_meet(routed: Routed) -> None:
    begins = [f"system prompt {number} " * 18 for number in range(24)]
    first = [on(ask(routed, {"prompt": begin + "one"})) for begin in begins]
    again = [on(ask(routed, {"prompt": begin + "two"})) for begin in begins]
    assert first == again
    assert len(Counter(first)) == 3, "and different ones do not all meet"


def test_conversations_with_one_system_prompt_spread(routed: Routed) -> None:
    """And each of them stays, as its later turns are sent along with the first."""
    system = {"role": "system", "content": "You are brief. " * 8}

    def says(number: int, *more: str) -> str:
        texts = [f"{number} is my question", *more]
        messages = [system, *({"role": "user", "content": text} for text in texts)]
        body = {"messages": messages, "max_tokens": 1}
        return on(requests.post(f"{routed.url}/v1/chat/completions", json=body, timeout=20))

    first = [says(number) for number in range(18)]
    assert len({*first}) == 3
    assert [says(number, "and then?") for number in range(18)] == first


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", lambda one, two: {"messages": [user(parts(one)), user(parts(two))]}),
        ("/v1/chat/completions", lambda one, two: {"messages": [user(one), user(parts(two))]}),
        ("/v1/messages", lambda one, two: {"system": "s", "messages": [user(parts(one)), user(two)]}),
        ("/v1/responses", lambda one, two: {"input": [user(one), user(parts(two))]}),
        ("/v1/completions", lambda one, two: {"stop": ["x"], "prompt": [*f"{one} {two}".encode()]}),
        ("/v1/completions", lambda one, two: {"prompt": [f"{one} {two}"]}),
    ],
)
def test_prompts_of_any_form_meet_and_spread(routed: Routed, path: str, body: Any) -> None:
    """Parts, items, lists and tokens; and the second message counts as it does in text."""

    def says(number: int, end: str) -> str:
        most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        asked = {**body("the same system prompt", f"{number} is my question"), most: 1, "user": end}
        return on(requests.post(f"{routed.url}{path}", json=asked, timeout=20))

    first = [says(number, "one") for number in range(12)]
    assert len({*first}) > 1
    again = [says(number, "two") for number in range(12)]
    assert sum(one == two for one, two in zip(first, again, strict=True)) >= 9, "unless a replica is busy"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_responses_files_and_batches_are_found_by_their_ids(routed: Routed) -> None:
    headers = {"X-Bequest-Replica": "r2"}
    made = requests.post(f"{routed.url}/v1/responses", json={"input": "x", "max_output_tokens": 2}, headers=headers)
    response = made.json()["id"]
    assert on(requests.get(f"{routed.url}/v1/responses/{response}", timeout=5)) == "r2"
    more = {"input": "y", "previous_response_id": response, "max_output_tokens": 2}
    assert on(requests.post(f"{routed.url}/v1/responses", json=more, timeout=20)) == "r2"
    assert on(requests.post(f"{routed.url}/v1/responses/input_tokens", json=more, timeout=20)) == "r2"
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
    form = {"files": {"file": ("a.jsonl", line)}, "data": {"purpose": "batch"}}
    file = requests.post(f"{routed.url}/v1/files", headers=headers, timeout=5, **form).json()["id"]
    assert on(requests.get(f"{routed.url}/v1/files/{file}/content", timeout=5)) == "r2"
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = requests.post(f"{routed.url}/v1/batches", json=body, timeout=5)
    assert on(batch) == "r2"
    assert on(requests.get(f"{routed.url}/v1/batches/{batch.json()['id']}", timeout=5)) == "r2"


def test_a_stream_is_not_held_back(routed: Routed) -> None:
    """A word comes every 20 ms, and each arrives before the next is said."""
    body = {"prompt": "x", "max_tokens": 20, "stream": True}
    with requests.post(f"{routed.url}/v1/completions", json=body, stream=True, timeout=20) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith(b"data: {")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) >= 20 and sum(gap > 0.005 for gap in gaps) > 10, gaps


def test_metrics_and_the_console_are_those_of_a_named_replica(routed: Routed) -> None:
    refused = requests.get(f"{routed.url}/metrics", timeout=5)
    assert refused.status_code == 404 and "scrape each of them" in refused.text
    assert on(requests.get(f"{routed.url}/metrics?bequest-replica=r3", timeout=5)) == "r3"
    with requests.Session() as browser:
        assert on(browser.get(f"{routed.url}/?bequest-replica=r2", timeout=5)) == "r2"
        assert {on(browser.get(f"{routed.url}/console/state", timeout=5)) for _ in range(6)} == {"r2"}


def test_a_replica_that_drains_gets_children_and_no_prompts(routed: Routed) -> None:
    parent = ask(routed, {}, {"X-Bequest-Replica": "r1"}).json()["id"]
    routed.router.set_state("r1", "drain")
    try:
        assert "r1" not in {on(ask(routed, {"prompt": f"{number} drained"})) for number in range(12)}
        assert on(ask(routed, {"continuation_of": parent})) == "r1"
    finally:
        routed.router.set_state("r1", "ready")


def test_a_router_says_whom_it_reaches(routed: Routed) -> None:
    assert [routed.router.reaches(tag) for tag in ("r1", "r2", "r9")] == [True, True, False]


def test_a_reload_keeps_streams_and_names(routed: Routed) -> None:
    assert on(ask(routed, {"request_id": "before"}, {"X-Bequest-Replica": "r3"})) == "r3"
    body = {"prompt": "x", "max_tokens": 60, "stream": True}
    with requests.post(f"{routed.url}/v1/completions", json=body, stream=True, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        routed.router.reload(routed.backends)
        routed.until_up(*TAGS)
        assert b"data: [DONE]" in list(lines)
    again = ask(routed, {"continuation_of": "before"})
    assert on(again) == "r3"


def test_a_dead_owner_is_said(routed: Routed) -> None:
    """Last: it kills one. Nobody else has the lease, and the answer says so."""
    parent = ask(routed, {}, {"X-Bequest-Replica": "r2"}).json()["id"]
    routed.servers["r2"].kill()
    answers = [ask(routed, {"prompt": f"{number} without r2"}) for number in range(12)]
    assert "r2" not in {on(answer) for answer in answers}, "nobody waits for it"
    routed.until(lambda: routed.status("r2") == "DOWN")
    lost = ask(routed, {"continuation_of": parent})
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "continuation_parent_not_found")
    whole = ask(routed, {"continuation_of": parent, "continuation_fallback": "all of it"})
    assert whole.ok, "it brings what can be computed instead"
    for number in range(4):  # the router does not read as far as the parent
        long = {"prompt": f"{number}", "user": LONG, "continuation_of": parent}
        assert ask(routed, {**long, "continuation_fallback": "all of it"}).ok
        assert ask(routed, long).json()["error"]["code"] == "continuation_parent_not_found"


def test_tenants_have_names_of_their_own(tmp_path: Path) -> None:
    """Two keys of one tenant share them. The router knows digests alone."""
    keys = {"sk-a-one": "acme", "sk-a-two": "acme", "sk-b": "blue"}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f'[[keys]]\nname = "{key}"\ntenant = "{who}"\nkey = "{key}"\n' for key, who in keys.items())
    )
    tenants = {hashlib.sha256(key.encode()).hexdigest(): Holder(who) for key, who in keys.items()}
    servers = [fake(tag, tmp_path, "--api-key-file", str(file)) for tag in TAGS[:2]]
    with Routed(tmp_path, servers, tenants) as routed:
        for key, tag in (("sk-a-one", "r1"), ("sk-b", "r2")):
            headers = {"Authorization": f"Bearer {key}", "X-Bequest-Replica": tag}
            assert on(ask(routed, {"request_id": "mars"}, headers)) == tag
        for key, tag in (("sk-a-two", "r1"), ("sk-b", "r2")):
            assert on(ask(routed, {"continuation_of": "mars"}, {"x-api-key": key})) == tag
            both = {"x-api-key": key, "Authorization": "Basic eDp5"}  # of a proxy before it
            assert on(ask(routed, {"continuation_of": "mars"}, both)) == tag
        assert ask(routed, {}, {"Authorization": "Bearer nobody's"}).status_code == 401
    assert not any("sk-" in file.read_text() for file in (tmp_path / "router").iterdir() if file.is_file())


def test_the_rate_of_a_key_is_that_of_all_replicas(tmp_path: Path) -> None:
    """Counted by the router: three replicas do not give three times as much, and one gets all of it."""
    rates = {"sk-slow": 6.0, "sk-rare": 0.5, "sk-free": None}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[[keys]]\nname = "{key}"\nkey = "{key}"\n' + (f"requests_per_minute = {rate}\n" if rate else "")
            for key, rate in rates.items()
        )
    )
    holders = {hashlib.sha256(key.encode()).hexdigest(): Holder(key, rate) for key, rate in rates.items()}
    servers = [fake(tag, tmp_path, "--api-key-file", str(file)) for tag in TAGS]
    with Routed(tmp_path, servers, holders) as routed:

        def send(key: str, count: int, **headers: str) -> list[requests.Response]:
            bearer = {"Authorization": f"Bearer {key}", **headers}
            return [ask(routed, {"prompt": f"{number} of {key}", "max_tokens": 1}, bearer) for number in range(count)]

        began = time.monotonic()
        answers = send("sk-slow", 30)
        taken = sum(answer.ok for answer in answers)
        assert 6 <= taken <= 6 + (time.monotonic() - began) / 10
        assert len({on(answer) for answer in answers if answer.ok}) > 1, "no replica has counted six"
        refused = next(answer for answer in answers if not answer.ok)
        assert refused.status_code == 429 and 1 <= int(refused.headers["Retry-After"]) <= 10
        assert "may have 6 requests a minute; try again in" in refused.json()["error"]["message"]
        assert requests.get(f"{routed.url}/v1/models", headers={"x-api-key": "sk-slow"}, timeout=5).ok
        assert [answer.status_code for answer in send("sk-rare", 3)] == [200, 429, 429]
        mistaken = send("sk-free", 12, **{"X-Bequest-Over-Rate": "5000"})
        assert all(answer.ok for answer in mistaken), "only the router says so"
        time.sleep(10.5)
        assert sum(answer.ok for answer in send("sk-slow", 3)) in (1, 2), "the bucket fills"
