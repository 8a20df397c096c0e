"""vLLM's Triton kernels (`lora_shrink`, `lora_expand`), called as its `add_lora_linear` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.bench.valora_kernels.others.registry import b_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from valora_kernels.timing import Inputs, KernelWorkload


def operators(work: KernelWorkload) -> dict[str, Callable[[Inputs], object]]:
    """The pair of kernels, with the grid of the adapters that are in the batch."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    device, slots, rank = work.sets[0].x.device, len(work.ranks), max(work.ranks)
    rows = len(work.rows_of)
    meta = LoRAKernelMeta.make(slots, rows, device)
    meta.prepare_tensors(torch.from_numpy(work.rows_of).to(device, torch.int32))
    given = meta.meta_args(rows, True)
    scalings = torch.tensor(work.scalings, device=device)
    kept: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]] = {}

    def prepare(s: Inputs) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """A and B as it keeps them, with the scaling in B, and the outputs side by side."""
        a, b = [], []
        for p in range(len(s.weights.out_features)):
            scaled = (b_of(s, p).transpose(1, 2) * scalings[:, None, None]).to(s.x.dtype)
            for slot, own in enumerate(work.ranks):
                scaled[slot, :, own:] = 0  # it computes all adapters at the largest rank
            a.append(s.weights.a[p].view(slots, 1, rank, -1))
            b.append(scaled.contiguous()[:, None])
        return a, b, s.ys[0] if len(s.ys) == 1 else torch.cat(s.ys, dim=1)

    def vllm(s: Inputs) -> torch.Tensor:
        a, b, y = kept[id(s)]
        hidden = torch.empty((len(a), rows, rank), dtype=torch.float32, device=device)
        lora_shrink(s.x, a, hidden, *given, 1.0)
        lora_expand(hidden, b, y, *given, offset_start=0, add_inputs=True)
        return y

    for s in work.sets:  # not while a graph is captured
        kept[id(s)] = prepare(s)
    return {"vllm": vllm}
