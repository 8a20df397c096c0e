"""Base models of 8 bits, and packed in 4, against PEFT on layers with the same numbers."""

import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.parity.valora_serve.engine.test_engine import EVERYBODY, mixed
from tests.support.engine_reference import Reference, make_engine, relative, run
from tests.support.lmm_checkpoints import CHECKPOINTS, save_llava
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, make_adapters
from valora_data.contract.quantized import is_installed, quantized_matrix
from valora_data.errors import BundleError
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import GroupSpec
from valora_serve.model.linears import LinearGroup, LoraScope
from valora_serve.model.quantized_linears import Fp8Group, Nf4Group, make_nf4, multiply, round_rows
from valora_serve.types import Mode

PACKS = pytest.mark.skipif(not is_installed(), reason="needs bitsandbytes")

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
    sizes = torch.tensor([1e-6, 1e-2, 1, 7, 300, 1e5])
    x = torch.randn(6, 33, generator=generator) * sizes[:, None]
    quantized, scale = round_rows(x)
    found = quantized.double() * scale.double()
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


class Quantizing(Reference):
    """PEFT's models, whose language model's base layers compute with 8 bits, or are quantized."""

    def __init__(self, base, adapters, quantize):
        super().__init__(base, adapters)
        for name, module in self.model.named_modules():
            if "language_model" in name and "lora_" not in name and type(module) is nn.Linear:
                if quantize == "fp8":
                    module.forward = self._forward(module)
                else:
                    module.weight.data = quantized_matrix(module.weight)

    def _forward(self, layer):
        weight = nearest(layer.weight)

        def forward(x):
            y = (nearest(x.flatten(0, -2)) @ weight.T).float().view(*x.shape[:-1], -1)
            return y if layer.bias is None else y + layer.bias

        return forward


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    base = str(CHECKPOINTS[request.param](folder / "base", seed=7))
    everything = EVERYTHING if request.param == "llava" else r".*language_model.*_proj"
    kinds = {"everything": (6, 6, 13, everything), "attention": (1, 8, 16, LANGUAGE)}
    adapters = make_adapters(folder, base, 0.25, **kinds)
    references = {
        quantize: Quantizing(base, adapters, quantize)
        for quantize in ("fp8", *(["nf4_packed"] if is_installed() else []))
    }
    return base, adapters, references


@pytest.mark.parametrize(
    ("quantize", "policy"),
    [
        ("fp8", "cost"), ("fp8", "merge_only"),
        pytest.param("fp8", "valora", marks=pytest.mark.slow),
        pytest.param("fp8", "slora", marks=pytest.mark.slow),
        pytest.param("nf4_packed", "valora", marks=PACKS),
    ],
)  # fmt: skip
def test_answers_are_those_of_peft_on_rounded_layers(served, quantize, policy):
    base, adapters, references = served
    engine = make_engine(base, adapters, fresh=True, quantize=quantize, policy=policy)
    groups = engine.lmm.linears.groups.values()
    quantized = Fp8Group if quantize == "fp8" else Nf4Group
    assert {type(group) for group in groups if group.spec.part == "text"} == {quantized}
    assert {type(group) for group in groups if group.spec.part != "text"} == {LinearGroup}
    # Bundles that were trained so are served.
    assert engine.lmm.quantize == (None if quantize == "fp8" else "nf4")
    names = [name if name in adapters else None for name in EVERYBODY][:7]
    asked = mixed(names, tokens=2)
    found = run(engine, asked)
    for one in asked:
        assert found[one.id].tokens == references[quantize](one).tokens
    stats = engine.stats()
    assert (stats.mode, stats.switches) == (Mode.UNMERGED, 0)
    assert stats.unmergeable == ("attention", "everything")
    assert not engine.lmm.linears.merged


@PACKS
@pytest.mark.parametrize(("inputs", "outputs"), [(128, (64, 32, 32)), (96, (64, 2)), (10, (3,))])
def test_stacked_layers_have_the_numbers_of_each(inputs, outputs):
    """Widths with whole blocks of 64, with blocks that reach into the next row, and with none."""
    linears = [nn.Linear(inputs, width, bias=width != 2) for width in outputs]
    numbers = [quantized_matrix(linear.weight) for linear in linears]
    biases = [torch.zeros(2) if one.bias is None else one.bias.detach() for one in linears]
    spec = GroupSpec("a", ("a", "b", "c")[: len(outputs)], inputs, outputs, "text")
    group = make_nf4(torch.float32)(spec, linears, LoraScope())
    assert type(group) is (Nf4Group if inputs > 10 else LinearGroup)
    for index, matrix in enumerate(numbers):
        assert torch.equal(group.matrix(index), matrix)
    if inputs > 10:
        assert sum(weight.numel() for weight in group.weights) * 2 == inputs * sum(outputs)
    for rows in (1, 7):
        x = torch.randn(rows, inputs)
        found = [group.output(index, x) for index in range(len(outputs))]
        for y, matrix, bias in zip(found, numbers, biases, strict=True):
            torch.testing.assert_close(y, x @ matrix.T + bias, atol=1e-5, rtol=1e-5)


def test_a_form_whose_package_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("valora_data.contract.quantized.is_installed", lambda: False)
    with pytest.raises(BundleError, match=r"needs the package bitsandbytes: pip install 'valora"):
        make_engine("tiny", {}, fresh=True, quantize="nf4_packed")


def without_whole_blocks(folder, **changed):
    """Return a base model with no layer that fits into FP8's products or NF4's blocks."""
    config = json.loads((save_llava(folder, seed=7) / "config.json").read_text())
    text = config["text_config"] | {
        "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 12,
    } | changed  # fmt: skip
    described = LlavaConfig(**config | {"text_config": text})
    LlavaForConditionalGeneration(described).save_pretrained(folder)
    return str(folder)


FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}


@PACKS
@pytest.mark.parametrize(
    ("quantize", "changed", "whose", "instead"),
    [
        # gate, up and down of two layers have 50 intermediate features
        ("fp8", FOUR | {"hidden_size": 48}, "widths are multiples of 16", "none"),
        # 36 × 50 numbers are no multiple of 64, 32 × 36 are
        ("nf4_packed", FOUR | {"head_dim": 8}, "weights fill blocks of 64", "nf4"),
    ],
)
def test_layers_that_stay_as_they_are(tmp_path, quantize, changed, whose, instead, caplog):
    """They are counted, and refused where nothing could be merged into them, for nothing."""
    make_engine(without_whole_blocks(tmp_path, **changed), {}, fresh=True, quantize=quantize)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert f"quantize={quantize}: 6 of the 14 linear layers" in said
    why = rf"{quantize} is for layers whose {whose}, .*: use quantize={instead}$"
    with pytest.raises(SettingsError, match=why):
        make_engine(without_whole_blocks(tmp_path), {}, fresh=True, quantize=quantize)


@PACKS
@pytest.mark.parametrize("quantize", ["none", "fp8", "nf4", "nf4_packed"])
def test_a_model_that_is_saved_in_a_quantised_form_is_refused(tmp_path, quantize):
    """transformers reads it, and every request failed."""
    base = str(save_llava(tmp_path / "base", seed=7))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"]
    )
    model = AutoModelForImageTextToText.from_pretrained(base, quantization_config=quantization)
    model.save_pretrained(base)
    said = r"in a quantised form already \(bitsandbytes\).*name the model that it was made from"
    with pytest.raises(BundleError, match=said):
        make_engine(base, {}, fresh=True, quantize=quantize)
