"""What the end-to-end tests of the factory share."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def gate_here():
    """Let the export gate check bundles in this process: another one takes seconds to import torch.

    `test_factory.py`, `test_interrupted.py` and others run it as users do.
    """
    from valora_train.stages import export, gate

    def check(command, **_):
        assert command[:3] == [sys.executable, "-m", gate.__name__]
        said, failed = io.StringIO(), io.StringIO()
        with redirect_stdout(said), redirect_stderr(failed):
            status = gate.main(command[3:])
        return subprocess.CompletedProcess(command, status, said.getvalue(), failed.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "subprocess", SimpleNamespace(run=check))
        yield
