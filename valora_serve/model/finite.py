"""Rows whose values are no longer finite: found on the device, without waiting for it.

Infinity and NaN reach the end of the model. But a hidden state whose squares overflow in a norm
becomes zero, every logit is equal, and the argmax is a token like any other. Both are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

BROKEN = -1  # stands for a token that was chosen from logits that are not finite


def finite_rows(values: Tensor) -> Tensor:
    """Return which rows are finite and not constant: [rows, width] → [rows] bool; capturable."""
    if not values.shape[0]:
        return torch.ones(0, dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values, dim=-1)  # both are NaN if any value is
    return low.isfinite() & high.isfinite() & (low < high)


def mark_broken(tokens: Tensor, finite: Tensor) -> Tensor:
    """Return the tokens of finite rows and `BROKEN` for others: [rows] int64; `tokens` stays."""
    return torch.where(finite, tokens, BROKEN)
