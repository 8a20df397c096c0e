"""What libraries compile their kernels with: CUDA's compiler, a C++ compiler and ninja."""

import os
import shutil
import sysconfig
from pathlib import Path


def missing_tools() -> list[str]:
    """Return the tools that FlashInfer would not find when it compiles its kernels."""
    compiler = os.environ.get("CXX", "c++")
    found = {
        "nvcc": has_nvcc(),
        compiler: shutil.which(compiler) is not None,
        "ninja": shutil.which("ninja") is not None or (_scripts() / "ninja").exists(),
    }
    return [name for name, there in found.items() if not there]


def find_own_programs() -> None:
    """Put the programs that pip has installed with this Python, such as ninja, last on PATH."""
    own = str(_scripts())
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if own not in paths:
        os.environ["PATH"] = os.pathsep.join((*paths, own))


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def has_nvcc() -> bool:
    """Return whether nvcc is where FlashInfer looks for it."""
    named = os.environ.get("FLASHINFER_NVCC")
    if named is not None:
        return shutil.which(named) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").exists()
