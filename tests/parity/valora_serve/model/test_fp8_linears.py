"""A base model of 8 bits against PEFT on layers that round by a definition of their own."""

import pytest
import torch

from tests.parity.valora_serve.engine.test_engine import EVERYBODY, mixed
from tests.support.cases import others_slow
from tests.support.engine_reference import Reference, assert_empty, make_engine, relative, run
from tests.support.lmm_checkpoints import CHECKPOINTS
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, make_adapter
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.fp8_linears import Fp8Group, multiply, round_rows
from valora_serve.model.linears import LinearGroup
from valora_serve.types import Mode

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
GRID = NUMBERS[NUMBERS.isfinite()].unique()
"""All numbers of the format."""


def nearest(x):
    """Round each row to the grid, scaled so that its largest number is 448; in fp64."""
    scale = x.double().abs().amax(-1, keepdim=True) / 448
    wanted = x.double() / scale
    above = torch.searchsorted(GRID, wanted).clamp(1, len(GRID) - 1)
    low, high = GRID[above - 1], GRID[above]
    return torch.where(wanted - low < high - wanted, low, high) * scale


def test_rounds_to_the_nearest_number():
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(6, 33, generator=generator)
        * torch.tensor([1e-6, 1e-2, 1, 7, 300, 1e5])[:, None]
    )
    rounded, scale = round_rows(x)
    found = rounded.double() * scale.double()
    expected = nearest(x)
    # A number in the middle of two may go either way.
    close = (found - expected).abs() <= (x.double().abs() / 16 + scale.double() / 256)
    assert bool(close.all())
    assert float(((found - expected).abs() > 1e-6 * expected.abs()).double().mean()) < 0.02
    assert relative(found.numpy(), x.numpy()) < 0.04


def test_rows_are_rounded_for_themselves():
    weight, scales = round_rows(torch.eye(16))
    x = torch.randn(5, 16)
    alone = multiply(x, weight, scales)
    x[1], x[3, 2], x[4] = 0, torch.nan, torch.inf
    found = multiply(x, weight, scales)
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert torch.equal(found[1], torch.zeros(16))
    assert not bool(found[3:].isfinite().all(-1).any())


class Rounding(Reference):
    """PEFT's models, whose base layers of the language model compute with 8 bits."""

    def __init__(self, base, adapters):
        super().__init__(base, adapters)
        for name, module in self.model.named_modules():
            if "language_model" in name and "lora_" not in name and type(module) is torch.nn.Linear:
                module.forward = self._forward(module)

    def _forward(self, layer):
        weight = nearest(layer.weight)

        def forward(x):
            y = (nearest(x.flatten(0, -2)) @ weight.T).float().view(*x.shape[:-1], -1)
            return y if layer.bias is None else y + layer.bias

        return forward


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    base = str(CHECKPOINTS[request.param](folder / "base", seed=7))
    everything = EVERYTHING if request.param == "llava" else r".*language_model.*_proj"
    adapters = {
        "everything": make_adapter(
            folder / "a", base, seed=6, rank=6, alpha=13, targets=everything, strength=0.25
        ),
        "attention": make_adapter(
            folder / "b", base, seed=1, rank=8, alpha=16, targets=LANGUAGE, strength=0.25
        ),
    }
    return base, adapters, Rounding(base, adapters)


@pytest.mark.parametrize(
    "policy", others_slow(["cost", "merge_only"], ["cost", "valora", "merge_only", "slora"])
)
def test_answers_are_those_of_peft_on_rounded_layers(served, policy):
    base, adapters, reference = served
    engine = make_engine(base, adapters, fresh=True, quantize="fp8", policy=policy)
    kinds = {type(group) for group in engine.lmm.linears.groups.values()}
    assert kinds == {LinearGroup, Fp8Group}  # the tower keeps its weights
    names = [name if name in adapters else None for name in EVERYBODY][:7]
    asked = mixed(names, tokens=2)
    found = run(engine, asked)
    for one in asked:
        assert found[one.id].tokens == reference(one).tokens
    stats = engine.stats()
    assert (stats.mode, stats.switches) == (Mode.UNMERGED, 0)
    assert stats.unmergeable == ("attention", "everything")
    assert not engine.lmm.linears.merged
    assert_empty(engine)


def test_a_model_on_several_gpus_is_refused():
    with pytest.raises(ValueError, match="fp8 is for a model on one GPU: use tensor_parallel=1"):
        EngineSettings(quantize="fp8", tensor_parallel=2)
