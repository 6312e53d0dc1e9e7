"""The ground rules of HTTP: paths, methods, bodies, keys, origins, ids, operations."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from bequest.engine.types.model import Numbers
from bequest.engine.watching.observation import EngineLoad, RequestStats, StepStats
from tests.server.conftest import Starter
from tests.server.fakes import BOS, FakeEngine, FakeText
from tests.server.front import Front
from tests.text.conftest import make_byte_fallback

COMPLETION = {"prompt": "abc"}


async def raw_exchange(front: Front, head: str, body: bytes = b"") -> tuple[bytes, dict[str, str], Any]:
    """Status line, headers and JSON of the answer to exactly these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
    headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    writer.close()
    await writer.wait_closed()
    return status.encode(), headers, json.loads(content) if content else None


@pytest.mark.parametrize(
    "method, path, status, code",
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/chat/completions", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "unknown_url"),
        ("GET", "/V1/models", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods(front: Front, method: str, path: str, status: int, code: str) -> None:
    async with front.http.request(method, front.url + path) as answer:
        body = await answer.json()
    assert answer.status == status and body["error"]["code"] == code
    assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")  # as OpenAI
    assert answer.headers["Server"] == "bequest" and answer.headers["X-Request-Id"]
    assert ("Allow" in answer.headers) == (status == 405)
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_input_tokens_are_no_response(front: Front) -> None:
    """It stands where the id of a response could stand, whose methods are others."""
    for method in ("GET", "DELETE", "PUT"):
        async with front.http.request(method, f"{front.url}/v1/responses/input_tokens") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    async with front.http.get(f"{front.url}/v1/responses/input_tokens2") as answer:
        assert answer.status == 404 and (await answer.json())["error"]["code"] == "response_not_found"
    async with front.http.put(f"{front.url}/v1/responses/input_tokens2") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET, HEAD")


async def test_an_expectation_where_nothing_is(front: Front) -> None:
    """It is refused before any handler or middleware runs, and is JSON all the same."""
    for path in ("/nothing", "/v1/completions", "/health"):
        head = f"POST {path} HTTP/1.1\nHost: localhost\nExpect: 200-ok\nContent-Length: 0\n"
        status, headers, body = await raw_exchange(front, head)
        assert b" 417 " in status and body["error"]["code"] == "invalid_value"
        assert headers["server"] == "bequest" and headers["x-request-id"]


async def test_bytes_that_are_no_request(front: Front) -> None:
    for head in ("GARBAGE\n\n", "GET / HTTP/1.1\nBad Header\n\n", f"GET /{'x' * 9000} HTTP/1.1\nHost: a\n\n"):
        status, headers, body = await raw_exchange(front, head)
        assert (b" 431 " if "xxx" in head else b" 400 ") in status and headers["server"] == "bequest"
        assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path, meant",
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/health", "/health"),
        ("/nothing", None),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_path(front: Front, path: str, meant: str | None) -> None:
    answer, content = await front.post(path, {})
    assert answer.status == 404
    hint = "" if meant is None else f" It is {meant}: a client's base URL ends in /v1, once."
    assert content["error"]["message"] == f"There is nothing at POST {path}.{hint}"


@pytest.mark.parametrize(
    "encoding, body",
    [
        ("Content-Encoding: gzip\nContent-Length: 10\n", b"not gzip!!"),
        ("Content-Encoding: deflate\nContent-Length: 10\n", b"not gzip!!"),
        ("Transfer-Encoding: chunked\n", b"zz\r\nnot a chunk"),
        ("Transfer-Encoding: chunked\n", b'5\r\n{"a":1}\r\n0\r\n\r\n'),
    ],
)
async def test_bodies_that_are_broken(front: Front, encoding: str, body: bytes) -> None:
    head = f"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n{encoding}"
    status, headers, content = await raw_exchange(front, head, body)
    assert b" 400 " in status and headers["x-request-id"]
    assert content["error"]["type"] == "invalid_request_error"


async def test_a_compressed_body(front: Front) -> None:
    import gzip

    data = gzip.compress(json.dumps(COMPLETION).encode())
    answer, _ = await front.post("/v1/completions", data, headers={"Content-Encoding": "gzip"})
    assert answer.status == 200
    bomb = gzip.compress(b" " * 2**26)
    answer, body = await front.post("/v1/completions", bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status == 413 and body["error"]["code"] == "request_too_large"


async def test_a_body_that_never_comes(front: Front) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    await front.settle()
    writer.close()
    await front.settle()
    assert front.engine.submitted == [] and front.engine.aborted == []


@pytest.mark.parametrize("name", ["%ff%00", "..%2f..%2fetc", "a%0d%0aX:1", "%E2%82%AC", "%", "a" * 3000])
async def test_strange_model_names(front: Front, name: str) -> None:
    status, _, content = await raw_exchange(front, f"GET /v1/models/{name} HTTP/1.1\nHost: localhost\n")
    assert b" 404 " in status and content["error"]["code"] in ("model_not_found", "unknown_url")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_other_content_types(front: Front, kind: str) -> None:
    answer, body = await front.post("/v1/completions", COMPLETION, headers={"Content-Type": kind})
    assert answer.status == 415 and body["error"]["code"] == "unsupported_media_type"
    assert "-H 'Content-Type: application/json'" in body["error"]["message"]


async def test_content_type_with_charset(front: Front) -> None:
    kind = "application/json; charset=utf-8"
    answer, _ = await front.post("/v1/completions", COMPLETION, headers={"Content-Type": kind, "Accept": "text/html"})
    assert answer.status == 200


async def test_bodies_that_are_too_large(start: Starter) -> None:
    front = await start(max_body_mb=0.001)
    large = json.dumps({"prompt": "x" * 2000}).encode()

    async def chunked() -> Any:
        yield large

    for data in (large, chunked()):
        async with front.http.post(
            front.url + "/v1/completions", data=data, headers={"Content-Type": "application/json"}
        ) as answer:
            body = await answer.json()
        assert answer.status == 413 and body["error"]["code"] == "request_too_large"
        assert body["error"]["details"] == {"limit": 1048}
    with pytest.raises(openai.APIStatusError) as caught:
        await front.client().completions.create(model="fake/model", prompt="x" * 2000)
    assert caught.value.status_code == 413


async def test_a_body_that_expects_to_be_refused_is_never_sent(start: Starter) -> None:
    front = await start(max_body_mb=0.001, api_key=["secret"])
    head = (
        "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: {}\nContent-Length: {}\nExpect: 100-continue\n"
    )
    cases = [
        ("application/json", 2000, "Authorization: Bearer secret\n", b"413"),
        ("application/json", 20, "Authorization: Bearer wrong\n", b"401"),
        ("text/plain", 20, "Authorization: Bearer secret\n", b"415"),
    ]
    for kind, length, key, expected in cases:
        status, headers, body = await raw_exchange(front, head.format(kind, length) + key)
        assert expected in status and headers["connection"] == "close" and body["error"]["code"]
        assert headers["x-request-id"]
    status, headers, body = await raw_exchange(front, "GET /health HTTP/1.1\nHost: localhost\nExpect: something-else\n")
    assert b"417" in status and body["error"]["code"]


async def test_a_body_that_is_expected(front: Front) -> None:
    body = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(body)
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


async def test_a_client_of_http_1_0_gets_no_interim_answer(front: Front) -> None:
    """It would take that for the answer."""
    body = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n%b" % (len(body), body)
    )
    assert (await reader.readline()).startswith(b"HTTP/1.0 200")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", ["/v1/models/fake/model", "/v1/models/fake%2Fmodel"])
async def test_models(front: Front, path: str) -> None:
    from yarl import URL

    async with front.http.get(URL(front.url + path, encoded=True)) as answer:
        one = await answer.json()
    _, listed = await front.get("/v1/models")
    assert listed["object"] == "list" and listed["data"] == [one]
    openai = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    anthropic = {"type", "lifecycle", "display_name", "created_at", "max_input_tokens"}
    assert set(one) == {*openai, *anthropic, "reasoning_parser", "tool_call_parser"}
    assert (await front.strict().models.retrieve("fake/model")).id == "fake/model"
    assert [model.id async for model in front.strict().models.list()] == ["fake/model"]


async def test_served_names(start: Starter) -> None:
    front = await start(served_model_name=["small", "org/large"])
    assert [model.id async for model in front.client().models.list()] == ["small", "org/large"]
    answer = await front.client().completions.create(model="org/large", prompt="a")
    assert answer.model == "org/large"
    with pytest.raises(openai.NotFoundError):
        await front.client().completions.create(model="fake/model", prompt="a")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize(front: Front, prefix: str) -> None:
    _, plain = await front.post(prefix + "/tokenize", {"model": "fake/model", "prompt": "ab"})
    assert plain == {"count": 3, "max_model_len": 512, "tokens": [BOS, 97, 98], "token_strs": None}
    _, bare = await front.post(
        prefix + "/tokenize", {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    )
    assert bare["tokens"] == [97, 98] and bare["token_strs"] == ["a", "b"]
    _, chat = await front.post(prefix + "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert bytes(chat["tokens"]) == b"user: hi\nassistant: "
    idle = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": False, "continue_final_message": False}
    _, same = await front.post(prefix + "/tokenize", {"prompt": "ab", **idle})
    assert same == plain
    _, text = await front.post(prefix + "/detokenize", {"tokens": plain["tokens"]})
    assert text == {"prompt": "<s>ab"}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ],
)
async def test_tokenize_errors(front: Front, path: str, body: dict[str, Any], param: str) -> None:
    answer, content = await front.post(path, body)
    assert answer.status == 400 and content["error"]["param"] == param


async def test_operations(front: Front) -> None:
    for path in ("/health", "/live"):
        answer, _ = await front.get(path)
        assert answer.status == 200
        async with front.http.head(front.url + path) as head:
            assert head.status == 200 and await head.read() == b""
    _, version = await front.get("/version")
    assert version["version"]
    for state, code in (("loading", "loading"), ("draining", "draining"), ("dead", "engine_dead")):
        front.engine.state = state
        answer, body = await front.get("/health")
        assert answer.status == 503 and body["error"]["code"] == code and answer.headers["Retry-After"]
        answer, _ = await front.get("/live")
        assert answer.status == 200


async def test_health_says_how_codes_are_multiplied(front: Front) -> None:
    assert (await front.get("/health"))[1] == {"status": "ok"}
    front.engine.info = replace(front.engine.info, numbers=Numbers(cpu_matmul="fast"))
    assert (await front.get("/health"))[1] == {"status": "ok", "cpu_matmul": "fast"}


async def test_metrics(front: Front) -> None:
    front.metrics.load = lambda: EngineLoad(running=3, waiting=2, used_blocks=5, usable_blocks=20)
    front.metrics.on_step(
        StepStats(
            prompt_tokens=7, generated_tokens=2, preempted=1, swapped_out=5, swapped_in=6,
            seconds=0.004, first_token_seconds=(0.05,), inter_token_seconds=(0.0009, 0.001, 99.0),
            experts=(24, 256),
        )
    )  # fmt: skip
    front.metrics.on_finish(
        RequestStats(
            reason="stop", prompt_tokens=7, cached_tokens=4, completion_tokens=9, max_tokens=16, n=1,
            queue_seconds=0.1, prefill_seconds=0.2, decode_seconds=0.3, total_seconds=0.6,
        )
    )  # fmt: skip
    waited = RequestStats("abort", 100, 0, 0, 16, 1, 0.1, 0.0, 0.0, 0.1)  # it left the queue
    served = RequestStats("abort", 5, 0, 1, 16, 1, 0.1, 0.1, 0.0, 0.2)
    front.metrics.on_finish(waited)
    front.metrics.on_finish(served)
    async with front.http.get(front.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    label = '{model_name="fake/model"}'
    for line in (
        f"vllm:num_requests_running{label} 3.0",
        f"vllm:num_requests_waiting{label} 2.0",
        f"vllm:kv_cache_usage_perc{label} 0.25",
        'vllm:cache_config_info{block_size="0",cache_dtype="fp8_e4m3",enable_prefix_caching="True",'
        'model_name="fake/model",num_cpu_blocks="0",num_gpu_blocks="20"} 1.0',
        'vllm:num_requests_waiting_by_reason{model_name="fake/model",reason="capacity"} 2.0',
        'vllm:num_requests_waiting_by_reason{model_name="fake/model",reason="deferred"} 0.0',
        f"vllm:prompt_tokens_total{label} 12.0",
        f"bequest:computed_prompt_tokens_total{label} 7.0",
        f"vllm:generation_tokens_total{label} 2.0",
        f"vllm:num_preemptions_total{label} 1.0",
        f"bequest:experts_read_total{label} 24.0",
        f"bequest:experts_held_total{label} 256.0",
        f"vllm:prefix_cache_queries_total{label} 12.0",
        f"vllm:prefix_cache_hits_total{label} 4.0",
        'vllm:request_success_total{finished_reason="stop",model_name="fake/model"} 1.0',
        f"vllm:time_to_first_token_seconds_count{label} 1.0",
        'vllm:inter_token_latency_seconds_bucket{le="0.0005",model_name="fake/model"} 0.0',
        'vllm:inter_token_latency_seconds_bucket{le="0.001",model_name="fake/model"} 2.0',
        'vllm:inter_token_latency_seconds_bucket{le="10.0",model_name="fake/model"} 2.0',
        'vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="fake/model"} 3.0',
        f"vllm:request_generation_tokens_sum{label} 10.0",
    ):
        assert line in lines, line


async def test_keys(start: Starter, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    names = (("one", "acme", "sk-acme"), ("two", "acme", "sk-spare"), ("three", "zeta", "sk-zeta"))
    file.write_text("".join(f'[[keys]]\nname = "{n}"\ntenant = "{t}"\nkey = "{k}"\n' for n, t, k in names))
    front = await start(api_key=["sk-main"], api_key_file=str(file))
    for key, tenant in (("sk-main", "key-1"), ("sk-acme", "acme"), ("sk-spare", "acme"), ("sk-zeta", "zeta")):
        await front.client(api_key=key).completions.create(model="fake/model", prompt="a")
        assert front.engine.submitted[-1].tenant == tenant
    with pytest.raises(openai.AuthenticationError) as caught:
        await front.client(api_key="sk-wrong").completions.create(model="fake/model", prompt="a")
    assert caught.value.code == "invalid_api_key" and caught.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert "sk-" not in caught.value.response.text
    for header in ({}, {"Authorization": "sk-main"}, {"Authorization": "Basic sk-main"}, {"Authorization": "Bearer "}):
        answer, body = await front.post("/v1/completions", COMPLETION, headers=header)
        assert answer.status == 401 and body["error"]["type"] == "authentication_error"
    answer, _ = await front.post("/v1/completions", COMPLETION, headers={"Authorization": "bEARER  sk-main"})
    assert answer.status == 200


async def test_what_keys_guard(start: Starter) -> None:
    front = await start(api_key=["k"])
    open_paths = {"/health": 200, "/live": 200, "/metrics": 200, "/version": 401, "/v1/models": 401, "/nothing": 401}
    for path, status in open_paths.items():
        async with front.http.get(front.url + path) as answer:
            assert answer.status == status, path
    guarded = await start(api_key=["k"], guard_metrics=True)
    async with guarded.http.get(guarded.url + "/metrics") as answer:
        assert answer.status == 401


async def test_names_are_one_tenants(start: Starter) -> None:
    front = await start(api_key=["a", "b"])
    front.engine.held = True
    body = {**COMPLETION, "request_id": "same"}
    calls = [
        asyncio.create_task(front.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}))
        for key in ("a", "b")
    ]
    await front.until(lambda: len(front.engine.runs) == 2)
    front.engine.advance()
    assert [(await call)[0].status for call in calls] == [200, 200]
    answer, body = await front.post(
        "/v1/completions", {**COMPLETION, "priority": -1}, headers={"Authorization": "Bearer a"}
    )
    assert answer.status == 400 and body["error"]["param"] == "priority"


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200), ("LOCALHOST:1", 200), ("me.localhost", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("192.168.0.1", 403), ("localhost.evil", 403),
    ],
)  # fmt: skip
async def test_host_on_loopback_without_keys(front: Front, host: str, status: int) -> None:
    async with front.http.get(front.url + "/v1/models", headers={"Host": host}) as answer:
        assert answer.status == status
        if status == 403:
            assert (await answer.json())["error"]["code"] == "permission_denied"


async def test_host_elsewhere(start: Starter) -> None:
    for config in ({"api_key": ["k"]}, {"host": "0.0.0.0"}):
        front = await start(**config)
        headers = {"Host": "model.example", "Authorization": "Bearer k"}
        async with front.http.get(front.url + "/v1/models", headers=headers) as answer:
            assert answer.status == 200


async def test_cross_origin(start: Starter) -> None:
    front = await start(allowed_origins=["https://ui.example"], api_key=["k"])
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (("https://ui.example", 204), ("https://evil.example", 401)):
        async with front.http.options(
            front.url + "/v1/chat/completions", headers={"Origin": origin, **preflight}
        ) as answer:
            assert answer.status == status
            assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == (status == 204)
    answer, _ = await front.post("/v1/completions", {}, headers={"Origin": "https://ui.example"})
    assert answer.status == 401 and answer.headers["Access-Control-Allow-Origin"] == "https://ui.example"
    exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "X-Should-Retry", "Retry-After", "X-Bequest-Record", "X-Bequest-Owner"} <= set(exposed)


@pytest.mark.parametrize("given, kept", [("trace-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
async def test_request_ids(front: Front, given: str, kept: bool) -> None:
    answer, body = await front.post("/v1/completions", COMPLETION, headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == (given if kept else body["id"])
    answer, _ = await front.post("/v1/completions", {}, headers={"X-Request-Id": given})
    assert answer.status == 400 and (answer.headers["X-Request-Id"] == given) == kept
    streamed = await front.connect({**COMPLETION, "stream": True})
    head = await streamed.head()
    assert f"X-Request-Id: {front.engine.submitted[-1].id}".encode() in head
    await streamed.close()


async def test_sampling_reaches_the_engine(front: Front) -> None:
    body = {
        "prompt": "abc", "max_tokens": 9, "n": 2, "min_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 4,
        "min_p": 0.125, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": -1,
        "logit_bias": {"5": -100, "7": 1.5, "9": None}, "allowed_token_ids": [5, 6], "bad_words": ["x", " y"],
        "stop": "z", "stop_token_ids": [9, 9], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "logprobs": 2, "prompt_logprobs": 3, "priority": -5, "cache_salt": "s",
        "timeout": 60, "truncate_prompt_tokens": 2,
    }  # fmt: skip
    answer, content = await front.post("/v1/completions", body)
    assert answer.status == 200, content
    request = front.engine.submitted[0]
    params = request.params
    assert request.prompt_token_ids == tuple(b"bc") and request.priority == -5 and request.cache_salt == "s"
    assert request.deadline is not None
    for name in ("max_tokens", "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
                 "frequency_penalty", "repetition_penalty", "ignore_eos", "include_stop_str_in_output",
                 "skip_special_tokens", "logprobs", "prompt_logprobs"):  # fmt: skip
        assert getattr(params, name) == body[name], name
    assert params.seed == 2**64 - 1 and params.logit_bias == ((5, -100.0), (7, 1.5))
    assert params.allowed_token_ids == (5, 6) and params.stop == ("z",) and params.stop_token_ids == {9}
    assert params.bad_words == (tuple(b"x"), tuple(b" x"), tuple(b" y"))


async def test_bad_words_behind_a_tokenizer_that_begins_with_a_space(start: Starter) -> None:
    """SentencePiece puts one before a text. A word inside another has none, one that opens the next has one."""
    tokenizer, engine = make_byte_fallback(), FakeEngine()
    engine.info = replace(engine.info, vocab_size=300)
    front = await start(engine, FakeText(tokenizer))  # type: ignore[arg-type]
    body = {"prompt": "b", "bad_words": ["a", " b", "b", "ж", "a a"]}
    answer, content = await front.post("/v1/completions", body)
    assert answer.status == 200, content
    sequences = ["a", "▁a", "▁ b", "b", "<0xD0> <0xB6>", "▁ <0xD0> <0xB6>", "a ▁a", "▁a ▁a"]
    ids = tuple(tuple(tokenizer.id_of(piece) for piece in sequence.split(" ")) for sequence in sequences)
    assert front.engine.submitted[0].params.bad_words == ids


async def test_sampling_defaults(start: Starter) -> None:
    import dataclasses

    engine = FakeEngine()
    engine.info = dataclasses.replace(engine.info, default_sampling={"temperature": 0.25, "top_k": 20, "top_p": 0.5})
    front = await start(engine)
    await front.post("/v1/completions", {"prompt": "a", "top_p": 0, "top_k": -1})
    params = engine.submitted[0].params
    assert params.temperature == 0.25 and params.top_k == 0 and 0 < params.top_p < 1e-5
    assert params.max_tokens == 16 and params.stop == () and params.allowed_token_ids is None
    await front.post("/v1/completions", {"prompt": "x" * 505})
    assert engine.submitted[1].params.max_tokens == 512 - 506, "the default shrinks to the room there is"
    await front.post("/v1/completions", {"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 12})
    assert len(engine.submitted[2].prompt_token_ids) == 500
