"""The end of a process that trained with others."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_the_interpreter_is_not_taken_down_where_others_train_too():
    """A thread of gloo that wants the lock of an interpreter that ends aborts the process."""
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "at exit\n"
