"""The lines that requests leave in the log, and the line of a busy server."""

from __future__ import annotations

import asyncio
import json

import pytest

from bequest.engine.watching.observation import EngineLoad, RequestStats, StepStats
from bequest.server.operation.logs import JsonFormatter, TextFormatter
from bequest.server.operation.metrics import Metrics
from bequest.server.operation.spending import Spending
from bequest.server.process.throughput import keep_reporting
from tests.server.front import Front
from tests.server.test_observability import logged


async def test_a_refusal_is_logged_with_its_reason(front: Front) -> None:
    with logged(JsonFormatter()) as log:
        await front.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
        await front.get("/v1/nowhere")
    refused, nowhere = map(json.loads, log.getvalue().splitlines())
    assert refused["status"] == 400 and refused["level"] == "info" and refused["code"] == "invalid_value"
    assert "`max_tokens`" in refused["error"] and "400 in" in refused["message"] and "max_tokens" in refused["message"]
    assert nowhere["level"] == "info" and nowhere["code"] == "unknown_url"


async def test_a_reason_that_quotes_a_client_stays_in_its_line(front: Front) -> None:
    with logged(TextFormatter()) as log:
        await front.post("/v1/completions", {"prompt": "a", "model": "x\n12:00:00 E forged\x1b[31m"})
    [line] = log.getvalue().splitlines()
    assert "model_not_found" in line and "\x1b" not in line


async def test_ignored_fields_are_named(front: Front) -> None:
    with logged(JsonFormatter()) as log:
        await front.post("/v1/completions", {"prompt": "a", "colour": 1})
        await front.post("/tokenize", {"prompt": "a", "flavour": 1})
    first, second = map(json.loads, log.getvalue().splitlines())
    assert first["ignored"] == "colour" and first["message"].endswith("ignored fields: colour")
    assert second["ignored"] == "flavour"


def stats(id: str, output: int = 11, n: int = 1) -> RequestStats:
    return RequestStats("stop", 30, 16, output, 20, n, 0.25, 0.75, 2.0, 3.0, id=id)


def test_an_account_adds_the_requests_of_an_answer() -> None:
    spending = Spending()
    spending.open("cmpl-a")
    spending.on_finish(stats("cmpl-a"))
    assert str(spending.close("cmpl-a")) == (
        "30 prompt tokens (16 cached), 11 output tokens, first after 1.000 s, then 5.0 tokens/s"
    )
    spending.open("cmpl-b")
    for id in ("cmpl-b", "cmpl-b-1", "cmpl-other", "llm-x"):
        spending.on_finish(stats(id))
    account = spending.close("cmpl-b")
    assert account is not None
    assert account.fields() == {
        "prompt_tokens": 60,
        "cached_tokens": 32,
        "output_tokens": 22,
        "first_token_seconds": 1.0,
        "tokens_per_second": 10.0,
    }
    assert spending.close("cmpl-b") is None and spending.close(None) is None


def test_an_account_without_rates() -> None:
    spending = Spending()
    spending.open("a")
    assert spending.close("a") is None, "nothing was computed"
    spending.open("a")
    spending.on_finish(stats("a", output=0))
    assert str(spending.close("a")) == "30 prompt tokens (16 cached), 0 output tokens"


async def test_no_account_is_left_behind(front: Front) -> None:
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": "a", "max_tokens": -1}):
        await front.post("/v1/completions", body)
    assert not front.metrics.spending._open


async def test_a_busy_server_tells_its_throughput(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bequest")
    metrics = Metrics()
    load = EngineLoad(3, 1, 25, 100)
    telling = asyncio.create_task(keep_reporting(metrics, lambda: load, 0.01))
    await asyncio.sleep(0.05)
    assert not caplog.records, "nothing was done"
    metrics.on_step(StepStats(1000, 500, 0, 0, 0, 0.1, (), ()))
    for _ in range(500):
        if caplog.records:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    telling.cancel()
    [record] = caplog.records
    assert record.getMessage().endswith("output tokens/s; 3 sequences run, 1 wait, 25% of the cache is in use")
