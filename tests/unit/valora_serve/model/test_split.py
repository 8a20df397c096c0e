"""What each process of a group reads: its parts of every layer, and never the whole."""

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from valora_data.contract.base_model import load_model
from valora_data.contract.quantized import NF4, is_installed, unpack
from valora_data.models.registry import architecture_of
from valora_serve.catalogue.adapters import ModelTargets
from valora_serve.errors import SettingsError
from valora_serve.model.split import SplitReader, check_split
from valora_serve.parallel.group import Group

FAMILIES = CHECKPOINTS | TEXT_CHECKPOINTS


FEW = ("qwen2_5_vl", "qwen2")


@pytest.fixture(scope="module", params=others_slow(FEW, FAMILIES))
def base(request, tmp_path_factory):
    return str(FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5))


def reader(base, rank, size, quantize=None):
    return SplitReader(base, Group(rank, size, torch.device("cpu")), quantize)


def check(base, whole, size, quantize):
    """Every parameter of every process is the right part of the whole model's."""
    seen = {}
    for rank in range(size):
        split = reader(base, rank, size, quantize)
        model, _ = load_model(base, torch.float32, read=split)
        targets = ModelTargets.of(model, architecture_of(model))
        for name, weight in model.named_parameters():
            part = split.slices.get(name.rpartition(".")[0])
            want = whole[name]
            if part is not None and not (part.row and weight.ndim == 1):
                want = want[:, part.own] if part.row else want[part.own]
                seen.setdefault(name, set()).update(range(part.own.start, part.own.stop))
                path = name.rpartition(".")[0]
                if path in targets.linears and weight.ndim > 1:
                    assert targets.linears[path] == tuple(whole[name].shape)
            assert weight.shape == want.shape, name
            assert torch.equal(weight, want), name
    layers = [name for name in whole if "model.layers." in name and "proj" in name]
    assert set(layers) <= {*seen, *(name for name in layers if name.endswith("o_proj.bias"))}
    for name, found in seen.items():  # nothing is missing
        row = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert found == set(range(whole[name].shape[1 if row else 0])), name


def test_processes_read_their_parts(base):
    whole = dict(load_model(base, torch.float32)[0].named_parameters())
    for size in (2, 4):  # two heads of keys and values
        check(base, whole, size, None)


@pytest.mark.parametrize("family", ["llava", "qwen2"])
def test_rounded_weights_are_those_of_one_process(family, tmp_path):
    if not is_installed():
        pytest.skip("needs bitsandbytes")
    base = str(FAMILIES[family](tmp_path, seed=5))
    packed, _ = load_model(base, torch.float32, quantize=NF4)
    check(base, dict(unpack(packed, torch.float32).named_parameters()), 2, NF4)


def test_models_are_checked_before_processes_start(base):
    check_split(base, 4)
    with pytest.raises(SettingsError, match=r"5 GPUs cannot share .* equally: use 1, 2, 4"):
        check_split(base, 5)


def linears(heads, kv_heads, *, head_dim=8, wide=96):
    width = 64
    return {
        "q_proj": (heads * head_dim, width), "k_proj": (kv_heads * head_dim, width),
        "v_proj": (kv_heads * head_dim, width), "o_proj": (width, heads * head_dim),
        "gate_proj": (wide, width), "up_proj": (wide, width), "down_proj": (width, wide),
    }  # fmt: skip


def share(size, heads, kv_heads, **more):
    layers = {f"layers.3.{name}": shape for name, shape in linears(heads, kv_heads, **more).items()}
    for rank in range(size):
        reader("b", rank, size).partition(layers, heads, kv_heads, 8)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "wide"), [(3, 8, 4, 96), (4, 12, 6, 96), (2, 8, 4, 97)]
)
def test_what_cannot_be_shared_equally_is_refused(size, heads, kv_heads, wide):
    with pytest.raises(SettingsError, match=rf"^tensor_parallel: {size} GPUs .*: use 1") as caught:
        share(size, heads, kv_heads, wide=wide)
    allowed = str(caught.value).rpartition("use ")[2].split(", ")
    assert str(size) not in allowed
    for number in map(int, allowed):
        share(number, heads, kv_heads, wide=wide)


def test_unknown_layers_are_refused():
    with pytest.raises(SettingsError, match=r"layers\.0\.qkv_proj of base model b cannot be split"):
        reader("b", 0, 2).partition({"layers.0.qkv_proj": (96, 32)}, 4, 4, 8)
