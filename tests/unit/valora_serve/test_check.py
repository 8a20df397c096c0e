"""What `valora-serve --check` says of GPUs that are not there, and where tools are looked for."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from valora_serve import check, cli, toolkit
from valora_serve.engine.settings import EngineSettings

GIB = 1 << 30


class Torch:
    """PyTorch with GPUs of (free, total) GiB; one without memory cannot be used."""

    __version__ = "2.15.0"
    version = SimpleNamespace(cuda="13.2")

    def __init__(self, *gpus):
        def memory(number):
            if not gpus[number][0]:
                raise RuntimeError("CUDA error: out of memory\nmore of it")
            return tuple(size * GIB for size in gpus[number])

        self.cuda = SimpleNamespace(
            device_count=lambda: len(gpus), mem_get_info=memory,
            get_device_properties=lambda _: SimpleNamespace(name="NVIDIA H200", uuid="x"),
        )  # fmt: skip

    def zeros(self, *_, **__):
        return SimpleNamespace(add=lambda _: None)


def looked(monkeypatch, capsys, *gpus, driver="Module  580.65.06  Release", **settings):
    if driver:
        monkeypatch.setattr(check, "DRIVER", SimpleNamespace(read_text=lambda: driver))
    monkeypatch.setitem(sys.modules, "torch", Torch(*gpus))
    monkeypatch.setattr(check, "_bytes", lambda one, _: 13 * GIB if one.base == "tiny" else 1 / 0)
    status = check.check(EngineSettings(**settings), [], 100)
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "settings", "said"),
    [
        ([(138, 140)], {}, None), ([(138, 140), (0, 140)], {}, None),  # the first is taken
        ([(0, 140), (138, 140)], {}, "GPU 0: cannot be used (CUDA error: out of memory)"),
        ([(138, 140), (0, 140)], {"tensor_parallel": 2}, "GPU 1: cannot be used"),
        ([(138, 140)], {"tensor_parallel": 2}, "--tensor-parallel is 2"),
        ([(8, 8)], {}, "needs 13.0 GiB"), ([(26, 140)], {}, "more than is free of 90% of it"),
        ([], {}, "no GPU with CUDA_VISIBLE_DEVICES"), ([(9, 9)], {"base": "damaged"}, None),
        *(([], settings, None) for settings in ({"device": "cpu"}, {"driver": ""})),
    ],
)  # fmt: skip
def test_gpus(monkeypatch, capsys, gpus, settings, said):
    status, out = looked(monkeypatch, capsys, *gpus, **settings)
    wrong = "".join(line for line in out.splitlines() if line[0] == check.WRONG)
    assert status == bool(wrong) == bool(said), out
    assert (said or "") in wrong


@pytest.mark.parametrize(
    ("versions", "missing", "said"),
    [
        ({}, [], "– FlashInfer: it is not installed"),
        ({"flashinfer-python": "0.6.4"}, [], "✓ FlashInfer: 0.6.4"),
        ({"flashinfer-python": "0.6.4"}, ["nvcc"], "kernels with nvcc, not found"),
        ({"flashinfer-python": "0.6.4", "flashinfer-jit-cache": "0.6.4+cu130"}, ["nvcc"], "✓"),
        ({"flashinfer-python": "0.6.4", "flashinfer-cubin": "0.6.9"}, [], "refuses"),
    ],
)
def test_flashinfer(monkeypatch, versions, missing, said):
    def version(name):
        if name not in versions:
            raise check.importlib.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(check.importlib.metadata, "version", version)
    monkeypatch.setattr(check, "missing_tools", lambda: missing)
    [(mark, text)] = check._libraries()
    assert said in f"{mark} {text}"


def test_this_machine(capsys):
    assert cli.main(["--check", "--device", "cpu"]) == 0
    assert "CPU cores" in capsys.readouterr().out
    assert cli.main(["--check", "--base", "acme/absent", "--device", "cpu"]) == 0


DEMO = Path(check.__file__).parent / "demo" / "bundles" / "detection"
BASE = Path(__file__).parents[2] / "fixtures" / "cd9fad5" / "base"


def test_bundles_that_would_not_be_served(capsys, tmp_path):
    def checked(bundle, *more):
        status = cli.main(["--check", "--device", "cpu", str(bundle), *more])
        return status, capsys.readouterr().err

    assert checked(DEMO) == (0, "")
    shutil.copytree(DEMO, tmp_path / "damaged")
    next((tmp_path / "damaged" / "heads").iterdir()).write_bytes(b"")
    for given, said in (
        ((DEMO, "--base", str(BASE)), "was made for base model tiny"),
        ((DEMO, "--base", str(tmp_path / "x")), "x does not exist: check the path"),
        ((tmp_path / "damaged",), "is missing or was changed"),
    ):
        status, error = checked(*given)
        assert status == 1 and said in error and error.count("\n") == 1


def make_program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="a program is a file with a mode")
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, False), ({"PATH": "with/bin"}, True),
        ({"CUDA_HOME": "with"}, True), ({"CUDA_PATH": "with"}, True),
        ({"CUDA_HOME": "without", "PATH": "with/bin"}, False),  # as FlashInfer
        ({"CUDA_HOME": "without", "FLASHINFER_NVCC": "with/bin/nvcc"}, True),
        ({"FLASHINFER_NVCC": "without/bin/nvcc", "PATH": "with/bin"}, False),
    ],
)  # fmt: skip
def test_nvcc(tmp_path, monkeypatch, variables, found):
    make_program(tmp_path / "with/bin/nvcc")
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
    make_program(own / "ninja")
    make_program(empty / "g++-14")
    monkeypatch.setenv("CXX", "g++-14")
    assert toolkit.missing_tools() == ["nvcc"]
    assert shutil.which("ninja") is None
    for _ in range(2):
        toolkit.find_own_programs()
        assert os.environ["PATH"].split(os.pathsep) == [str(empty), str(own)]
    assert shutil.which("ninja") == str(own / "ninja")
