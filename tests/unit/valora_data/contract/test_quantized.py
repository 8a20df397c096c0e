"""A base model in 4 bits: what is rounded and how, and what is refused."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from valora_data.contract import quantized
from valora_data.contract.base_model import load_model
from valora_data.contract.bundle import check_base
from valora_data.contract.quantized import NF4, loading_options, rounded_matrix, unpack
from valora_data.errors import BundleError

pytest.importorskip("bitsandbytes")

# QLoRA (Dettmers et al., 2023), appendix E.
CODES = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def nearest(weight):
    """A weight rounded to NF4 in blocks of 64, with exact scales."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    code = (blocks / scales)[..., None].sub(CODES).abs().argmin(-1)
    return (CODES[code] * scales).reshape(weight.shape)


FAMILIES = CHECKPOINTS | TEXT_CHECKPOINTS


@pytest.fixture(scope="module", params=others_slow(("llava", "qwen3_vl", "llama"), FAMILIES))
def base(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5)


def test_the_language_models_layers_are_rounded_and_nothing_else(base):
    plain = dict(load_model(str(base), torch.float32)[0].named_parameters())
    packed, _ = load_model(str(base), torch.float32, quantize=NF4)
    kinds = {name: weight.dtype for name, weight in packed.named_parameters()}
    rounded = dict(unpack(packed, torch.float32).named_parameters())
    assert rounded.keys() == plain.keys()
    for name, weight in plain.items():
        inside = re.search(r"(\.(language|text)_|^)model\.layers\..*proj\.weight$", name)
        assert kinds[name] == (torch.uint8 if inside else torch.float32), name
        if not inside:
            assert torch.equal(rounded[name], weight), name
            continue
        # Scales have 8 bits, so that they differ by up to a hundredth of the largest one.
        torch.testing.assert_close(rounded[name], nearest(weight), atol=0.02, rtol=0.02)
        assert 0.02 < (rounded[name] - weight).norm() / weight.norm() < 0.15
        # Processes of a tensor-parallel group round one matrix after the other.
        assert torch.equal(rounded_matrix(weight), rounded[name]), name


def test_what_cannot_be_rounded_is_refused(base, tmp_path, monkeypatch):
    def refused(message, device="cpu", folder=base):
        with pytest.raises(BundleError, match=message):
            loading_options("this", str(folder), torch.float32, device)

    refused("on device vulkan: use one of cpu", "vulkan")
    described = json.loads((base / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    refused(r"saved in a quantised form already \(bitsandbytes\)", folder=tmp_path)
    monkeypatch.setattr(quantized, "is_installed", lambda: False)
    refused(r"needs the package bitsandbytes: pip install 'valora\[quantize\]'")


def test_a_bundle_is_served_on_the_weights_that_it_was_trained_on():
    def check(rounded, served):
        manifest = {"base": {"id": "this", "sha256": "0", "quantize": rounded}}
        check_base(SimpleNamespace(folder="bundles/x", manifest=manifest), "this", "0", served)

    check(None, None)
    check(NF4, NF4)
    with pytest.raises(BundleError, match="quantize=nf4, but this one has none"):
        check(NF4, None)
    with pytest.raises(BundleError, match="use valora-serve --quantize none"):
        check(None, NF4)
