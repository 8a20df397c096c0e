"""Parts of weights: each output and input once, heads together, LoRA matrices that follow."""

import pytest

from valora_serve.errors import SettingsError
from valora_serve.parallel.partition import partition


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
