"""Keys of a file: tenants, limits, expiry, reload; and that nothing is unguarded."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bequest.server.about.console import STATIC_PATHS
from bequest.server.access.admission import Admission
from bequest.server.access.key_file import KeyLimits
from bequest.server.access.keys import Caller, KeyRing
from bequest.server.app import CONSOLE_ROUTES, ROUTES
from bequest.server.wire.errors import ApiError
from tests.server.conftest import Starter
from tests.server.front import Front
from tests.server.test_serve import Process

BODY = {"prompt": "abc", "max_tokens": 1}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/hidden_states": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}


def key_file(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def limited(start: Starter, folder: Path, limits: str) -> Front:
    front: Front = await start(api_key_file=key_file(folder, f'[[keys]]\nname = "one"\nkey = "k"\n{limits}\n'))
    return front


async def test_a_file_of_keys(start: Starter, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hidden").hexdigest()
    text = f"""
        [limits]
        max_prompt_tokens = 5
        lowest_priority = -1
        [[keys]]
        name = "acme-1"
        tenant = "acme"
        key = "plain"
        [[keys]]
        name = "zeta"
        sha256 = "{digest}"
        max_prompt_tokens = 9
        expires = 2999-01-01T00:00:00Z
        [[keys]]
        name = "old"
        key = "past"
        expires = 2001-01-01T00:00:00+01:00
    """
    front = await start(api_key_file=key_file(tmp_path, text))
    for key, tenant in (("plain", "acme"), ("hidden", "zeta")):
        answer, _ = await front.post("/v1/completions", {**BODY, "priority": -1}, headers=bearer(key))
        assert answer.status == 200 and front.engine.submitted[-1].tenant == tenant
    answer, _ = await front.post("/v1/completions", {**BODY, "prompt": "abcdefgh"}, headers=bearer("hidden"))
    assert answer.status == 200, "the key's own limit wins over the file's"
    with pytest.raises(openai.AuthenticationError) as caught:
        await front.client(api_key="past").completions.create(model="fake/model", prompt="a")
    assert caught.value.code == "api_key_expired" and "'old'" in caught.value.message
    assert caught.value.response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "keys is missing: a list of tables, at least one"),
        ("keys = []", "keys must be a list of tables, at least one: each begins with [[keys]], in two brackets"),
        ('[keys]\nname = "a"', "each begins with [[keys]], in two brackets"),
        ('[[key]]\nname = "a"', "unknown field 'key'; did you mean 'keys'?"),
        ('{"keys": []}', "not a TOML file: "),
        ('[[keys]]\nname = "a"', "'a' needs either key or sha256"),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\nsha256 = "' + "0" * 64 + '"', "'a' needs either key or sha256"),
        ('[[keys]]\nkey = "s3cret"', "keys[0].name is missing: 1 to 128 ASCII characters"),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\nmax_tokens = 1', "unknown field 'keys[0].max_tokens'"),
        (
            '[[keys]]\nname = "a"\nkey = "s3cret"\nmax_queued = 0',
            "keys[0].max_queued must be a whole number",
        ),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\nexpires = 2030-01-01', "expires must be a time with its zone"),
        ('[[keys]]\nname = "a b"\nkey = "s3cret"', "keys[0].name must be 1 to 128 ASCII characters without spaces"),
        ('[[keys]]\nname = "a"\nkey = "s3cret…"', "keys[0].key must be ASCII characters without spaces"),
        ('[[keys]]\nname = "a"\nsha256 = "s3cret"', "keys[0].sha256 must be 64 hexadecimal digits"),
        ('[[keys]]\nname = "a"\nkye = "s3cret"', "unknown field 'keys[0].kye'; did you mean 'key'?"),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\nexpires = 2030-01-01T00:00:00', "expires must be a time with its zone"),
        ('limits.rate = 1\n[[keys]]\nname = "a"\nkey = "s3cret"', "unknown field 'limits.rate'"),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\n[[keys]]\nname = "a"\nkey = "t"', "name of 'a' is there twice"),
        ('[[keys]]\nname = "a"\nkey = "s3cret"\n[[keys]]\nname = "b"\nkey = "s3cret"', "key of 'b' is there twice"),
        ('[[keys]]\nname = "a"\nkey = "s3cret" oops', "line 3"),
    ],
)
def test_wrong_files_say_why_and_never_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        KeyRing((), key_file(tmp_path, text))
    assert message in str(caught.value) and "s3cret" not in str(caught.value)


def test_keys_of_the_command_line_are_what_a_header_can_bring() -> None:
    """BEQUEST_API_KEY="a, b" has two."""
    ring = KeyRing(["a", " b"])
    assert ring.find("a") and ring.find("b") and not ring.find(" b")
    with pytest.raises(ValueError, match="an API key must not be empty"):
        KeyRing([" "])
    with pytest.raises(ValueError, match="--api-key, BEQUEST_API_KEY: the key of 'key-2' is there"):
        KeyRing(["s3cret", "s3cret "])


async def test_hangup_reads_the_keys_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = key_file(tmp_path, '[[keys]]\nname = "a"\nkey = "first"')
    process = Process(caplog, api_key_file=path)
    process.engine.held = False
    url = await process.url()

    async def status(key: str) -> int:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        async with client:
            return (await client.models.with_raw_response.list()).status_code

    async def hang_up(logged: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(1000):
            if logged in caplog.text:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(caplog.text)

    assert await status("first") == 200
    key_file(tmp_path, '[[keys]]\nname = "a"\nkey = "second"')
    await hang_up("SIGHUP: 1 keys")
    assert await status("second") == 200 and process.engine.expected_tenants == 1
    with pytest.raises(openai.AuthenticationError):
        await status("first")
    key_file(tmp_path, '[[keys]]\nname = "a"\nkey = ')
    await hang_up("the keys stay as they were")
    assert await status("second") == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_hangup_without_a_file_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(caplog)
    await process.url()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.01)
    assert "no --api-key-file" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_nothing_is_unguarded(start: Starter) -> None:
    """Every route, also of what will be added, answers 401 to a stranger, but for those listed here."""
    front = await start(api_key=["k"])
    open_to_all = {"/health", "/live", "/metrics", *STATIC_PATHS}
    seen = set()
    for method, path, _ in (*ROUTES, *CONSOLE_ROUTES):
        url = front.url + path.replace("{id}", "x").replace("{id:.+}", "x").replace("{name:.+}", "x")
        for headers in ({}, bearer("wrong"), {"Authorization": "Bearer"}, {"Authorization": "k"}):
            async with front.http.request(method, url, headers=headers) as answer:
                seen.add(path if answer.status != 401 else None)
    assert seen == {None, *open_to_all}
    assert not front.engine.submitted


# --- limits ------------------------------------------------------------------------------------------------------


async def test_body_bytes(start: Starter, tmp_path: Path) -> None:
    front = await limited(start, tmp_path, "max_body_mb = 0.001")
    big = {**BODY, "prompt": "x" * 2000}
    for headers in ({}, {"Expect": "100-continue"}):
        answer, body = await front.post("/v1/completions", big, headers={**bearer("k"), **headers})
        assert answer.status == 413 and body["error"]["code"] == "request_too_large", headers
        assert body["error"]["details"] == {"limit": 1048} and "of this key" in body["error"]["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    kind = {"Content-Type": "application/json"}
    async with front.http.post(front.url + "/v1/completions", data=chunks(), headers={**bearer("k"), **kind}) as raw:
        assert raw.status == 413, "also without a Content-Length"
    lines = {"Content-Type": "application/x-ndjson"}
    answer, _ = await front.post("/v1/catalogues?name=x", b"[1]\n" * 1000, headers={**bearer("k"), **lines})
    assert answer.status == 413
    assert (await front.post("/v1/completions", BODY, headers=bearer("k")))[0].status == 200


async def test_prompt_tokens_timeout_and_priority(start: Starter, tmp_path: Path) -> None:
    front = await limited(start, tmp_path, "max_prompt_tokens = 20\nmax_timeout = 2\nlowest_priority = 3")
    wrong: list[tuple[dict[str, Any], str, str | None]] = [
        ({"prompt": "a" * 20}, "context_length_exceeded", "prompt"),
        ({"prompt": ["a", "a" * 20]}, "context_length_exceeded", "prompt[1]"),
        ({"timeout": 2.5}, "invalid_value", "timeout"),
        ({"priority": 2}, "invalid_value", "priority"),
    ]
    for fields, code, param in wrong:
        answer, body = await front.post("/v1/completions", {**BODY, "priority": 3, **fields}, headers=bearer("k"))
        assert answer.status == 400 and body["error"]["code"] == code and body["error"]["param"] == param
        if code == "context_length_exceeded":  # clients know it by these words
            assert "This model's maximum context length is 20 " in body["error"]["message"]
            assert "the prompt is too long: 21 tokens" in body["error"]["message"]
    assert not front.engine.submitted
    answer, _ = await front.post("/v1/completions", {**BODY, "prompt": "a" * 19, "priority": 3}, headers=bearer("k"))
    assert answer.status == 200 and front.engine.submitted[0].deadline is not None
    # Most clients cannot say what their priority is: it is the best that the key may have.
    for path, body in ENDPOINTS.items():
        answer, content = await front.post(path, body, headers=bearer("k"))
        assert answer.status == 200, content
        assert front.engine.submitted[-1].priority == 3
    negative = await limited(start, tmp_path, "lowest_priority = -3")
    await negative.post("/v1/completions", BODY, headers=bearer("k"))
    assert negative.engine.submitted[-1].priority == 0


@pytest.mark.parametrize("limit", ["max_concurrent = 2", "max_queued = 2"])
async def test_concurrent_and_queued(start: Starter, tmp_path: Path, limit: str) -> None:
    front = await limited(start, tmp_path, limit)
    front.engine.held = True
    client = front.client(api_key="k")
    calls = [asyncio.create_task(client.completions.create(model="fake/model", prompt="a")) for _ in range(2)]
    await front.until(lambda: len(front.engine.runs) == 2)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model="fake/model", prompt="a")
    assert caught.value.code == "rate_limit_exceeded" and caught.value.response.headers["Retry-After"] == "1"
    assert (await front.get("/v1/models", headers=bearer("k")))[0].status == 200, "only work is counted"
    front.engine.advance()
    await asyncio.gather(*calls)
    last = asyncio.create_task(client.completions.create(model="fake/model", prompt="a"))
    await front.until(lambda: len(front.engine.runs) == 1)
    front.engine.advance()
    await last


async def test_an_abandoned_request_is_not_counted(start: Starter, tmp_path: Path) -> None:
    front = await limited(start, tmp_path, "max_concurrent = 1")
    front.engine.held = True
    for _ in range(3):
        call = asyncio.create_task(front.post("/v1/completions", BODY, headers=bearer("k")))
        await front.until(lambda: len(front.engine.runs) == 1)
        call.cancel()
        await front.until(lambda: not front.engine.runs)
    await front.settle()


def test_the_rate_is_a_bucket() -> None:
    now = 100.0
    admission = Admission(lambda: now)
    caller = Caller("one", "one", KeyLimits(requests_per_minute=6))

    def send() -> str | None:
        try:
            with admission.admitted(caller, lambda _: 0):
                return None
        except ApiError as error:
            assert error.code == "rate_limit_exceeded" and error.status == 429
            return error.headers["Retry-After"]

    assert [send() for _ in range(7)] == [None] * 6 + ["10"]
    now += 4
    assert send() == "6"
    now += 6
    assert [send(), send()] == [None, "10"]
    now += 3600
    assert [send() for _ in range(7)] == [None] * 6 + ["10"], "no more than a minute's worth is saved"
    caller = Caller("rare", "rare", KeyLimits(requests_per_minute=0.5))
    assert [send(), send()] == [None, "60"]


async def test_a_router_that_counts_for_several_servers_is_believed(start: Starter, tmp_path: Path) -> None:
    """It says for how long the rate is spent; a key without a rate has none to spend."""
    front = await limited(start, tmp_path, "requests_per_minute = 60")
    spent = {"X-Bequest-Over-Rate": "2500"}
    answer, body = await front.post("/v1/completions", BODY, headers=bearer("k") | spent)
    assert (answer.status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert answer.headers["Retry-After"] == "3" and "60 requests a minute" in body["error"]["message"]
    for nothing in ("", "soon", "-5", "0"):
        more = bearer("k") | {"X-Bequest-Over-Rate": nothing}
        assert (await front.post("/v1/completions", BODY, headers=more))[0].status == 200


async def test_a_key_without_a_rate_spends_none(start: Starter, tmp_path: Path) -> None:
    front = await limited(start, tmp_path, "max_concurrent = 8")
    spent = bearer("k") | {"X-Bequest-Over-Rate": "2500"}
    assert (await front.post("/v1/completions", BODY, headers=spent))[0].status == 200
