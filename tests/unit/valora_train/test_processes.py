"""How many processes prepare domains side by side, and the end of one that trained with others."""

import os
import subprocess
import sys

import pytest

from valora_train import processes

PROGRAM = """
import atexit
from valora_train.model.distributed import end_process

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
atexit.register(print, "at exit")
end_process()
"""


@pytest.mark.parametrize(
    ("cores", "asked", "device", "waiting", "expected"),
    [(3, 0, "cpu", 6, 3), (3, 0, "cpu", 0, 1), (3, 0, "cuda:1", 6, 1), (3, 5, "cpu", 6, 5),
     (3, 5, "cpu", 4, 4), (64, 0, "cpu", 37, 4)],
)  # fmt: skip
def test_one_for_each_core_and_none_without_work(
    cores, asked, device, waiting, expected, monkeypatch
):
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    assert processes.preparing_processes(asked, device, waiting) == expected


@pytest.mark.slow
def test_the_interpreter_is_not_taken_down_where_others_train_too():
    """A thread of gloo that wants the lock of an interpreter that ends aborts the process."""
    environment = {**os.environ, "WORLD_SIZE": "2"}
    said = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True)
    assert said == "at exit\n"
