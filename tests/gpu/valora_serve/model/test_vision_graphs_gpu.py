"""Captured vision encoders on a GPU: as without a graph, and without waiting for the device."""

from types import SimpleNamespace
from typing import Any

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

    def __init__(self, lmm: Lmm) -> None:
        self.lmm = lmm


@pytest.mark.parametrize("count", [1, 3, 16, 19])
def test_encoded_images(count: int) -> None:
    model = llava_7b("cuda", layers=2, width=512)
    lmm = Lmm("llava-7b", model, PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(profile=False, memory=0.3, max_requests=8, max_tokens=1024,
                              capture="eager", policy="slora")  # fmt: skip
    engine = Engine(settings, lmm)
    engine.warm_up()
    pictures = Pictures(Bench(lmm), count)

    class Found:
        """A picture as the runner takes it."""

        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.kind, self.tensors = "image", tensors

    visuals = [Found(part.tensors) for part in pictures.parts]
    with torch.inference_mode():
        captured = engine.runner._vision_graphs.encode(visuals)
    assert captured is not None
    assert engine.runner.encode(visuals, [NONE] * count)[0].embeddings.shape == (576, 512)
    with torch.inference_mode():
        plain = lmm.encode(visuals)
    for one, other in zip(captured, plain, strict=True):
        error = (one.embeddings.float() - other.embeddings.float()).norm()
        assert error / other.embeddings.float().norm() < TOLERANCE
    engine.close()


def test_images_of_any_size() -> None:
    """Qwen2.5-VL's tower in windows of one size; also with a batch of sizes, and a video."""
    lmm = Lmm("qwen", qwen_7b("cuda", layers=2, width=512), PROCESSOR, torch.device("cuda", 0))
    settings = EngineSettings(profile=False, memory=0.5, max_requests=8, max_tokens=1024,
                              capture="eager", policy="slora")  # fmt: skip
    engine = Engine(settings, lmm)
    engine.warm_up()
    generator = torch.Generator().manual_seed(1)

    def made(times: int, rows: int, columns: int, kind: str) -> Any:
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        pixels = torch.randn(times * rows * columns, 1176, generator=generator)
        tensors = {name: pixels, f"{kind}_grid_thw": torch.tensor([[times, rows, columns]])}
        return SimpleNamespace(kind=kind, tensors=tensors)

    for group in (
        [made(1, 34, 46, "image")],
        [made(1, 16, 16, "image"), made(1, 34, 46, "image"), made(1, 72, 128, "image")],
        [made(3, 24, 32, "video")],
    ):
        with torch.inference_mode():
            captured = engine.runner._vision_graphs.encode(group)
            plain = lmm.encode(group)
        assert captured is not None
        for one, other in zip(captured, plain, strict=True):
            error = (one.embeddings.float() - other.embeddings.float()).norm()
            assert error / other.embeddings.float().norm() < TOLERANCE
    engine.close()
