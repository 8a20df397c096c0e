"""Metrics for Prometheus, named as those of vLLM with the prefix valora_."""

import asyncio
import contextlib
import resource
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from valora_serve.types import EngineClient, EngineStats, Mode, Output, ServedModel

MAX_LABELS = 200  # models with series of their own; all others share the label "other"
STATES = ("disk", "host", "device")
RESULTS = LOADED, ABSENT, REFUSED, UNAVAILABLE = "loaded", "absent", "refused", "unavailable"
"""Results of loading an adapter that a request named."""
BY_HAND = "none"
"""Label of adapters of bundles, and of those that were loaded by hand."""
_SHORT = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)  # fmt: skip
_LONG = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120)  # fmt: skip


class Metrics(Collector):
    """Metrics of a server, in a registry of their own."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.loader: Any = None  # an `OnRequest`, if requests load adapters
        self.registry = CollectorRegistry()
        self._models: set[str] = set()
        self._making = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None  # a page that is not begun

        def seconds(
            name: str, text: str, label: str = "model_name", buckets: tuple[float, ...] = _LONG
        ) -> Histogram:
            name = f"valora_{name}_seconds"
            return Histogram(name, text, [label], buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"valora_{name}_total", text, labels, registry=self.registry)

        model = "model_name"
        self._first = seconds(
            "time_to_first_token", "From arrival to the first token or the head's result."
        )
        self._between = seconds(
            "inter_token_latency", "Between tokens of an answer.", buckets=_SHORT
        )
        self._whole = seconds("e2e_request_latency", "From arrival to the end of the answer.")
        self._queue = seconds("request_queue_time", "From arrival until the engine starts.")
        self._http_seconds = seconds(
            "http_request_duration", "HTTP requests, first byte to last.", "path"
        )
        self._http = counter("http_requests", "HTTP requests.", "path", "method", "status")
        self._failed = counter("request_failure", "Requests that failed, by error code.", "code")
        said = "Requests that succeeded, by finish reason."
        self._ended = counter("request_success", said, model, "finished_reason")
        said = "tokens of requests that succeeded."
        self._tokens_in = counter("request_prompt_tokens", f"Prompt {said}", model)
        self._tokens_out = counter("request_generation_tokens", f"Generated {said}", model)
        Gauge(
            "valora_memory_bytes", "Resident memory of the server and of the processes below it.",
            registry=self.registry,
        ).set_function(memory_bytes)  # fmt: skip
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def ended(self, model: str, output: Output, tokens_at: list[float]) -> None:
        """Count a request that succeeded."""
        name = self._bounded(model)
        self._ended.labels(name, str(output.finish)).inc()
        if output.usage is not None:
            self._tokens_in.labels(name).inc(output.usage.prompt)
            self._tokens_out.labels(name).inc(output.usage.completion)
        if (times := output.times) is not None:
            first = times.finished if times.first_token is None else times.first_token
            for histogram, end in (
                (self._queue, times.started), (self._first, first), (self._whole, times.finished),
            ):  # fmt: skip
                if end is not None:
                    histogram.labels(name).observe(max(0.0, end - times.arrival))
        if len(tokens_at) > 1:
            between = self._between.labels(name)
            for before, after in pairwise(tokens_at):
                between.observe(after - before)

    def failed(self, code: str) -> None:
        """Count a request that failed, by its error code."""
        self._failed.labels(code).inc()

    def http(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request."""
        self._http.labels(path, method, str(status)).inc()
        self._http_seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    async def page(self) -> bytes:
        """All metrics as text, made in a thread; who asks meanwhile shares the next page."""
        if self._next is None:
            self._next = asyncio.create_task(self._made())
        return await asyncio.shield(self._next)

    async def _made(self) -> bytes:
        async with self._making:
            self._next = None
            return await asyncio.to_thread(self.text)

    def _bounded(self, model: str) -> str:
        """The label of a model: whoever sends requests chooses the names of what they load."""
        known = model in self._models or len(self._models) < MAX_LABELS
        if not known or (self.loader and self.loader.source(model) is not None):
            return "other"
        self._models.add(model)
        return model

    def collect(self) -> Iterator[Metric]:
        """State of the engine, for the registry."""
        stats, replicas = self._engine.stats(), self._engine.peers
        if replicas is not None:
            yield GaugeMetricFamily("valora_replicas", "Replicas that run.", value=len(replicas))
        for name, text, gauge in _GAUGES:
            yield GaugeMetricFamily(f"valora_{name}", text, value=gauge(stats))
        mode = GaugeMetricFamily("valora_mode", "1 for the mode of the last step.", labels=["mode"])
        for item in Mode:
            mode.add_metric([str(item)], float(item == stats.mode))
        yield mode
        yield InfoMetricFamily(
            "valora_merged_adapter", "The adapter that is merged into the base weights.",
            value={"adapter": stats.merged_adapter or ""},
        )  # fmt: skip
        for name, text, counter in _COUNTERS:
            yield CounterMetricFamily(f"valora_{name}", text, value=counter(stats))
        yield from self._adapters()

    def _adapters(self) -> Iterator[Metric]:
        engine, loader = self._engine, self.loader
        schemes = [BY_HAND, *(loader.schemes if loader else ())]
        counts: Counts[tuple[str, str]] = Counts()
        for name, state in adapter_states(engine.models(), engine.stats()).items():
            counts[state, (loader and loader.source(name)) or BY_HAND] += 1
        for one in loader.waiting() if loader else ():
            counts["disk", one.source] += 1
        known = GaugeMetricFamily(
            "valora_adapters", "Adapters by where they are, and by the kind of their source.",
            labels=["state", "resolver"],
        )  # fmt: skip
        for key in product(STATES, schemes):
            known.add_metric(key, counts[key])
        yield known
        if loader is None:
            return
        loads = CounterMetricFamily(
            "valora_adapter_resolutions", "Loads of adapters that requests named, by result.",
            labels=["resolver", "result"],
        )  # fmt: skip
        for key in product(schemes, RESULTS):
            loads.add_metric(key, loader.results[key])
        yield loads
        yield GaugeMetricFamily(
            "valora_adapter_cache_bytes", "Bytes of the adapters on disk.", value=loader.cache.bytes
        )


def memory_bytes(process: str = "self") -> int:
    """Resident memory of a process and of those below it, in bytes; 0 if it has ended."""
    folder, total = Path("/proc", process), 0
    with contextlib.suppress(OSError):
        total = resource.getpagesize() * int((folder / "statm").read_text("ascii").split()[1])
        for file in folder.glob("task/*/children"):
            total += sum(map(memory_bytes, file.read_text("ascii").split()))
    return total


def adapter_states(models: Iterable[ServedModel], stats: EngineStats) -> dict[str, str]:
    """Return where each adapter is, one of `STATES`, by its name; with replicas, on any of them."""
    device, disk = set(stats.on_device), set(stats.on_disk)
    return {
        one.name: "device" if one.name in device else "disk" if one.name in disk else "host"
        for one in models
        if one.kind == "adapter"
    }


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that hold pages.", lambda s: s.running),
    ("num_requests_waiting", "Requests in the engine's queue.", lambda s: s.waiting),
    ("kv_cache_usage_ratio", "Share of the pages that holds keys and values.",
     lambda s: s.pages_kv / max(1, s.pages_total)),
    ("adapter_cache_usage_ratio", "Share of the pages that holds adapters.",
     lambda s: s.pages_adapters / max(1, s.pages_total)),
    ("context_cache_usage_ratio", "Share of the pages that holds prefixes of contexts.",
     lambda s: s.pages_contexts / max(1, s.pages_total)),
    ("contexts_resident", "Contexts whose prefix is on the device.", lambda s: s.contexts_resident),
    ("contexts_known", "Contexts that requests can name.", lambda s: s.contexts_known),
    ("pages", "Pages of the unified memory.", lambda s: s.pages_total),
    ("pages_free", "Free pages, cached ones included.", lambda s: s.pages_free),
    ("adapters_resident", "Adapters on the device.", lambda s: len(s.adapters_resident)),
    ("adapters_known", "Adapters that requests can name.", lambda s: s.adapters_known),
    ("models_unmergeable", "Adapters and domains whose weights are never merged.",
     lambda s: len(s.unmergeable)),
    ("models_quarantined", "Adapters and domains that requests cannot use any more.",
     lambda s: len(s.quarantined)),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("mode_switches", "Mode switches.", lambda s: s.switches),
    ("engine_steps", "Engine steps.", lambda s: s.steps),
    ("prompt_tokens", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("shared_passes", "Answers of heads that another request's pass was computed for.",
     lambda s: s.shared_passes),
    ("non_finite_outputs", "Requests that failed on NaN or infinity.", lambda s: s.non_finite),
    ("num_preemptions", "Requests that were preempted and recomputed.", lambda s: s.preemptions),
    ("adapter_loads", "Adapters that were copied to the device.", lambda s: s.adapter_loads),
    ("context_loads", "Prefixes of contexts that were copied to the device.",
     lambda s: s.context_loads),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
     lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("image_cache_queries", "Images looked up in the cache of encoded images.",
     lambda s: s.image_queries),
    ("image_cache_hits", "Images found in the cache of encoded images.", lambda s: s.image_hits),
)  # fmt: skip
