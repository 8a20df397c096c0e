"""Captured vision encoders on a GPU: as without a graph, and without waiting for the device."""

from types import SimpleNamespace

import pytest
import torch

from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.serve_models import PROCESSOR, llava_7b, qwen_7b
from valora_kernels.metadata import NONE
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.lmm import Lmm

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
"""Relative Frobenius error: batches of other sizes take other kernels, in bf16."""


class Bench:
    """What `Pictures` reads of a bench."""

    base = "llava-7b"

    def __init__(self, lmm):
        self.lmm = lmm


def make_engine(lmm):
    """An engine with all graphs; its few pages leave room for those of other tests."""
    settings = EngineSettings(profile=False, pages=64, max_requests=8, max_tokens=1024,
                              capture="eager", policy="slora")  # fmt: skip
    engine = Engine(settings, lmm)
    engine.warm_up()
    return engine


def error(found, expected):
    """Relative Frobenius error."""
    wanted = expected.embeddings.float()
    return float((found.embeddings.float() - wanted).norm() / wanted.norm())


def check_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < TOLERANCE


@pytest.fixture(scope="module")
def squares():
    """An engine whose images all have one shape."""
    model = llava_7b("cuda", layers=2, width=512)
    engine = make_engine(Lmm("llava-7b", model, PROCESSOR, torch.device("cuda", 0)))
    yield engine
    engine.close()


@pytest.mark.parametrize("count", [1, 3, 16, 19])
def test_encoded_images(squares, count):
    parts = Pictures(Bench(squares.lmm), count).parts
    visuals = [SimpleNamespace(kind="image", tensors=part.tensors) for part in parts]
    with torch.inference_mode():
        captured = squares.runner._vision_graphs.encode(visuals)
        plain = squares.lmm.encode(visuals)
    assert captured is not None
    check_close(captured, plain)
    assert squares.runner.encode(visuals, [NONE] * count)[0].embeddings.shape == (576, 512)


def test_images_of_any_size():
    """Qwen2.5-VL's tower in windows rounds no more than transformers'; also a video."""
    device = torch.device("cuda", 0)
    lmm = Lmm("qwen", qwen_7b("cuda", layers=2, width=512), PROCESSOR, device)
    exact = Lmm("qwen", qwen_7b("cuda", layers=2, width=512).float(), PROCESSOR, device)
    engine = make_engine(lmm)
    generator = torch.Generator().manual_seed(1)

    def made(times, rows, columns, kind):
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        pixels = torch.randn(times * rows * columns, 1176, generator=generator)
        tensors = {name: pixels, f"{kind}_grid_thw": torch.tensor([[times, rows, columns]])}
        return SimpleNamespace(kind=kind, tensors=tensors)

    most = made(1, 64, 128, "image")  # as many windows as the largest graph has
    for group in (
        [made(1, 34, 46, "image")],
        [made(1, 16, 16, "image"), made(1, 34, 46, "image"), most],
        [made(3, 24, 32, "video")],
    ):
        with torch.inference_mode():
            captured = engine.runner._vision_graphs.encode(group)
            plain, wanted = lmm.encode(group), exact.encode(group)
        assert captured is not None
        # Through 32 layers in bf16, the two differ by the rounding of other attention kernels.
        for one, other, true in zip(captured, plain, wanted, strict=True):
            assert error(one, true) < 1.25 * error(other, true)
    larger = [most, made(1, 72, 128, "image")]
    assert engine.runner._vision_graphs.encode(larger) is None
    engine.close()
