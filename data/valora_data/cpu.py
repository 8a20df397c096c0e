"""What the CPU has instructions for."""

from __future__ import annotations

from typing import Any


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AMX, or AVX-512 BF16)."""
    import torch

    # Older versions of torch do not tell.
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
