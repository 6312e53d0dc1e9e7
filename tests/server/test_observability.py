"""Log lines, traces, what is counted, and the dashboard that shows it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bequest.engine.errors import InternalError, InvalidRequest
from bequest.engine.watching.observation import RequestStats, StepStats
from bequest.server.operation.logs import CURRENT, JsonFormatter, RequestFilter, TextFormatter
from bequest.server.operation.metrics import Metrics
from bequest.server.operation.tracing import no_tracing, start_tracing
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine, failing_script
from tests.server.front import Front

DASHBOARD = Path(__file__).parent.parent.parent / "deploy" / "grafana-dashboard.json"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """What the server logs inside the block."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(formatter)
    handler.addFilter(RequestFilter())
    logger = logging.getLogger("bequest")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


async def test_json_lines_of_a_request(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged(JsonFormatter()) as log:
        headers = {"X-Request-Id": "mine", "traceparent": PARENT}
        await front.post("/v1/completions", {"prompt": "a"}, headers=headers)
        _, made = await front.post("/v1/completions", {"prompt": "a"})
        monkeypatch.setattr(front.text.tokenizer, "encode", lambda *_, **__: 1 / 0)
        answer, _ = await front.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "broken"})
        await front.get("/health")
        await front.http.head(front.url + "/health")
    assert answer.status == 500
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    first, second, failure, failed, *watched = lines
    assert first["request_id"] == "mine" and first["trace_id"] == TRACE and first["level"] == "info"
    assert first["method"] == "POST" and first["path"] == "/v1/completions" and first["status"] == 200
    assert first["tenant"] == first["key"] == "anonymous" and first["seconds"] >= 0
    assert second["request_id"] == made["id"] and "trace_id" not in second
    assert failure["request_id"] == failed["request_id"] == "broken" and failed["status"] == 500
    assert "ZeroDivisionError" in failure["exception"] and failure["level"] == "error"
    assert [(line["method"], line["level"]) for line in watched] == [("GET", "debug"), ("HEAD", "debug")]
    assert CURRENT.get() is None


async def test_text_lines_and_paths_that_would_break_them(front: Front) -> None:
    with logged(TextFormatter()) as log:
        await front.post("/v1/a%0AINFO%20forged", {}, headers={"X-Request-Id": "x1"})
    [line] = log.getvalue().splitlines()
    assert line.endswith("[x1]") and "POST /v1/a%0AINFO%20forged 404" in line


@pytest.mark.parametrize("header", ["", "nonsense", PARENT[:-1], f"00-{'0' * 32}-00f067aa0ba902b7-01", PARENT.upper()])
async def test_wrong_traceparents_are_none(front: Front, header: str) -> None:
    with logged(JsonFormatter()) as log:
        answer, _ = await front.post("/v1/completions", {"prompt": "a"}, headers={"traceparent": header})
    assert answer.status == 200 and "trace_id" not in json.loads(log.getvalue())


# --- traces ------------------------------------------------------------------------------------------------------


class FakeSpan:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options, self.attributes, self.ended = name, options, dict(options["attributes"]), False

    def set_attribute(self, name: str, value: object) -> None:
        self.attributes[name] = value


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> list[FakeSpan]:
    """The parts of OpenTelemetry's SDK that are used, with the spans that were made."""
    spans: list[FakeSpan] = []

    @contextmanager
    def start_as_current_span(name: str, **options: Any) -> Iterator[FakeSpan]:
        spans.append(FakeSpan(name, options))
        try:
            yield spans[-1]
        finally:
            spans[-1].ended = True

    provider = SimpleNamespace(
        add_span_processor=lambda _: None,
        get_tracer=lambda _: SimpleNamespace(start_as_current_span=start_as_current_span),
    )
    contents: dict[str, dict[str, Any]] = {
        "": {
            "propagate": SimpleNamespace(extract=lambda headers: headers.get("traceparent")),
            "trace": SimpleNamespace(SpanKind=SimpleNamespace(SERVER="server")),
        },
        ".exporter.otlp.proto.http.trace_exporter": {"OTLPSpanExporter": lambda: None},
        ".sdk.resources": {"Resource": SimpleNamespace(create=lambda attributes: attributes)},
        ".sdk.trace": {"TracerProvider": lambda resource: provider},
        ".sdk.trace.export": {"BatchSpanProcessor": lambda _: None},
    }
    for name, members in contents.items():
        module = ModuleType(f"opentelemetry{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    return spans


async def test_spans_are_children_of_their_callers(sdk: list[FakeSpan], start: Starter) -> None:
    front = await start()
    _, body = await front.post("/v1/completions", {"prompt": "a"}, headers={"traceparent": PARENT})
    await front.post("/v1/completions", {}, headers={"X-Request-Id": "wrong"})
    assert [span.name for span in sdk] == ["POST /v1/completions"] * 2 and all(span.ended for span in sdk)
    assert sdk[0].options["context"] == PARENT and sdk[1].options["context"] is None
    assert [span.attributes["http.response.status_code"] for span in sdk] == [200, 400]
    assert [span.attributes["bequest.request_id"] for span in sdk] == [body["id"], "wrong"]


def test_traces_that_nobody_wants_or_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    assert start_tracing({}) is no_tracing
    assert start_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is no_tracing


def test_an_sdk_that_is_missing_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert start_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is no_tracing
    assert "opentelemetry-exporter-otlp-proto-http is not installed" in caplog.text


# --- metrics -----------------------------------------------------------------------------------------------------


async def test_answers_and_errors_are_counted(front: Front) -> None:
    await front.post("/v1/completions", {"prompt": "a"})
    await front.post("/v1/completions", {}, headers={"X-Request-Id": "empty"})
    async with front.http.request("TRACE", front.url + "/x/y"):
        pass
    text = front.metrics.exposition()[0].decode()
    for line in (
        'bequest:http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        'bequest:http_requests_total{method="POST",route="/v1/completions",status="400"} 1.0',
        'bequest:http_requests_total{method="other",route="unknown",status="404"} 1.0',
        'bequest:errors_total{code="missing_required_parameter"} 1.0',
        'bequest:errors_total{code="unknown_url"} 1.0',
    ):
        assert line in text, line
    first = front.metrics.traffic.last_errors[0]
    assert (first.request_id, first.status, first.route) == ("empty", 400, "POST /v1/completions")


@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})])
async def test_an_error_in_a_stream_is_an_error_too(start: Starter, path: str, body: dict[str, Any]) -> None:
    """Its status was sent long before."""
    front = await start(FakeEngine(failing_script(InternalError("A fault."), after=2)))
    with logged(JsonFormatter()) as log:
        headers = {"X-Request-Id": "mine"}
        answer, content = await front.post(path, {**body, "stream": True}, headers=headers)
    assert answer.status == 200 and b'"internal_error"' in content
    (error,) = front.metrics.traffic.last_errors
    assert (error.request_id, error.status, error.code, error.message) == ("mine", 500, "internal_error", "A fault.")
    assert error.route == f"POST {path}"
    assert 'bequest:errors_total{code="internal_error"} 1.0' in front.metrics.exposition()[0].decode()
    warning = next(line for line in map(json.loads, log.getvalue().splitlines()) if line["level"] == "warning")
    assert warning["request_id"] == "mine" and "internal_error: A fault." in warning["message"]


def test_times_per_token_and_per_step() -> None:
    metrics = Metrics()
    metrics.on_step(StepStats(60, 4, 0, 0, 0, 0.01, (), ()))
    metrics.on_finish(RequestStats("stop", 5, 0, 22, 22, 2, 0.1, 0.2, 1.0, 1.3))
    metrics.on_finish(RequestStats("abort", 5, 0, 0, 22, 1, 0.1, 0.2, 0.0, 0.3))
    text = metrics.exposition()[0].decode()
    for line in (
        'vllm:iteration_tokens_total_sum{model_name=""} 64.0',
        'vllm:request_time_per_output_token_seconds_sum{model_name=""} 0.1',
        'vllm:request_time_per_output_token_seconds_count{model_name=""} 1.0',
        'vllm:request_inference_time_seconds_sum{model_name=""} 1.4',
    ):
        assert line in text, line


def test_the_dashboard_shows_metrics_that_exist() -> None:
    metrics = Metrics()
    metrics.traffic.on_answer("GET", "/", 200)
    metrics.traffic.on_error("", "", 400, "invalid_value", "")
    exposed = set(re.findall(r"^([a-z0-9_:]+)", metrics.exposition()[0].decode(), re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"(?:vllm|bequest):\w+|process_\w+", text)}
    assert len(used) > 20 and used <= exposed, used - exposed
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


async def test_a_prompt_that_a_template_complains_of_is_not_logged(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise InvalidRequest("the template says: a secret\nforged", field="messages")

    monkeypatch.setattr(type(front.text.chat_template), "render", refuse)
    caplog.set_level(logging.INFO, "bequest.server")
    answer, content = await front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert answer.status == 400 and "a secret" in content["error"]["message"]
    assert "invalid_value: `messages` is refused" in caplog.text and "secret" not in caplog.text
