"""A base model that stays packed in 4 bits against PEFT on the same numbers unpacked."""

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
from tests.support.engine_reference import Reference, assert_empty, make_engine, run
from tests.support.lmm_checkpoints import CHECKPOINTS, save_llava
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, make_adapter
from valora_data.contract.quantized import rounded_matrix
from valora_data.errors import BundleError
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.memory.unified import GroupSpec
from valora_serve.model.linears import LinearGroup, LoraScope
from valora_serve.model.nf4_linears import Nf4Group, make_nf4
from valora_serve.types import Mode

pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.usefixtures("one_thread")


class Rounded(Reference):
    """PEFT's models, whose base layers of the language model have rounded weights."""

    def __init__(self, base, adapters):
        super().__init__(base, adapters)
        for name, module in self.model.named_modules():
            if "language_model" in name and "lora_" not in name and type(module) is nn.Linear:
                module.weight.data = rounded_matrix(module.weight)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, (64, 32, 32)), (96, (64, 2)), (10, (3,))])
def test_stacked_layers_have_the_numbers_of_each(inputs, outputs):
    """Widths with whole blocks of 64, with blocks that reach into the next row, and with none."""
    linears = [nn.Linear(inputs, width, bias=width != 2) for width in outputs]
    numbers = [rounded_matrix(linear.weight) for linear in linears]
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


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_answers_are_those_of_peft_on_the_same_numbers(family, tmp_path):
    base = str(CHECKPOINTS[family](tmp_path / "base", seed=7))
    everything = EVERYTHING if family == "llava" else r".*language_model.*_proj"
    adapters = {
        "everything": make_adapter(
            tmp_path / "a", base, seed=6, rank=6, alpha=13, targets=everything, strength=0.25
        ),
        "attention": make_adapter(
            tmp_path / "b", base, seed=1, rank=8, alpha=16, targets=LANGUAGE, strength=0.25
        ),
    }
    reference = Rounded(base, adapters)
    engine = make_engine(base, adapters, fresh=True, quantize="nf4_packed", policy="valora")
    groups = engine.lmm.linears.groups.values()
    assert {type(group) for group in groups if group.spec.part == "text"} == {Nf4Group}
    assert {type(group) for group in groups if group.spec.part != "text"} == {LinearGroup}
    assert engine.lmm.quantize == "nf4"  # bundles that were trained so are served
    names = [name if name in adapters else None for name in EVERYBODY][:7]
    asked = mixed(names, tokens=2)
    found = run(engine, asked)
    for one in asked:
        assert found[one.id].tokens == reference(one).tokens
    stats = engine.stats()
    assert (stats.mode, stats.switches) == (Mode.UNMERGED, 0)
    assert stats.unmergeable == ("attention", "everything")
    assert_empty(engine)


def test_what_cannot_be_served_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"nf4_packed is for a model on one GPU.*quantize=nf4$"):
        EngineSettings(quantize="nf4_packed", tensor_parallel=2)
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


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        ("fp8", r"fp8 is for layers whose widths are multiples of 16, .*: use quantize=none$"),
        ("nf4_packed", r"layers whose weights fill blocks of 64, and .*: use quantize=nf4$"),
    ],
)
def test_weights_that_would_all_stay_as_they_are_are_refused(tmp_path, quantize, said):
    """Nothing could be merged into them, for nothing."""
    base = without_whole_blocks(tmp_path)
    with pytest.raises(SettingsError, match=said):
        make_engine(base, {}, fresh=True, quantize=quantize)


@pytest.mark.parametrize(
    ("quantize", "changed", "said"),
    [
        # gate, up and down of two layers have 50 intermediate features
        ("fp8", {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4},
         "quantize=fp8: 6 of the 14 linear layers of the language model stay in float32, as it is "
         "for those whose widths are multiples of 16"),
        # 36 × 50 numbers are no multiple of 64, 32 × 36 are
        ("nf4_packed", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
         "quantize=nf4_packed: 6 of the 14 linear layers of the language model stay in float32, as "
         "it is for those whose weights fill blocks of 64"),
    ],
)  # fmt: skip
def test_layers_that_stay_as_they_are_are_counted(tmp_path, quantize, changed, said, caplog):
    make_engine(without_whole_blocks(tmp_path, **changed), {}, fresh=True, quantize=quantize)
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [said]


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
