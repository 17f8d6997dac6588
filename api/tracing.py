"""OpenTelemetry traces, if `--otlp-endpoint` asks for them: a span for each ended answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from api.version import project_version
from engine.errors import UserError

current_trace: ContextVar[str | None] = ContextVar("current_trace", default=None)
"""The `traceparent` header of the HTTP request that the running task serves."""


class Tracing:
    """Sends spans by OTLP over HTTP, in batches, on a thread of its own; what cannot be sent is dropped and logged by
    the library. Raises UserError if the packages are not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise UserError("--otlp-endpoint: pip install 'ktserve[otel]'", "otlp_endpoint") from None
        resource = Resource.create({"service.name": "ktserve", "service.version": project_version()})
        self._provider: Any = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Any = self._provider.get_tracer("ktserve")
        self._propagator: Any = TraceContextTextMapPropagator()

    def answer(self, seconds: float, parent: str | None, attributes: Mapping[str, str | int | float]) -> None:
        """A span that ends now, below the client's (`traceparent`) if it sent one."""
        end = time.time_ns()
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        start = end - int(seconds * 1e9)
        span = self._tracer.start_span("answer", context, start_time=start, attributes=dict(attributes))
        span.end(end)

    def close(self) -> None:
        """Send what is left; takes seconds if nobody listens."""
        self._provider.shutdown()
