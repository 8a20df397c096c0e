"""What ranks agree on before they compute: their devices, and when to end."""

import multiprocessing
import subprocess
import sys

import pytest

from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.workers import Workers, device_of
from valora_serve.errors import SettingsError


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    two = EngineSettings(tensor_parallel=2, device="cuda")
    assert [str(device_of(two, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    for device, size, said in (
        ("cuda", 3, "3 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("auto", 4, "4 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("cuda:1", 2, "2 GPUs are asked for, and this machine has 1 from cuda:1 on: ask for"),
    ):
        with pytest.raises(SettingsError, match=said):
            device_of(EngineSettings(tensor_parallel=size, device=device), 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SettingsError, match="this machine has none"):
        device_of(EngineSettings(tensor_parallel=2), 0)
    assert device_of(EngineSettings(tensor_parallel=2, device="cpu"), 1).type == "cpu"


@pytest.mark.slow
def test_a_worker_ends_with_rank_0():
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-m", Workers.module, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.close()
        assert worker.wait(60) == 1
