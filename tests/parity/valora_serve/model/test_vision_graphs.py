"""Images through captured encoders: as without, together across requests, and only once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_reference import (
    Reference,
    add_requests,
    ask,
    check_answers,
    finish,
    make_engine,
    noise,
    run,
)
from tests.support.lmm_checkpoints import save_llava, save_qwen2_5_vl
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, make_adapter
from valora_serve.engine.engine import Engine
from valora_serve.model.preparation import VISION, Preparation
from valora_serve.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=3))


def about(number: int, images: int, model: str | None = None, *, first: int = 0) -> Request:
    return Request(
        f"{number}-{first}",
        model=model,
        messages=ask(f"What is it {number}?", images=images),
        images=[noise(30, 40, first + 10 * number + i) for i in range(images)],
        sampling=SamplingParams(max_tokens=3),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Numbers of images that encoders were called with: by the runner, and without a graph."""
    from valora_serve.model.lmm import Lmm
    from valora_serve.model.runner import ModelRunner

    found: dict[str, list[int]] = {"all": [], "eager": []}
    for name, owner in (("all", ModelRunner), ("eager", Lmm)):
        encode = owner.encode

        def noted(self: Any, visuals: Any, *rest: Any, _of: Any = encode, _to: str = name) -> Any:
            found[_to].append(len(visuals))
            return _of(self, visuals, *rest)

        monkeypatch.setattr(owner, "encode", noted)
    return found


def captured(base: str, adapters: dict[str, Path] | None = None, **options: Any) -> Engine:
    given = {"prompt_graphs": True, "capture": "eager", "policy": "slora"} | options
    engine = make_engine(base, adapters, **given)
    engine.warm_up()
    return engine


def test_images_of_several_requests_in_one_graph(base: str, calls: dict[str, list[int]]) -> None:
    engine = captured(base)
    requests = [about(1, 1), about(2, 2), about(3, 0), about(4, 2)]
    check_answers(run(engine, requests), Reference(base, {}), *requests)
    assert calls == {"all": [5], "eager": []}


def test_more_images_than_the_largest_graph(base: str, calls: dict[str, list[int]]) -> None:
    engine = captured(base, max_tokens=1024, chunk=1024)
    for size in (8, 16):
        engine.runner.give_up(Preparation(VISION, size, 0))
    requests = [about(number, 3) for number in range(3)]
    check_answers(run(engine, requests), Reference(base, {}), *requests)
    assert calls == {"all": [9], "eager": []}


def test_cached_images_skip_the_encoder(base: str, calls: dict[str, list[int]]) -> None:
    engine = captured(base, prefix_cache=False)
    first, again = about(1, 2), about(1, 2)
    run(engine, [first])
    found = run(engine, [again])
    check_answers(found, Reference(base, {}), again)
    assert calls["all"] == [2]


def test_adapters_of_the_tower_go_without_a_graph(
    base: str, tmp_path: Path, calls: dict[str, list[int]]
) -> None:
    kinds = {"tower": EVERYTHING, "language": LANGUAGE}
    adapters = {
        name: make_adapter(
            tmp_path / name, base, seed=seed, rank=4, alpha=6, targets=targets, strength=0.25
        )
        for seed, (name, targets) in enumerate(kinds.items())
    }
    engine = captured(base, adapters)
    requests = [about(1, 1, "language"), about(2, 1)]
    check_answers(run(engine, requests), Reference(base, adapters), *requests)
    assert calls["eager"] == []
    run(engine, [about(5, 0, "tower")])  # so that both are resident
    mixed = [about(3, 1, "tower"), about(4, 1, "language")]
    check_answers(run(engine, mixed), Reference(base, adapters), *mixed)
    assert calls["eager"] == [2]


def test_an_image_that_is_encoded_later_changes_no_cached_one(base: str) -> None:
    """Graphs overwrite their results; what the cache holds are copies."""
    engine = captured(base, prefix_cache=False)
    run(engine, [about(1, 1)])
    (kept,) = engine.images._kept.values()
    before = kept.embeddings.clone()
    run(engine, [about(2, 1)])
    assert torch.equal(kept.embeddings, before)


def test_no_graph_before_it_is_captured(base: str, calls: dict[str, list[int]]) -> None:
    engine = make_engine(base, prompt_graphs=True)
    add_requests(engine, about(1, 1))
    finish(engine)
    assert calls["eager"] == [1]


def test_images_of_any_size_have_none(tmp_path: Path, calls: dict[str, list[int]]) -> None:
    base = str(save_qwen2_5_vl(tmp_path / "qwen"))
    engine = captured(base)
    check_answers(run(engine, [about(1, 1)]), Reference(base, {}), about(1, 1))
    assert calls["eager"] == [1]


def test_an_encoder_that_waits_for_the_host_runs_without(
    base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(base, prompt_graphs=True, capture="eager")
    features = type(engine.lmm.architecture).visual_features

    def fails(self: Any, model: Any, inputs: Any) -> Any:
        if not inputs["pixel_values"].any():  # a capture's
            raise RuntimeError("operation not permitted when stream is capturing")
        return features(self, model, inputs)

    monkeypatch.setattr(type(engine.lmm.architecture), "visual_features", fails)
    engine.warm_up()
    assert "runs without CUDA graphs" in caplog.text
    check_answers(run(engine, [about(1, 1)]), Reference(base, {}), about(1, 1))
