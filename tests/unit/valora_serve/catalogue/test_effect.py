"""Bounds of an adapter's effect: which are refused, which are never merged, and which may be."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from valora_data.models.base import ModelPart
from valora_serve.catalogue.adapters import Adapter, LoraPair
from valora_serve.catalogue.effect import check_effect
from valora_serve.errors import AdapterError

OUT, WIDTH, RANK = 48, 64, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(seed=0, scaling=0.5):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(RANK, WIDTH, generator=draw) * WIDTH**-0.5
    return LoraPair(a, torch.randn(OUT, RANK, generator=draw) * 0.1, scaling)


def adapter(**pairs):
    scaling = next(iter(pairs.values())).scaling
    parts = frozenset([ModelPart.LANGUAGE])
    return Adapter(Path("some/adapter"), pairs, RANK, scaling, parts, "content", "")


def base_weight():
    return torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(9)) * WIDTH**-0.5


NORMS = {"q": float(base_weight().norm() / OUT**0.5)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bad",
    {
        "A": lambda p: replace(p, a=p.a * 1e30),
        "B": lambda p: replace(p, b=p.b * 1e30),
        "beyond float32": lambda p: replace(p, a=p.a.double() * 1e100),
        "the product, not A and B": lambda p: replace(p, a=p.a * 1e20, b=p.b * 1e20),
        "the product without scaling":
            lambda p: replace(p, a=p.a * 1e20, b=p.b * 1e20, scaling=1e-40),
        "A beside a zero B": lambda p: replace(p, a=p.a * 1e30, b=p.b * 0),
        "the scaling": lambda p: replace(p, scaling=1e300),
        "an infinite scaling": lambda p: replace(p, scaling=math.inf),
        "a scaling that is NaN": lambda p: replace(p, scaling=math.nan),
        "the scaling beside a zero B": lambda p: replace(p, b=p.b * 0, scaling=1e300),
        "one element": lambda p: replace(p, b=p.b + 1e30 * torch.eye(OUT, RANK)),
        "one column": lambda p: replace(p, a=p.a + 1e30 * torch.eye(RANK, WIDTH)),
    }.values(),
)  # fmt: skip
def test_what_overflows_is_refused(dtype, bad):
    with pytest.raises(AdapterError, match=r"some/adapter.*weights of q.*overflow"):
        check_effect(adapter(first=pair(2), q=bad(pair())), dtype, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [None, 0, 17])
def test_what_outweighs_the_base_weights_is_not_merged(dtype, row):
    """The limit lies where ‖ΔW‖ of the largest row is 64 (fp32) or 8 times that of a row of W."""
    most = 64 if dtype == torch.float32 else 8
    one = pair()
    delta = (one.scaling * (one.b @ one.a)).norm(dim=1)
    size = float(delta.max() if row is None else delta[row])

    def scaled(share):
        factor = share * NORMS["q"] / size
        b = one.b.clone()
        if row is None:
            b *= factor
        else:
            b[row] *= factor
        return adapter(q=replace(one, b=b))

    # The rows of A are not quite orthogonal, so the norm is not quite that of the bound.
    assert check_effect(scaled(0.7 * most), dtype, NORMS) is None
    reason = check_effect(scaled(1.5 * most), dtype, NORMS)
    assert reason is not None
    assert "times the base weights' size" in reason
    assert check_effect(scaled(1.5 * most), dtype, {}) is None  # nothing is merged into it


def test_a_shrink_that_leaves_the_range_of_fp16():
    """Other requests compute the shrink, too: ΔW alone does not say whether that is harmless."""
    one = pair()
    above = replace(one, a=one.a * 200, b=one.b / 200)
    below = replace(one, a=one.a * 1e-7, b=one.b * 1e4)
    assert "too large" in str(check_effect(adapter(q=above), torch.float16, NORMS))
    assert "underflows" in str(check_effect(adapter(q=below), torch.float16, NORMS))
    for pair_ in (above, below):
        assert check_effect(adapter(q=pair_), torch.bfloat16, NORMS) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(10))
def test_mixture_is_harmless_within_the_limits(dtype, seed):
    """x·(W + ΔW) − x·ΔW, computed as the engine does, against x·W."""
    draw = torch.Generator().manual_seed(100 + seed)
    one = pair(seed)
    one = replace(one, b=one.b * 10 ** float(torch.rand(1, generator=draw) * 4 - 1))
    if check_effect(adapter(q=one), dtype, NORMS) is not None:
        return
    w, a, b = (part.to(dtype) for part in (base_weight(), one.a, one.b))
    x = torch.randn(30, WIDTH, generator=draw).to(dtype)
    merged = (w.float() + one.scaling * (b.float() @ a.float())).to(dtype)
    assert bool(merged.isfinite().all())
    y = (x @ merged.T).float()
    shrunk = ((x.float() @ a.float().T) * -one.scaling).to(dtype).float()
    found = (y + shrunk @ b.float().T).to(dtype).double()
    exact = x.double() @ w.double().T
    most = 64 if dtype == torch.float32 else 8
    error = float((found - exact).norm() / exact.norm())
    assert error <= 2 * most * torch.finfo(dtype).eps
