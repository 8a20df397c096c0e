"""Pages, threads and devices follow from the settings and the machine."""

import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from valora_serve.engine import sizing, workers
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import ServeError, SettingsError
from valora_serve.memory.unified import PageShape


def model_on_a_gpu(sizes, pristine=()):
    """A model of groups of such weights by their part, with pristine copies of an earlier engine.

    It has 100 logits and a width of 8, in bfloat16.
    """
    groups = {
        f"{part}-{i}": SimpleNamespace(
            spec=SimpleNamespace(part=part), weights=(torch.zeros(size, dtype=torch.bfloat16),)
        )
        for part, numbers in sizes.items()
        for i, size in enumerate(numbers)
    }
    merged = [SimpleNamespace(pristine=torch.zeros(size)) for size in pristine]
    return SimpleNamespace(
        dtype=torch.bfloat16, device=torch.device("cuda", 0), vocabulary=100, width=8,
        linears=SimpleNamespace(groups=groups, merged=merged),
    )  # fmt: skip


@pytest.mark.parametrize("mergeable", [False, True])
def test_a_gpu_without_room_is_refused(monkeypatch, mergeable):
    """With what helps; a policy that merges nothing only where a copy takes the room."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900 << 20, 4000 << 20))
    lmm, page = model_on_a_gpu({"text": [1 << 20] * 3}), PageShape(4, 1, 1, 8)
    settings = EngineSettings(memory=0.75, max_tokens=16)
    with pytest.raises(ServeError) as found:
        sizing.pages_that_fit(settings, lmm, page, mergeable=mergeable)
    told = str(found.value)
    assert told.startswith("the GPU has 900 MiB free, too little beside the model")
    assert ("(6 MiB)" in told) == ("policy=unmerge_only" in told) == mergeable
    assert "raise memory=0.75, " in told
    assert "lower max_tokens=16, or use a smaller base model" in told


@pytest.mark.parametrize(
    ("mergeable", "pristine", "copies"),
    [(False, (), 0), (True, (), 5700), (True, (400,), 5300), (True, (400, 300, 5000), 0)],
)
def test_pages_take_what_the_gpu_has_left(monkeypatch, mergeable, pristine, copies):
    """What torch has kept of loading is let go first, and each weight is copied once at most."""
    taken = {"model": 600_000, "kept by torch": 200_000}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: taken.pop("kept by torch"))
    total = 2_000_000_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - sum(taken.values()), total))
    lmm = model_on_a_gpu({"text": [400, 300], "vision": [5000]}, pristine)
    settings = EngineSettings(memory=0.75, max_tokens=16, max_requests=9)
    page = PageShape(4, layers=1, kv_heads=1, head_dim=8)
    step = 16 * 8 * 64 + 9 * 100 * 32
    left = total * 0.75 - 600_000 - 2 * copies - step - 2**30
    found = sizing.pages_that_fit(settings, lmm, page, mergeable=mergeable)
    assert found == int(left // (2 * page.elements))


@pytest.mark.parametrize(
    ("device", "variable", "cores", "before", "after"),
    [
        ("cuda", "", 64, 64, 6), ("cuda", "", 64, 4, 4), ("cuda", "", 2, 64, 2),
        ("cuda", "12", 2, 12, 12), ("cpu", "", 64, 64, 63), ("cpu", "", 8, 64, 7),
        ("cpu", "", 8, 4, 4), ("cpu", "", 1, 4, 1), ("cpu", "3", 1, 3, 3),
    ],
)  # fmt: skip
def test_threads_on_the_host(monkeypatch, device, variable, cores, before, after):
    """Few beside a GPU, all cores but one of a CPU; the variable decides if it is set."""
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    monkeypatch.setattr(sizing, "usable_cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    sizing.limit_host_threads(torch.device(device))
    assert threads == [after]


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    two = EngineSettings(tensor_parallel=2, device="cuda")
    assert [str(sizing.find_device(two, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    for device, size, said in (
        ("cuda", 3, "3 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("auto", 4, "4 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("cuda:1", 2, "2 GPUs are asked for, and this machine has 1 from cuda:1 on: ask for"),
    ):
        with pytest.raises(SettingsError, match=said):
            sizing.find_device(EngineSettings(tensor_parallel=size, device=device), 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SettingsError, match="this machine has none"):
        sizing.find_device(EngineSettings(tensor_parallel=2), 0)
    assert sizing.find_device(EngineSettings(tensor_parallel=2, device="cpu"), 1).type == "cpu"


@pytest.mark.slow
def test_a_worker_ends_with_rank_0():
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-m", workers.__name__, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.close()
        assert worker.wait(60) == 1
