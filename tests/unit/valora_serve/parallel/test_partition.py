"""Parts of weights: each output and input once, heads together, LoRA matrices that follow."""

import pytest
import torch

from valora_serve.errors import SettingsError
from valora_serve.parallel.partition import LoraParallel, Slice, partition, share_of

SLORA, REPLICATE_A = LoraParallel.SLORA, LoraParallel.REPLICATE_A


def linears(heads, kv_heads, *, head_dim=8, wide=96):
    width = 64
    return {
        "q_proj": (heads * head_dim, width), "k_proj": (kv_heads * head_dim, width),
        "v_proj": (kv_heads * head_dim, width), "o_proj": (width, heads * head_dim),
        "gate_proj": (wide, width), "up_proj": (wide, width), "down_proj": (width, wide),
    }  # fmt: skip


def parts(size, heads, kv_heads, **more):
    layers = {f"layers.3.{name}": shape for name, shape in linears(heads, kv_heads, **more).items()}
    common = {"heads": heads, "kv_heads": kv_heads, "head_dim": 8, "size": size, "base": "b"}
    found = [partition(layers, rank=rank, **common) for rank in range(size)]
    return [{name.rpartition(".")[2]: part for name, part in one.items()} for one in found]


def test_a_head_of_keys_is_where_its_queries_are():
    """Query head i reads head i // (heads / kv_heads) of keys and values."""
    for size, heads, kv_heads in [(2, 4, 2), (4, 4, 2), (8, 8, 2), (4, 12, 4), (2, 14, 2)]:
        for one in parts(size, heads, kv_heads, wide=48):
            queries = range(one["q_proj"].start // 8, one["q_proj"].stop // 8)
            wanted = {query * kv_heads // heads for query in queries}
            assert set(range(one["k_proj"].start // 8, one["k_proj"].stop // 8)) == wanted
            assert one["v_proj"] == one["k_proj"]


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "wide"), [(3, 8, 4, 96), (4, 12, 6, 96), (2, 8, 4, 97)]
)
def test_what_cannot_be_shared_equally_is_refused(size, heads, kv_heads, wide):
    with pytest.raises(SettingsError, match=rf"^tensor_parallel: {size} GPUs .*: use 1") as caught:
        parts(size, heads, kv_heads, wide=wide)
    allowed = str(caught.value).rpartition("use ")[2].split(", ")
    assert str(size) not in allowed
    for number in map(int, allowed):
        parts(number, heads, kv_heads, wide=wide)


def test_unknown_layers_are_refused():
    with pytest.raises(SettingsError, match=r"layers\.0\.qkv_proj of base model b cannot be split"):
        partition({"layers.0.qkv_proj": (96, 32)}, heads=4, kv_heads=4, head_dim=8, rank=0,
                  size=2, base="b")  # fmt: skip


@pytest.mark.parametrize("lora", [SLORA, REPLICATE_A])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rank", [1, 5, 6])
def test_the_parts_of_lora_matrices_give_the_whole_product(lora, size, rank):
    """What processes compute from their slices is x·Aᵀ·Bᵀ, by hand in float64."""
    width, outputs = 48, 96
    a = torch.randn(rank, width, dtype=torch.float64)
    b = torch.randn(outputs, rank, dtype=torch.float64)
    x = torch.randn(7, width, dtype=torch.float64)
    for row in (False, True):
        each, other = (width, outputs) if row else (outputs, width)
        part = each // size
        shares = [
            share_of([Slice(row, part * k, part * (k + 1))], other, lora, rank=k, size=size)
            for k in range(size)
        ]
        assert all(one.exchanges is (lora is SLORA) for one in shares)
        seen = [(one.inputs(0, width), one.outputs(0, outputs)) for one in shares]
        assert all(row or lora is SLORA or own == slice(0, width) for own, _ in seen)
        hs = [x[:, own] @ a[:, own].T for own, _ in seen]
        if lora is SLORA:
            hs = [sum(hs)] * size  # the collective
        found = torch.zeros(7, outputs, dtype=torch.float64)
        for h, (_, own) in zip(hs, seen, strict=True):
            found[:, own] += h @ b[own].T
        torch.testing.assert_close(found, x @ a.T @ b.T)
