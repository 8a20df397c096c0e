"""What all tests share: no network, a tiny random LLaVA, seeds, poisoned memory, a GPU gate."""

import gc
import os
from collections.abc import Callable, Iterator
from itertools import count

gc.disable()  # until all is imported (`_small_garbage`)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("YOLO_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # processes that tests start share the cores, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.helpers import save_random_llava
from tests.support.random_tests import load_profile

load_profile()

# pytest adds handlers to loggers that do not propagate; as soon as this one has any, torch tells it
# all about compilation, and failures would be lost in thousands of lines.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="session", autouse=True)
def _small_garbage() -> Iterator[None]:
    # The libraries' millions of objects stay: to look through them for garbage took a tenth of the
    # time of the server's tests.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    yield
    gc.unfreeze()  # else extensions report leaks at exit


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    # One thread in each of several processes (make test-fast); threads that spin on the others'
    # cores would slow all of them down.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="session", autouse=True)
def _measured_for_this_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    for what in ("COST", "TILING"):  # also by servers that tests start: else in the user's cache
        os.environ[f"VALORA_{what}_FOLDER"] = str(tmp_path_factory.getbasetemp() / "measured")


# That of the CPU alone is cheaper: torch.manual_seed keeps a traceback for each absent device.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start each test, and its fixtures, with the same random numbers."""
    # torch.empty gives NaN, so that a value that nobody wrote fails loudly.
    torch.utils.deterministic.fill_uninitialized_memory = True
    random.seed(0)
    np.random.seed(0)
    _seed(0)


@pytest.fixture(autouse=True)
def _no_store_of_an_earlier_test() -> Iterator[None]:
    yield
    if "mlflow" in sys.modules:  # a run sets its store for the whole process
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For many tiny steps: threads that wait for each other cost more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the factory, whose files take longest; without a GPU skip what needs one."""
    items.sort(key=lambda item: "valora_train" not in item.nodeid)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords also name the checkout's folder
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], str]:
    """Install a module of another author, with an entry point, for one test.

    `installed(group, name, source)` writes `source` into a module of its own, registers its
    attribute `extension` as `name` in the entry-point group, and returns the module's name.
    """
    number = count()

    def install(group: str, name: str, source: str) -> str:
        module = f"outside_{tmp_path.name.replace('-', '_')}_{next(number)}"
        (tmp_path / f"{module}.py").write_text(source)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:extension\n")
        monkeypatch.syspath_prepend(tmp_path)
        return module

    return install


@pytest.fixture(scope="session")
def random_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LLaVA of the true architecture, tiny and with random weights."""
    return save_random_llava(tmp_path_factory.mktemp("llava"), seed=0)
