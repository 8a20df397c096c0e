"""OpenTelemetry spans: one for every request to the engine, child of the caller's span."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from valora_serve.errors import SettingsError
from valora_serve.types import Output

headers: ContextVar[Mapping[str, str]] = ContextVar("headers")
"""Those of the HTTP request that is being handled."""


class Tracer:
    """Makes spans and sends them to an OTLP collector; without an `endpoint`, it does nothing."""

    def __init__(self, endpoint: str | None) -> None:
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SettingsError(
                "otlp_endpoint needs OpenTelemetry: pip install 'valora[otel]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "valora-serve"}))
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    @contextlib.contextmanager
    def span(self, model: str, since: float) -> Iterator[Callable[[Output], None]]:
        """Span of a request, as a child of the one that `headers` name; call it with the end.

        It began at the time `since` of the monotonic clock.
        """
        if self._provider is None:
            yield lambda _: None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers.get({})))
        with self._provider.get_tracer("valora_serve").start_as_current_span(
            f"chat {model}",
            parent,
            SpanKind.SERVER,
            {"gen_ai.request.model": model},
            start_time=time.time_ns() - int(1e9 * (time.monotonic() - since)),
        ) as span:
            yield lambda output: span.set_attributes(_facts(output))

    def close(self) -> None:
        """Send the spans that are left."""
        if self._provider is not None:
            self._provider.shutdown()


def _facts(output: Output) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "gen_ai.response.id": output.id,
        "gen_ai.response.finish_reasons": [str(output.finish)],
        "valora.mode": str(output.mode) if output.mode else "",
    }
    if output.usage is not None:
        facts["gen_ai.usage.input_tokens"] = output.usage.prompt
        facts["gen_ai.usage.output_tokens"] = output.usage.completion
    if output.times is not None and output.times.started is not None:
        facts["valora.queue_seconds"] = output.times.started - output.times.arrival
    return facts
