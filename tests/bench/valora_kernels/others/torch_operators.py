"""LoRA for several adapters as constructions from torch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bench.valora_kernels.others.registry import b_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from valora_kernels.timing import Inputs, KernelWorkload


def operators(work: KernelWorkload) -> dict[str, Callable[[Inputs], object]]:
    """The constructions; without scalings, which favours them."""
    device = work.sets[0].x.device
    slots, rank = len(work.ranks), max(work.ranks)
    rows_of = torch.from_numpy(work.rows_of).to(device)
    dtype = work.sets[0].x.dtype
    places = [(rows_of == slot).nonzero()[:, 0] for slot in range(slots)]
    counts = torch.bincount(rows_of, minlength=slots)
    width = int(counts.max())
    padded = torch.zeros(slots, width, dtype=torch.int64, device=device)
    for slot, mine in enumerate(places):
        padded[slot, : len(mine)] = mine
    inside = (torch.arange(width, device=device)[None] < counts[:, None]).nonzero(as_tuple=True)
    offsets = counts.cumsum(0).to(torch.int32)
    mask = (torch.arange(slots, device=device)[None] == rows_of[:, None]).to(dtype)
    wide_mask = mask.repeat_interleave(rank, dim=1)
    grouped = getattr(torch.nn.functional, "grouped_mm", None)

    def views(s: Inputs) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for p, y in enumerate(s.ys):
            yield y, s.weights.a[p], b_of(s, p)

    def dense_mask(s: Inputs) -> None:
        for y, a, b in views(s):
            hidden = s.x @ a.flatten(0, 1).T
            y.addmm_(hidden if slots == 1 else hidden * wide_mask, b.flatten(0, 1))

    def loop(s: Inputs) -> None:
        for y, a, b in views(s):
            for slot, mine in enumerate(places):
                if slots == 1:
                    y.addmm_(s.x @ a[0].T, b[0])
                else:
                    y.index_add_(0, mine, s.x[mine] @ a[slot].T @ b[slot])

    def peft(s: Inputs) -> None:
        for y, a, b in views(s):
            for slot, mine in enumerate(places):
                y[mine] += (s.x[mine] @ a[slot].T) @ b[slot] * 0.5

    def padded_bmm(s: Inputs) -> None:
        for y, a, b in views(s):
            out = torch.bmm(torch.bmm(s.x[padded], a.transpose(1, 2)), b)
            y.index_add_(0, padded[inside], out[inside])

    def einsum(s: Inputs) -> None:
        for y, a, b in views(s):
            hidden = torch.einsum("mk,srk->msr", s.x, a) * mask[:, :, None]
            y.add_(torch.einsum("msr,srn->mn", hidden, b))

    def grouped_mm(s: Inputs) -> None:
        assert grouped is not None
        for y, a, b in views(s):
            y.add_(grouped(grouped(s.x, a.transpose(1, 2), offs=offsets), b, offs=offsets))

    found: dict[str, Callable[[Inputs], object]] = {
        "dense_mask": dense_mask,
        "loop": loop,
        "peft": peft,
        "bmm": padded_bmm,
        "einsum": einsum,
    }
    if grouped is not None:
        found["grouped_mm"] = grouped_mm
    return found
