"""Tools are looked for where FlashInfer looks for them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from valora_serve import toolkit


def nvcc_in(folder):
    """A program of that name in `bin`; returns it."""
    program = folder / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.mark.skipif(sys.platform == "win32", reason="a program is a file with a mode")
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, False),
        ({"PATH": "with/bin"}, True),
        ({"CUDA_HOME": "with"}, True),
        ({"CUDA_PATH": "with"}, True),
        ({"CUDA_HOME": "without", "PATH": "with/bin"}, False),  # as FlashInfer
        ({"CUDA_HOME": "without", "FLASHINFER_NVCC": "with/bin/nvcc"}, True),
        ({"FLASHINFER_NVCC": "without/bin/nvcc", "PATH": "with/bin"}, False),
    ],
)
def test_nvcc(tmp_path, monkeypatch, variables, found):
    nvcc_in(tmp_path / "with")
    (tmp_path / "without").mkdir()
    if Path("/usr/local/cuda/bin/nvcc").exists() and not variables:
        pytest.skip("there is a CUDA toolkit here")
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "without"))
    for name, place in variables.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    assert toolkit.has_nvcc() is found


def test_tools_that_are_missing(tmp_path, monkeypatch):
    """Programs beside this Python are found, also where its environment is not activated."""
    empty, own = tmp_path / "empty", tmp_path / "own"
    for folder in (empty, own):
        folder.mkdir()
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda _: str(own))
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("FLASHINFER_NVCC", str(empty / "nvcc"))
    monkeypatch.delenv("CXX", raising=False)
    assert toolkit.missing_tools() == ["nvcc", "c++", "ninja"]
    for program in (own / "ninja", empty / "g++-14"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("CXX", "g++-14")
    assert toolkit.missing_tools() == ["nvcc"]
    assert shutil.which("ninja") is None
    for _ in range(2):
        toolkit.find_own_programs()
        assert os.environ["PATH"].split(os.pathsep) == [str(empty), str(own)]
    assert shutil.which("ninja") == str(own / "ninja")
