"""CUDA's compiler, with which libraries compile their kernels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def has_nvcc() -> bool:
    """Return whether nvcc is where FlashInfer looks for it.

    That is FLASHINFER_NVCC, the folder CUDA_HOME or CUDA_PATH, or else PATH or /usr/local/cuda.
    """
    named = os.environ.get("FLASHINFER_NVCC")
    if named is not None:
        return shutil.which(named) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").exists()
