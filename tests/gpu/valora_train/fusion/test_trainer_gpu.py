"""What is restored on a GPU goes on there: after a rollback, and from a file."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.colour_trainer import make, same, train

absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytestmark = [pytest.mark.gpu, absent]


@pytest.mark.parametrize("vision", [False, True])
def test_training_goes_on_after_a_rollback(random_llava, vision):
    trainer, _ = make(random_llava, vision=vision, device="cuda")
    trainer.open("adapter-1", seed=3)
    train(trainer, "apple")
    before = trainer.snapshot("adapter-1")
    first = train(trainer, "sky", held=["apple"], rehearse=True)
    trainer.restore("adapter-1", before)
    assert same(trainer.snapshot("adapter-1"), before)
    again = train(trainer, "sky", held=["apple"], rehearse=True)
    assert again == pytest.approx(first, rel=1e-3)


def test_training_goes_on_from_a_file(random_llava, tmp_path):
    trainer, _ = make(random_llava, device="cuda")
    trainer.open("adapter-1", seed=3)
    train(trainer, "apple")
    save_file(trainer.snapshot("adapter-1"), tmp_path / "a.safetensors")
    other, _ = make(random_llava, device="cuda")
    other.restore("adapter-1", load_file(tmp_path / "a.safetensors"))
    assert train(other, "sky", held=["apple"], rehearse=True)
