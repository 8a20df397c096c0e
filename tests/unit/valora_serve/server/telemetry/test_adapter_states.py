"""Where adapters are, by what the engine reports."""

from valora_serve.replicas.client import total
from valora_serve.server.telemetry.adapter_states import adapter_states
from valora_serve.types import EngineStats, ServedModel

MODELS = [ServedModel(n, "adapter", n) for n in "abcd"] + [ServedModel("person", "domain", "d")]


def test_the_best_place_of_any_replica_counts():
    first = EngineStats(on_device=("a", "person"), on_disk=("b", "c"))
    assert adapter_states(MODELS, first) == {"a": "device", "b": "disk", "c": "disk", "d": "host"}
    second = EngineStats(on_device=("c",), on_disk=("a", "b"))
    both = total([first, second])
    assert adapter_states(MODELS, both) == {"a": "device", "b": "disk", "c": "device", "d": "host"}
    assert adapter_states(MODELS, total([first, EngineStats()]))["b"] == "host"
