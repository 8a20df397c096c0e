"""Adapters with random matrices, and where they must lie in unified memory."""

from pathlib import Path

import torch

from valora_data.models.base import ModelPart
from valora_serve.catalogue.adapters import Adapter, LoraPair


def make_adapter(groups, ranks, seed, scaling=0.75, others=None):
    """Return an adapter whose elements all differ.

    Args:
        groups: The model's groups of linears.
        ranks: Of the modules that it changes.
        seed: Of its elements.
        scaling: Of the adapter.
        others: Scalings of modules that have their own.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        module: (width, group.in_features)
        for group in groups
        for module, width in zip(group.modules, group.out_features, strict=True)
    }
    modules = {
        module: LoraPair(
            torch.randn(rank, shapes[module][1], generator=generator),
            torch.randn(shapes[module][0], rank, generator=generator),
            (others or {}).get(module, scaling),
        )
        for module, rank in ranks.items()
    }
    return Adapter(
        Path(f"adapter-{seed}"), modules, max(ranks.values()), scaling,
        frozenset([ModelPart.LANGUAGE]), f"{seed}-{sorted(ranks.items())}", "",
    )  # fmt: skip


def check_rows(memory, groups, adapter, slot):
    """Check that a slot's tables lead to the adapter's rows, and to zeros where it has none."""
    for group in groups:
        weights = memory.lora[group.name]
        for p, module in enumerate(group.modules):
            a, b = (part.cpu() for part in weights.rows_of(p, slot, adapter.rank))
            pair = adapter.modules.get(module)
            rank = 0 if pair is None else len(pair.a)
            assert not a[rank:].any() and not b[rank:].any()
            if pair is not None:
                assert torch.equal(a[:rank], pair.a.to(a.dtype))
                factor = pair.scaling / adapter.scaling
                assert torch.equal(b[:rank], (pair.b.T * factor).to(b.dtype))
