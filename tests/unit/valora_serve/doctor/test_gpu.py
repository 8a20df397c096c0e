"""What `valora doctor` says of GPUs that are not there: made-up facts, and their findings."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from valora_kernels.gpus.detect import generic
from valora_kernels.gpus.registry import recorded
from valora_kernels.lookup import TilingTable
from valora_kernels.tiling import Shape, Tiling
from valora_serve.doctor import gpu as checks
from valora_serve.doctor import probe
from valora_serve.doctor.base import Facts, GpuFacts, Level, Patient, Process
from valora_serve.doctor.machine import check_files
from valora_serve.doctor.sizes import Sizes, read_sizes
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.sizing import LEAST_PAGES, beside_weights, tiling_file

GIB = 1 << 30
H200 = GpuFacts("NVIDIA H200", (9, 0), 140 * GIB, 138 * GIB)
FACTS = Facts("2.15.0", cuda="13.2", driver="580.65.06", gpus=(H200,))


@pytest.fixture
def weights(monkeypatch):
    """A base model of so many GiB in 16 bits, half of which adapters are merged into."""

    def of(gib):
        found = gib and Sizes(gib * GIB, gib * GIB // 2, 2 * GIB)
        monkeypatch.setattr(checks, "read_sizes", lambda _: found)

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
        (
            replace(FACTS, gpus=(), problem="no CUDA-capable device"),
            "no CUDA-capable",
            "nvidia-smi",
        ),
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
    both = replace(FACTS, gpus=(replace(small, total=14 * GIB, free=14 * GIB),) * 2)
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
    tight = replace(H200, total=23 * GIB, free=23 * GIB, capability=(7, 5))
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(tight,)))))
    assert "no bfloat16" in one(found, Level.NOTE).found
    assert "--policy unmerge_only" in one(found, Level.WRONG).remedy
    roomy = replace(tight, total=25 * GIB, free=25 * GIB)
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(roomy,)))))
    assert not [item for item in found if item.level is Level.WRONG]
    weights(None)  # a model that is not on this machine yet
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(tight,)))))
    assert "no bfloat16" in one(found, Level.NOTE).found


def test_one_gpu_that_cannot_be_used_hides_no_other(weights):
    full = replace(H200, free=0, processes=(Process(4711),), problem="CUDA error: out of memory")
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(full, H200)))))
    wrong = one(found, Level.WRONG)
    assert (wrong.what, "out of memory" in wrong.found) == ("GPU 0", True)
    assert "CUDA_VISIBLE_DEVICES" in wrong.remedy
    assert levels(found, "GPU 1") == [Level.FINE, Level.FINE]
    # The server takes the first one.
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(H200, full)))))
    assert not [item for item in found if item.level is Level.WRONG]
    found = list(checks.check_torch(patient(replace(FACTS, gpus=(H200, full)), tensor_parallel=2)))
    assert "out of memory" in one(found, Level.WRONG).found


@pytest.mark.parametrize(
    ("capability", "architectures", "has"),
    [
        ((7, 0), ("sm_75", "sm_90", "compute_120"), False), ((7, 0), (), True),
        ((9, 0), ("sm_75", "sm_90a"), True), ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_89",), False),
        ((12, 1), ("sm_90", "compute_90"), True), ((12, 0), ("sm_120f",), True),
        ((10, 0), ("sm_90",), False),
    ],
)  # fmt: skip
def test_code_for_a_gpu(weights, capability, architectures, has):
    facts = replace(FACTS, gpus=(replace(H200, capability=capability),))
    facts = replace(facts, architectures=architectures)
    wrong = [f for f in checks.check_torch(patient(facts)) if f.level is Level.WRONG]
    assert not wrong if has else "no code for compute capability" in wrong[0].found


def test_a_driver_with_the_package_for_forward_compatibility(weights):
    found = checks.check_torch(patient(replace(FACTS, driver="570.86.10")))
    assert levels(found, "driver") == [Level.FINE]


@pytest.mark.parametrize(
    ("more", "remedy"),
    [({"visible": ""}, "CUDA_VISIBLE_DEVICES is ''"), ({"visible": "7"}, "DEVICES is '7'"),
     ({}, "--gpus all")],
)  # fmt: skip
def test_a_driver_without_gpus(weights, more, remedy):
    found = one(list(checks.check_torch(patient(replace(FACTS, gpus=(), **more)))), Level.WRONG)
    assert remedy in found.remedy
    assert "update it" not in found.remedy


class Torch:
    """PyTorch with two GPUs, the second of which is full."""

    __version__ = "2.15.0"
    version = SimpleNamespace(cuda="13.2")

    class cuda:
        listed = ("sm_90",)

        @staticmethod
        def is_available():
            return True

        @staticmethod
        def device_count():
            return 2

        @staticmethod
        def get_device_properties(number):
            return SimpleNamespace(name=f"GPU of number {number}", major=9, minor=0, uuid="x",
                                   total_memory=80 * GIB)  # fmt: skip

        @staticmethod
        def mem_get_info(number):
            if number == 1:
                raise RuntimeError("CUDA error: out of memory\nmore of it")
            return 70 * GIB, 80 * GIB

        @classmethod
        def get_arch_list(cls):
            return list(cls.listed)


def test_what_is_read_of_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", Torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    facts = probe.read_facts.__wrapped__()
    assert [(gpu.free // GIB, gpu.total // GIB, gpu.problem) for gpu in facts.gpus] == [
        (70, 80, ""), (0, 80, "CUDA error: out of memory"),
    ]  # fmt: skip
    assert (facts.architectures, facts.visible) == (("sm_90",), "0,1")

    class DeferredCudaCallError(Exception):
        pass

    def differ(_):
        raise DeferredCudaCallError("device_count differs")

    monkeypatch.setattr(Torch.cuda, "get_device_properties", differ)
    facts = probe.read_facts.__wrapped__()
    assert (facts.gpus, facts.problem) == ((), "device_count differs")


def test_sizes_of_a_base_model(tmp_path):
    numbers = np.zeros
    save_file({"model.layers.0.self_attn.q_proj.weight": numbers((3, 5), np.float32),
               "model.vision_tower.layers.0.q_proj.weight": numbers((2, 3), np.float32),
               "b": numbers(7, np.float16)}, tmp_path / "model-1.safetensors")  # fmt: skip
    save_file({"c": numbers((2, 2), np.float32)}, tmp_path / "model-2.safetensors")
    text = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    found = read_sizes(str(tmp_path))
    assert (found.weights, found.merged) == (2 * (15 + 6 + 7 + 4), 2 * 15)
    settings = EngineSettings()
    pages = LEAST_PAGES * 2 * 3 * settings.block_size * 2 * 16 * 2
    assert found.beside == beside_weights(settings, 64, 1000) + pages
    (tmp_path / "config.json").unlink()
    assert read_sizes(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-2.safetensors").write_bytes(b"damaged")
    assert read_sizes(str(tmp_path)) is None
    assert 6e6 < read_sizes("tiny").weights < 12e6


def test_a_hub_name_is_looked_for_on_this_machine_only(tmp_path, monkeypatch):
    asked = []

    def snapshot(name, **options):
        asked.append((name, options))
        if name == "acme/absent":
            raise LocalEntryNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    save_file({"a": np.zeros((3, 5), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert read_sizes("acme/here").weights == 30
    assert read_sizes("acme/absent") is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = list(check_files(Patient("acme/absent", 1, lambda: FACTS)))
    assert (found[0].level, "not on this machine" in found[0].found) == (Level.NOTE, True)
    assert check_files(Patient("acme/here", 1, lambda: FACTS)).__next__().level is Level.FINE
    assert asked
    assert all(options == {"local_files_only": True} for _, options in asked)


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
    bare = patient(replace(FACTS, missing=("nvcc", "ninja")))
    note = one(list(checks.check_kernels(bare)), Level.NOTE)
    assert note.what == "nvcc, ninja"
    assert "pip install ninja" in note.remedy
    assert "flashinfer-jit-cache 0.6.4 from FlashInfer's own index" in note.remedy
    note = one(list(checks.check_kernels(patient(replace(FACTS, missing=("c++",))))), Level.NOTE)
    assert note.remedy == "install g++"
    packages["flashinfer-jit-cache"] = "0.6.4+cu130"
    assert {item.level for item in checks.check_kernels(bare)} == {Level.FINE}
    packages["flashinfer-jit-cache"] = "0.6.9+cu130"
    wrong = one(list(checks.check_kernels(bare)), Level.WRONG)
    assert "0.6.9+cu130, which FlashInfer 0.6.4 refuses" in wrong.found


def test_what_was_measured_on_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("VALORA_COST_FOLDER", "VALORA_TILING_FOLDER"):
        monkeypatch.delenv(variable, raising=False)
    found = list(checks.check_tuning(patient(FACTS, base="tiny")))
    assert levels(found, "tilings") == [Level.FINE]
    assert "not measured for tiny on NVIDIA H200" in one(found, Level.NOTE).found
    file = tmp_path / ".cache/valora/costs/costs/nvidia-h200-x2--tiny/costs.json"
    file.parent.mkdir(parents=True)
    file.touch()
    found = list(checks.check_tuning(patient(FACTS, tensor_parallel=2, base="tiny")))
    assert levels(found, "costs") == [Level.FINE]
    exists = Path.exists

    def of_others(path):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", of_others)
        found = list(checks.check_tuning(patient(FACTS, tensor_parallel=2, base="tiny")))
        assert levels(found, "costs") == [Level.NOTE]
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
    monkeypatch.setenv("VALORA_TILING_FOLDER", "~/.cache/valora/elsewhere")
    assert levels(list(checks.check_tuning(patient(other))), "tilings") == [Level.NOTE]
    monkeypatch.setenv("VALORA_TILING_FOLDER", "~/.cache/valora/tilings")
    assert levels(list(checks.check_tuning(patient(other))), "tilings") == [Level.FINE]
    monkeypatch.setenv("VALORA_COST_FOLDER", "~/elsewhere")
    found = list(checks.check_tuning(patient(FACTS, tensor_parallel=2, base="tiny")))
    assert levels(found, "costs") == [Level.NOTE]
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
