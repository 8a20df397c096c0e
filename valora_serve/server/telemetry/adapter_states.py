"""Where adapters are, and where requests loaded them from: for ``/v1/models`` and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from valora_serve.server.resolving.on_request import RESULTS, OnRequest
from valora_serve.server.service import Service
from valora_serve.server.telemetry.metrics import Metrics
from valora_serve.types import EngineStats, ServedModel

STATES = ("disk", "host", "device")
BY_HAND = "none"
"""Label of adapters of bundles, and of those that were loaded by hand."""


def adapter_states(models: Iterable[ServedModel], stats: EngineStats) -> dict[str, str]:
    """Return where each adapter is, one of `STATES`, by its name; with replicas, on any of them."""
    device, disk = set(stats.on_device), set(stats.on_disk)
    return {
        one.name: "device" if one.name in device else "disk" if one.name in disk else "host"
        for one in models
        if one.kind == "adapter"
    }


def follow_adapters(metrics: Metrics, service: Service, loader: OnRequest | None) -> None:
    """Show the states of adapters in the metrics.

    Labels are states and kinds of sources, and the names of adapters that requests load are no
    labels of latencies either: whoever sends requests chooses them.
    """
    if loader is not None:
        metrics.shared = lambda name: loader.source(name) is not None
    metrics.registry.register(_AdapterStates(service, loader))


class _AdapterStates(Collector):
    def __init__(self, service: Service, loader: OnRequest | None) -> None:
        self._service, self._loader = service, loader

    def collect(self) -> Iterator[Metric]:
        engine, loader = self._service.engine, self._loader
        counts: Counter[tuple[str, str]] = Counter()
        for name, state in adapter_states(engine.models(), engine.stats()).items():
            counts[state, (loader and loader.source(name)) or BY_HAND] += 1
        for one in loader.waiting() if loader else ():
            counts["disk", one.source] += 1
        known = GaugeMetricFamily(
            "valora_adapters", "Adapters by where they are, and by the kind of their source.",
            labels=["state", "resolver"],
        )  # fmt: skip
        schemes = [BY_HAND, *(loader.schemes if loader else ())]
        for state in STATES:
            for scheme in schemes:
                known.add_metric([state, scheme], counts[state, scheme])
        yield known
        if loader is None:
            return
        loads = CounterMetricFamily(
            "valora_adapter_resolutions", "Loads of adapters that requests named, by result.",
            labels=["resolver", "result"],
        )  # fmt: skip
        for scheme in schemes:
            for result in RESULTS:
                loads.add_metric([scheme, result], loader.results[scheme, result])
        yield loads
        yield GaugeMetricFamily(
            "valora_adapter_cache_bytes", "Bytes of the adapters on disk.", value=loader.cache.bytes
        )
