"""``python -m MODULE`` in processes forked from one that has imported what takes seconds.

Where whole processes matter (signals, exit status, what is said), and their start does not.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection
from multiprocessing.process import current_process
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from valora_serve.engine import launch
from valora_train.metrics import speed

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    *(() if torch.cuda.is_available() else ("peft",)),  # bitsandbytes asks CUDA as it is imported
    "IPython", "datasets.arrow_writer", "git", "sklearn.linear_model",
    "mlflow.store.tracking.sqlalchemy_store", "torchmetrics.functional.classification",
    "transformers.models.auto.modeling_auto", "transformers.models.llava.modeling_llava",
    "valora_serve.server.app", "valora_serve.server.loading.startup",
    "valora_teachers.small_network", "valora_train.pipeline", "valora_train.tasks.registry",
])  # fmt: skip


def gate_here(command, **_):
    """What `subprocess.run` gives of the export gate, which checks in this process."""
    from valora_train.stages import gate

    assert command[:3] == [sys.executable, "-m", gate.__name__]
    said, failed = StringIO(), StringIO()
    with redirect_stdout(said), redirect_stderr(failed):
        status = gate.main(command[3:])
    return subprocess.CompletedProcess(command, status, said.getvalue(), failed.getvalue())


def _run(module, arguments, cwd, log, environment, gate):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv[1:] = arguments
    current_process()._config["daemon"] = False  # may have processes of its own
    if "OMP_NUM_THREADS" in environment:  # which torch read where it was imported
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    launch.subprocess = LAUNCHED
    speed.ROUNDS = 1  # what is measured for reports is not looked at
    if not gate:
        from valora_train.stages import export

        export.subprocess = SimpleNamespace(run=gate_here)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # as an interpreter ends; a process of multiprocessing leaves the second out
        threading._shutdown()
        atexit._run_exitfuncs()


class Forked:
    """Much like a `subprocess.Popen` whose output goes into a file.

    Args:
        gate: Whether the export gate is a process as it is for users, which takes it 10 seconds.
    """

    def __init__(self, module, arguments, cwd, log=None, env=os.environ, gate=False):
        self.log = Path(log or Path(cwd) / "said.txt")
        self._start(_run, module, [*map(str, arguments)], str(cwd), str(self.log), dict(env), gate)

    def _start(self, target, *given):
        self._process = FORKS.Process(target=target, args=given, daemon=True)
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.log, timeout)
        return self.poll()

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.log.read_text(), None

    def send_signal(self, how):
        with suppress(ProcessLookupError):  # as Popen: it may just have ended
            os.kill(self.pid, how)


class ForkedModule(Forked):
    """What `subprocess.Popen` gives of a process that `launch` starts."""

    log = None

    def __init__(self, command, *, pass_fds, **_):
        assert command[:2] == [sys.executable, "-m"]
        self._start(_module, command[2], *(Connection(os.dup(one)) for one in pass_fds))


def _module(name, *pipes):
    importlib.import_module(name).main([str(pipe.fileno()) for pipe in pipes])


LAUNCHED = SimpleNamespace(Popen=ForkedModule, DEVNULL=subprocess.DEVNULL)


@contextmanager
def forked_workers():
    """Fork the workers of tensor-parallel groups, which take seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", LAUNCHED)
        yield


def finish(process, seconds=300):
    """What a process says, which must end well."""
    said = process.communicate(timeout=seconds)[0]
    assert process.returncode == 0, said
    return said
