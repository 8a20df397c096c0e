"""Which keys and values of a document a prefix keeps, without training."""

from __future__ import annotations

import torch

FIRST = 4  # tokens always kept, as every later token attends to them (StreamingLLM, 2023)


def keep_keys(kv: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the tokens whose keys differ most from the mean of their layer and head.

    They have the positions that they had (KeyDiff, Park et al. 2025) and their order: `kv`
    [2, layers, kv_heads, tokens, head_dim], keys after their rotary positions, to `count` tokens.
    """
    if count >= kv.shape[3]:
        return kv
    unit = torch.nn.functional.normalize(kv[0].float(), dim=-1)
    alike = (unit * unit.mean(-2, keepdim=True)).sum(-1)
    alike[..., :FIRST] = -torch.inf
    kept = alike.topk(count, largest=False).indices.sort().values
    return kv.gather(3, kept[None, ..., None].expand(2, *kept.shape, kv.shape[-1]))
