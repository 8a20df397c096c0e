"""LoRA batches for the kernels' tests: neighbouring rows differ in adapter, rank and scaling."""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from valora_kernels.metadata import LoraBatch
from valora_kernels.weights import LoraWeights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
"""Device of the parity tests: `cpu` for Triton's interpreter, or a GPU."""

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="needs a GPU, or TRITON_INTERPRET=1 set before anything imports Triton",
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Relative Frobenius error that a result of each type may have against fp32."""


@dataclass
class Case:
    """Inputs of one call, and what the expected result is computed from."""

    x: torch.Tensor
    ys: list[torch.Tensor]
    weights: LoraWeights
    batch: LoraBatch
    adapters: np.ndarray  # [rows, terms]
    coefficients: np.ndarray  # [rows, terms]
    ranks: list[int]
    scalings: list[float]
    a: list[list[torch.Tensor]]  # [slot][projection] [rank, in]
    b: list[list[torch.Tensor]]  # [slot][projection] [out, rank]

    def expected(self, *, add=True):
        """The result in fp64, computed row by row."""
        found = []
        for p, y in enumerate(self.ys):
            total = y.double().clone() if add else torch.zeros_like(y, dtype=torch.float64)
            for m in range(len(self.x)):
                for slot, coefficient in zip(self.adapters[m], self.coefficients[m], strict=True):
                    if slot >= 0:
                        a, b = self.a[slot][p].double(), self.b[slot][p].double()
                        total[m] += (
                            float(coefficient)
                            * self.scalings[slot]
                            * (self.x[m].double() @ a.T)
                            @ b.T
                        )
            found.append(total)
        return found


def paged_weights(
    slots, max_rank, in_features, out_features,
    dtype, device, generator,
):  # fmt: skip
    """A pool of pages in which the rank rows of all adapters lie shuffled, NaN in between."""
    shape = (len(out_features), slots, max_rank)
    rows = len(out_features) * slots * max_rank
    page = max(in_features, *out_features)
    pool = torch.full((3 * rows, page), float("nan"), dtype=dtype, device=device)
    places = torch.randperm(3 * rows, generator=generator)[: 2 * rows].to(device) * page
    return LoraWeights(
        in_features, out_features, slots, max_rank, pool, pool,
        places[:rows].view(shape).contiguous(), places[rows:].view(shape).contiguous(),
    )  # fmt: skip


def write_adapter(weights, slot, a, b):
    """Write A [rank, in_features] and B [out_features[p], rank] of each p into a slot."""
    for p, (one, two) in enumerate(zip(a, b, strict=True)):
        for memory, table, value in (
            (weights.a, weights.a_table, one), (weights.b, weights.b_table, two.T)
        ):  # fmt: skip
            starts = table[p, slot, : len(value), None]
            places = starts + torch.arange(value.shape[1], device=memory.device)
            memory.view(-1)[places] = value.to(memory)


def draw_rows(rows, slots, popularity, rng):
    """Adapter of each row, interleaved."""
    if popularity == "distinct":
        return np.arange(rows) % slots
    if popularity == "identical":
        return np.full(rows, slots - 1)
    if popularity == "none":
        return np.full(rows, -1)
    if popularity == "uniform":  # also rows without an adapter
        return rng.integers(-1, slots, rows)
    share = 1 / np.arange(1, slots + 1) if popularity == "zipf" else np.full(slots, 0.1 / slots)
    if popularity == "skewed":
        share[0] = 0.9
    return rng.choice(slots, rows, p=share / share.sum())


def make_case(
    rows,
    ranks,
    in_features,
    out_features,
    *,
    dtype,
    popularity="uniform",
    terms=1,
    paged=False,
    device=DEVICE,
    seed=0,
):
    """Random inputs; memory that no adapter owns is NaN."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    slots, max_rank = len(ranks), max(ranks)
    if paged:
        weights = paged_weights(
            slots, max_rank, in_features, out_features, dtype, device, generator
        )
    else:
        weights = LoraWeights.contiguous(
            slots, max_rank, in_features, out_features, dtype=dtype, device=device
        )
        weights.a.fill_(float("nan"))
        weights.b.fill_(float("nan"))
    a = [[normal(r, in_features, scale=in_features**-0.5) for _ in out_features] for r in ranks]
    b = [[normal(n, r, scale=r**-0.5) for n in out_features] for r in ranks]
    for slot in range(slots):
        write_adapter(weights, slot, a[slot], b[slot])
    adapters = draw_rows(rows, slots, popularity, rng)[:, None]
    coefficients = np.ones((rows, 1), dtype=np.int64)
    if terms == 2:  # mixture mode: every row takes out what adapter 0 merged
        merged = np.zeros_like(adapters)
        adapters = np.concatenate([adapters, merged], axis=1)
        coefficients = np.concatenate([coefficients, -np.ones_like(coefficients)], axis=1)
    scalings = [float(s) for s in rng.uniform(0.5, 2.0, slots)]
    batch = LoraBatch(rows, rows, device)
    batch.update(adapters, ranks, scalings, coefficients)
    return Case(
        x=normal(rows, in_features),
        ys=[normal(rows, n) for n in out_features],
        weights=weights,
        batch=batch,
        adapters=adapters,
        coefficients=coefficients,
        ranks=ranks,
        scalings=scalings,
        a=a,
        b=b,
    )


def assert_near(got, want):
    """Compare by the Frobenius norm, with the tolerance of the result's type; NaN never passes."""
    assert got.shape == want.shape
    if not got.numel():
        return
    error = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
    if not error <= TOLERANCE[got.dtype]:
        off = ~((got.double() - want).abs() <= 10 * TOLERANCE[got.dtype] * want.abs().mean())
        first = off.nonzero()[:5].tolist()
        raise AssertionError(f"relative error {error:.2e}; first mismatches at {first}")
