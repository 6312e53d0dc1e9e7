"""Spans for OpenTelemetry, where its SDK is installed and an endpoint is configured; else nothing.

`traceparent` is taken up by the SDK's propagators, so that a request's span is a child of its caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from aiohttp import web

_log = logging.getLogger("bequest")
_CONFIGURED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Span:
    """A request's; does nothing where nobody traces."""

    def end(self, status: int, attributes: Mapping[str, str]) -> None:
        """The request was answered."""


class _OpenSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, status: int, attributes: Mapping[str, str]) -> None:
        self._span.set_attribute("http.response.status_code", status)
        for name, value in attributes.items():
            self._span.set_attribute(name, value)


# Opens the span of a request.
Tracing = Callable[[web.Request], AbstractContextManager[Span]]


def no_tracing(request: web.Request) -> AbstractContextManager[Span]:
    return nullcontext(Span())


def start_tracing(environment: Mapping[str, str]) -> Tracing:
    if not any(environment.get(name) for name in _CONFIGURED) or environment.get("OTEL_SDK_DISABLED") == "true":
        return no_tracing
    try:
        from opentelemetry import propagate, trace  # type: ignore[attr-defined, unused-ignore]
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("traces are configured, but opentelemetry-exporter-otlp-proto-http is not installed: %s", error)
        return no_tracing
    name = environment.get("OTEL_SERVICE_NAME", "bequest")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("bequest")

    @contextmanager
    def spans(request: web.Request) -> Iterator[Span]:
        with tracer.start_as_current_span(
            f"{request.method} {route_of(request)}",
            context=propagate.extract(request.headers),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": request.method, "http.route": route_of(request)},
        ) as span:
            yield _OpenSpan(span)

    return spans


def route_of(request: web.Request) -> str:
    """The pattern of the request's path, of which there are few."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
