"""Encoding: images of any size, features kept or not."""

import pytest
import torch

from tests.support.training_lmm import disturb, load, questions
from valora_data.errors import DataError
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings


def test_features_may_be_kept_or_not(family, checkpoint):
    said = []
    for keep in (True, False):
        lmm = Lmm(ModelSettings(id=str(checkpoint), keep_features=keep), LoraSettings(rank=4))
        batch = lmm.encode(questions(family))
        kept = keep and lmm.takes_images
        assert all((item.features is not None) == kept for item in batch)
        with torch.no_grad():
            alone = torch.cat([lmm.states([item]).head_inputs().last for item in batch])
            together = lmm.states(batch).head_inputs().last
        torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-3)
        said.append(lmm.write(batch, 6))
    assert said[0] == said[1]


def test_a_video_without_frames_is_refused(random_llava):
    with pytest.raises(DataError, match="a video no frames"):
        load(random_llava).encode([Example("what?", (), video=True)])


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_what_an_adapted_projector_reads_may_be_kept(dtype, close, random_llava, images):
    results = []
    for keep in (True, False):
        lora = LoraSettings(rank=4, projector=True)
        lmm = Lmm(ModelSettings(id=str(random_llava), keep_features=keep, dtype=dtype), lora)
        lmm.adapters.add("one", seed=1)
        disturb(lmm, "one")
        batch = lmm.encode([Example("a", (image,)) for image in images], whole=False)
        assert (batch[0].features is not None) == keep
        with lmm.precision():
            lmm.states(batch).hidden.square().sum().backward()
        weights = lmm.adapters.parameters("one")
        results.append({name: weight.grad for name, weight in weights.items()})
    assert any("multi_modal_projector" in name for name in results[0])
    for kept, made in zip(*(one.values() for one in results), strict=True):
        assert (kept - made).norm() <= close * made.norm()
