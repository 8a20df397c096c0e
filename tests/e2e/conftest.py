"""What the end-to-end tests of the factory share."""

from types import SimpleNamespace

import pytest
from PIL import Image

from tests.support import forked
from tests.support.lmm_checkpoints import save_llava

BLANK = Image.new("RGB", (8, 8))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A tiny random LLaVA that several tests fuse on."""
    return save_llava(tmp_path_factory.mktemp("llava"), seed=3)


@pytest.fixture(scope="module")
def gate_here():
    """Let the export gate check bundles in this process: another one takes seconds to import torch.

    `test_factory.py`, `test_interrupted.py` and others run it as users do. Figures stay blank.
    """
    from matplotlib.figure import Figure

    from valora_train.metrics import speed
    from valora_train.stages import export

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "subprocess", SimpleNamespace(run=forked.gate_here))
        patch.setattr(speed, "ROUNDS", 1)  # what is measured for reports is not looked at
        patch.setattr(Figure, "savefig", lambda _, file, **__: BLANK.save(file, "PNG"))
        yield
