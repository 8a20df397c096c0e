"""What `valora doctor` says of GPUs that are not there: made-up facts, and their findings."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from valora_kernels.gpus.detect import generic
from valora_kernels.gpus.registry import recorded
from valora_kernels.lookup import TilingTable
from valora_kernels.tiling import Shape, Tiling
from valora_serve.doctor import gpu as checks
from valora_serve.doctor import probe
from valora_serve.doctor.base import Facts, GpuFacts, Level, Patient, Process
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.sizing import tiling_file

GIB = 1 << 30
H200 = GpuFacts("NVIDIA H200", (9, 0), 140 * GIB, 138 * GIB)
FACTS = Facts("2.15.0", cuda="13.2", driver="580.65.06", gpus=(H200,))


@pytest.fixture
def weights(monkeypatch):
    """A base model whose weights take so many GiB in 16 bits."""

    def of(gib):
        monkeypatch.setattr(checks, "weight_bytes", lambda _: None if gib is None else gib * GIB)

    of(13)
    return of


def patient(facts, tensor_parallel=1, base="llava"):
    return Patient(base, tensor_parallel, lambda: facts)


def levels(found, what):
    return [one.level for one in found if one.what == what]


def one(found, level):
    """The only finding of a level."""
    chosen = [item for item in found if item.level is level]
    assert len(chosen) == 1, found
    return chosen[0]


def test_nothing_is_wrong(weights):
    found = list(checks.check_torch(patient(FACTS)))
    assert {item.level for item in found} == {Level.FINE}
    assert "138 of 140 GiB free" in found[2].found
    assert "llava needs 15.0 GiB" in found[3].found


def test_pytorch_cannot_be_imported():
    found = list(checks.check_torch(patient(Facts(None, "libcudart.so.13: cannot open"))))
    assert "libcudart" in one(found, Level.WRONG).found
    assert not list(checks.check_kernels(patient(Facts(None))))


@pytest.mark.parametrize(
    ("facts", "said", "remedy"),
    [
        (replace(FACTS, driver="570.86.10", gpus=()), "too old for the CUDA 13.2", "580 or newer"),
        (replace(FACTS, cuda=None, gpus=()), "cannot use it", "built for the CPU"),
        (replace(FACTS, gpus=(), problem="no CUDA-capable device"), "no CUDA-capable", "CUDA_VIS"),
    ],
)
def test_drivers(weights, facts, said, remedy):
    wrong = [f for f in checks.check_torch(patient(facts)) if f.level is Level.WRONG]
    assert any(said in item.found and remedy in item.remedy for item in wrong), wrong


def test_a_driver_of_the_same_major_version_is_new_enough(weights):
    old = replace(FACTS, cuda="12.9", driver="525.60.13")
    assert levels(checks.check_torch(patient(old)), "driver") == [Level.FINE]


def test_no_gpu_is_no_fault():
    none = Facts("2.15.0", cuda="13.2")
    assert one(list(checks.check_torch(patient(none))), Level.NOTE).what == "GPU"


def test_a_gpu_that_is_too_small(weights):
    small = replace(H200, total=8 * GIB, free=8 * GIB)
    wrong = one(list(checks.check_torch(patient(replace(FACTS, gpus=(small,))))), Level.WRONG)
    assert "too small: llava needs 15.0 GiB" in wrong.found
    assert "3 GPUs with --tensor-parallel" in wrong.remedy
    both = replace(FACTS, gpus=(replace(small, total=9 * GIB, free=9 * GIB),) * 2)
    shared = list(checks.check_torch(patient(both, tensor_parallel=2)))
    assert not [item for item in shared if item.level is Level.WRONG]
    wrong = one(list(checks.check_torch(patient(FACTS, tensor_parallel=2))), Level.WRONG)
    assert "1 found, and --tensor-parallel 2" in wrong.found


def test_another_process_on_the_gpu(weights):
    taken = replace(H200, free=9 * GIB, processes=(Process(4711, 130 * GIB), Process(12)))
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(taken,)))))
    assert "131.0 GiB are taken" in one(found, Level.WRONG).found
    said = one(found, Level.NOTE)
    assert "2 other processes on it: 4711 (130.0 GiB), 12 (? GiB)" in said.found
    assert "CUDA_VISIBLE_DEVICES" in said.remedy


def test_no_room_for_a_second_copy_and_no_bfloat16(weights):
    tight = replace(H200, total=24 * GIB, free=24 * GIB, capability=(7, 5))
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(tight,)))))
    notes = [item.found + item.remedy for item in found if item.level is Level.NOTE]
    assert len(notes) == 2
    assert "no bfloat16" in notes[0]
    assert "--policy unmerge_only" in notes[1]
    weights(None)  # a model that is not on this machine yet
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(tight,)))))
    assert "no bfloat16" in one(found, Level.NOTE).found


def test_bytes_of_weights(tmp_path):
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)},
              tmp_path / "model-1.safetensors")  # fmt: skip
    save_file({"c": np.zeros((2, 2), np.float32)}, tmp_path / "model-2.safetensors")
    assert checks.weight_bytes(str(tmp_path)) == 2 * (15 + 7 + 4)
    (tmp_path / "model-2.safetensors").write_bytes(b"damaged")
    assert checks.weight_bytes(str(tmp_path)) is None
    assert checks.weight_bytes("nobody/nothing") is None
    assert 6e6 < checks.weight_bytes("tiny") < 12e6


@pytest.fixture
def packages(monkeypatch):
    versions = {"triton": "3.9.0", "torch": "2.15.0+cu132", "flashinfer-python": "0.6.4"}
    needs = {
        "valora": ["torch>=2.11", "flashinfer-python<0.7,>=0.6.4; extra == 'gpu'",
                   "ray>=2; extra == 'scale'"],
        "torch": ["triton==3.9.0; platform_system == 'Linux'", "filelock"],
    }  # fmt: skip
    monkeypatch.setattr(checks, "installed", versions.get)
    monkeypatch.setattr(checks, "required_by", lambda owner: needs[owner])
    return versions


def test_libraries_of_the_tested_versions(packages):
    found = list(checks.check_kernels(patient(FACTS)))
    assert {item.level for item in found} == {Level.FINE}


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("triton", "3.6.0", "3.6.0, but torch needs triton==3.9.0"),
        ("torch", "2.9.1", "2.9.1, but valora needs torch>=2.11"),
        ("flashinfer-python", "0.7.2.post1", "but valora needs flashinfer-python<0.7"),
    ],
)
def test_a_library_of_the_wrong_version(packages, package, version, said):
    packages[package] = version
    wrong = one(list(checks.check_kernels(patient(FACTS))), Level.WRONG)
    assert said in wrong.found
    assert wrong.remedy.startswith(f"pip install '{package}")


def test_libraries_that_are_missing(packages):
    packages.clear()
    found = list(checks.check_kernels(patient(replace(FACTS, compiler=False))))
    wrong = {item.what for item in found if item.level is Level.WRONG}
    assert wrong == {"Triton", "C compiler"}
    assert one(found, Level.NOTE).remedy == "pip install 'valora[gpu]'"
    packages.update(triton="3.9.0", torch="2.15.0")
    packages["flashinfer-python"] = "0.6.4"
    found = list(checks.check_kernels(patient(replace(FACTS, nvcc=False))))
    assert one(found, Level.NOTE).what == "nvcc"
    packages["flashinfer-jit-cache"] = "0.6.4"
    found = list(checks.check_kernels(patient(replace(FACTS, nvcc=False))))
    assert {item.level for item in found} == {Level.FINE}


def test_what_was_measured_on_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = list(checks.check_tuning(patient(FACTS, base="tiny")))
    assert levels(found, "tilings") == [Level.FINE]
    assert "not measured for tiny on NVIDIA H200" in one(found, Level.NOTE).found
    file = tmp_path / ".cache/valora/costs/costs/nvidia-h200-x2--tiny/costs.json"
    file.parent.mkdir(parents=True)
    file.touch()
    found = list(checks.check_tuning(patient(FACTS, tensor_parallel=2, base="tiny")))
    assert levels(found, "costs") == [Level.FINE]
    other = replace(FACTS, gpus=(replace(H200, name="Example 9000"),) * 2)
    found = list(checks.check_tuning(patient(other)))
    assert levels(found, "tilings") == [Level.NOTE]
    assert "the server measures them while it is idle" in found[0].remedy
    example = generic("Example 9000", processors=1, shared_memory=0, capability=(9, 0))
    table = TilingTable(example, [(Shape(64, 64, 1, 16, 4, 1.0), Tiling("fused"))])
    table.save(tmp_path / ".cache/valora/tilings/example_9000.json")
    found = list(checks.check_tuning(patient(other)))
    assert levels(found, "tilings") == [Level.FINE]
    assert "1 shape measured for Example 9000" in found[0].found
    found = list(checks.check_tuning(patient(other, tensor_parallel=2)))
    assert levels(found, "tilings") == [Level.NOTE]  # its processes choose for themselves
    assert not list(checks.check_tuning(patient(Facts("2.15.0"))))


def test_tilings_of_a_gpu_with_the_same_chip(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    h100 = patient(replace(FACTS, gpus=(replace(H200, name="NVIDIA H100 80GB HBM3"),)))
    found = list(checks.check_tuning(h100))
    assert levels(found, "tilings") == [Level.NOTE]
    assert "those of the NVIDIA H200, which has the same chip, are used" in found[0].found
    known = recorded("NVIDIA H100 80GB HBM3")
    table = TilingTable(known, [(Shape(64, 64, 1, 16, 4, 1.0), Tiling("fused"))])
    table.save(tiling_file(EngineSettings(), known.name))
    assert "1 shape measured" in next(iter(checks.check_tuning(h100))).found


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    monkeypatch.setattr(probe, "DRIVER", file)
    assert probe._driver() == "580.65.06"
    file.unlink()
    assert probe._driver() is None
