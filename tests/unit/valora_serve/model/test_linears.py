"""Grouped linear layers: shared inputs, and adapters that apply only inside their scope."""

import numpy as np
import pytest
import torch
from torch import nn

from valora_kernels.metadata import LoraBatch
from valora_serve.model.linears import Linears, LoraScope


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.o_proj = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + torch.cat([self.k_proj(x), self.v_proj(x)], -1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"text": Layer(), "vision": Layer()}).requires_grad_(False)


def test_groups_compute_what_their_layers_computed(model):
    x = torch.randn(3, 8)
    expected = {name: layer(x) for name, layer in model.items()}
    linears = Linears.of(model, {"text": "text", "vision": "vision"})
    assert list(linears.groups) == [
        "text.q_proj", "text.o_proj", "vision.q_proj", "vision.o_proj",
    ]  # fmt: skip
    for name, layer in model.items():
        torch.testing.assert_close(layer(x), expected[name])
    assert linears.scope.last[0] is linears.groups["vision.o_proj"]
    linears.release()
    assert linears.scope.last is None


def batch():
    lora = LoraBatch(4, 2, torch.device("cpu"))
    lora.update(np.zeros(4, np.int64), np.ones(1, np.int32), np.ones(1, np.float32))
    return lora


def test_adapters_apply_inside_their_scope_only():
    """Also after a forward pass that fails."""
    scope, outer, inner = LoraScope(), batch(), batch()
    with pytest.raises(RuntimeError, match="out of memory"), scope.text(outer):
        assert scope.batch("text", 4) is outer and scope.batch("vision", 4) is None
        with scope.vision(lambda rows: inner if rows == 4 else None), scope.text(None):
            assert scope.batch("text", 4) is None
            assert scope.batch("vision", 4) is inner and scope.batch("vision", 5) is None
        assert scope.batch("text", 4) is outer and scope.batch("vision", 4) is None
        with scope.vision(lambda _: inner):
            raise RuntimeError("out of memory")
    assert scope.batch("text", 4) is None and scope.batch("vision", 4) is None


def test_layers_of_the_same_sizes_are_compiled_once(model):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = [layer(x) for layer in model.values()]
        Linears.of(model, {"text": "text", "vision": "vision"})
        torch._dynamo.reset()
        for layer, y in zip(model.values(), expected, strict=True):
            torch.testing.assert_close(torch.compile(layer, dynamic=True, backend=keep)(x), y)
    assert len(graphs) == 1
