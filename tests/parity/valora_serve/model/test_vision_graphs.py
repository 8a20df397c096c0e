"""Images through captured encoders: as without, together across requests, and only once."""

from types import SimpleNamespace

import pytest
import torch

from tests.parity.valora_serve.engine.test_engine import Forced
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
from tests.support.lmm_checkpoints import save_llava, save_qwen2_5_vl, save_qwen2_vl
from tests.support.serve_helpers import EVERYTHING, LANGUAGE, make_adapters
from valora_data.contract.base_model import load_model
from valora_data.models.qwen_vl import WindowEncoder
from valora_kernels.metadata import NONE
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=3))


def about(number, images, model=None, *, first=0):
    return Request(
        f"{number}-{first}",
        model=model,
        messages=ask(f"What is it {number}?", images=images),
        images=[noise(30, 40, first + 10 * number + i) for i in range(images)],
        sampling=SamplingParams(max_tokens=3),
    )


@pytest.fixture
def calls(monkeypatch):
    """Numbers of images that encoders were called with: by the runner, and without a graph."""
    from valora_serve.model.lmm import Lmm
    from valora_serve.model.runner import ModelRunner

    found = {"all": [], "eager": []}
    for name, owner in (("all", ModelRunner), ("eager", Lmm)):
        encode = owner.encode

        def noted(self, visuals, *rest, _of=encode, _to=name):
            found[_to].append(len(visuals))
            return _of(self, visuals, *rest)

        monkeypatch.setattr(owner, "encode", noted)
    return found


def captured(base, adapters=None, **options):
    given = {"prompt_graphs": True, "capture": "eager", "policy": "slora"} | options
    engine = make_engine(base, adapters, **given)
    engine.warm_up()
    return engine


@pytest.mark.parametrize(
    ("counts", "images"),
    [((1, 2, 4, 8, 16), [1, 2, 0, 2]), ((1, 2, 4), [3, 3, 3])],  # more than the largest graph has
)
def test_images_of_several_requests(base, calls, monkeypatch, counts, images):
    monkeypatch.setattr("valora_serve.engine.sizing.IMAGE_COUNTS", counts)
    engine = captured(base, max_tokens=1024, chunk=1024)
    requests = [about(number, count) for number, count in enumerate(images)]
    check_answers(run(engine, requests), Reference(base, {}), *requests)
    assert calls == {"all": [sum(images)], "eager": []}


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    kinds = {"tower": (0, 4, 6, EVERYTHING), "language": (1, 4, 6, LANGUAGE)}
    return make_adapters(tmp_path_factory.mktemp("adapters"), base, 0.25, **kinds)


@pytest.mark.parametrize(
    ("merged", "models", "eager"),
    [
        (None, ["language", None], []),
        (None, ["tower", "language"], [2]),
        ("language", ["language", None], []),
        ("language", ["tower", "language"], [2]),
        ("tower", ["tower", "tower"], []),
        ("tower", ["tower", None, "language"], [3]),
        ("tower", [None], [1]),
    ],
)
def test_only_lora_terms_of_the_tower_go_without_a_graph(
    base, adapters, calls, merged, models, eager
):
    """A merged adapter needs none for its own images; beside it, others have pristine weights."""
    engine = captured(base, adapters, policy="valora")
    keys = {key.partition("#")[0]: key for key in engine.registry.ranks}
    for key in keys.values():
        assert engine.adapters.load(key)
    mode = Mode.MIXTURE if merged else Mode.UNMERGED
    engine.policy = Forced(lambda _: (mode, keys.get(merged)), engine)
    requests = [about(number, 1, model) for number, model in enumerate(models)]
    check_answers(run(engine, requests), Reference(base, adapters), *requests)
    assert calls["eager"] == eager
    assert engine.merge_state.adapter == keys.get(merged)


def test_an_image_that_is_encoded_later_changes_no_cached_one(base):
    """Graphs overwrite their results; what the cache holds are copies."""
    engine = captured(base, prefix_cache=False)
    run(engine, [about(1, 1)])
    (kept,) = engine.images._kept.values()
    before = kept.embeddings.clone()
    run(engine, [about(2, 1)])
    assert torch.equal(kept.embeddings, before)


def test_no_graph_before_it_is_captured(base, calls):
    engine = make_engine(base, prompt_graphs=True)
    add_requests(engine, about(1, 1))
    finish(engine)
    assert calls["eager"] == [1]


def test_encoders_that_split_patches_on_the_host_have_none(tmp_path, calls):
    base = str(save_qwen2_vl(tmp_path / "qwen"))
    engine = captured(base)
    check_answers(run(engine, [about(1, 1)]), Reference(base, {}), about(1, 1))
    assert calls["eager"] == [1]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return str(save_qwen2_5_vl(tmp_path_factory.mktemp("windows") / "qwen", seed=3))


@pytest.mark.parametrize("spare", [0, 3])
def test_windows_of_one_size_are_those_of_transformers(windowed, spare):
    """Also where windows at the edges are smaller, and where there is room for more of them."""
    model, _ = load_model(windowed, torch.float32)
    encoder = WindowEncoder(model.model.visual)
    for grid in ((2, 2), (4, 4), (6, 10), (10, 6), (8, 8), (10, 14)):
        made = encoder.arrange(*grid)
        assert made.windows == encoder.windows(*grid)
        slots = (made.windows + spare) * encoder.slots
        patches = torch.randn(grid[0] * grid[1], encoder.columns)
        pixels = torch.zeros(slots, encoder.columns)
        places = torch.zeros(slots, 2, dtype=torch.int64)
        present = torch.zeros(slots, dtype=torch.bool)
        where = torch.from_numpy(made.slots)
        pixels[where], places[where], present[where] = patches, torch.from_numpy(made.places), True
        with torch.inference_mode():
            found = encoder.encode(pixels, places, present)
            whole = model.model.get_image_features(patches, torch.tensor([[1, *grid]]))
        own, expected = found[torch.from_numpy(made.tokens)], whole.pooler_output[0]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def of_size(name, *sizes, frames=0):
    """A question about images of some sizes, or about a video."""
    pictures = [noise(*size, seed=len(name) + i) for i, size in enumerate(sizes)]
    return Request(
        name,
        messages=ask(f"What is {name}?", images=0 if frames else len(sizes), videos=bool(frames)),
        images=[] if frames else pictures,
        videos=[[noise(*sizes[0], seed=i) for i in range(frames)]] if frames else [],
        sampling=SamplingParams(max_tokens=3),
    )


def test_images_of_any_size_replay_graphs_of_windows(windowed, calls):
    engine = captured(windowed, max_tokens=1024, chunk=1024)
    requests = [
        of_size("small", (16, 16)), of_size("both", (60, 33), (20, 90)), of_size("large", (90, 90)),
        of_size("moving", (40, 30), frames=4),
    ]  # fmt: skip
    check_answers(run(engine, requests), Reference(windowed, {}), *requests)
    assert calls["eager"] == []
    assert len(calls["all"]) >= 1
    again = of_size("small", (16, 16))  # after larger ones, in the same buffers
    engine.images._kept.clear()
    check_answers(run(engine, [again]), Reference(windowed, {}), again)
    assert calls["eager"] == []


def test_an_image_larger_than_all_graphs_goes_without(windowed, calls, monkeypatch):
    monkeypatch.setattr("valora_serve.model.graphs.WINDOWS", (1,))
    engine = captured(windowed, max_tokens=1024, chunk=1024)
    large = of_size("large", (90, 90))
    check_answers(run(engine, [large]), Reference(windowed, {}), large)
    assert calls["eager"] == [1]


def test_a_broken_image_leaves_nothing_behind(windowed):
    """NaN in the buffers would spread: a masked value is still multiplied by zero."""
    engine = captured(windowed)
    encoder = engine.lmm.architecture.window_encoder(engine.lmm.model)

    def image(patches, rows, columns):
        tensors = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}
        return SimpleNamespace(kind="image", tensors=tensors)

    good = image(torch.randn(4 * 4, encoder.columns), 4, 4)
    broken = image(torch.full((8 * 8, encoder.columns), torch.nan), 8, 8)
    (before,) = engine.runner.encode([good], [NONE], NONE)
    _, after = engine.runner.encode([broken, good], [NONE, NONE], NONE)
    assert torch.equal(before.embeddings, after.embeddings)


def test_an_encoder_that_waits_for_the_host_runs_without(base, monkeypatch, caplog):
    engine = make_engine(base, prompt_graphs=True, capture="eager")
    features = type(engine.lmm.architecture).visual_features

    def fails(self, model, inputs):
        if not inputs["pixel_values"].any():  # a capture's
            raise RuntimeError("operation not permitted when stream is capturing")
        return features(self, model, inputs)

    monkeypatch.setattr(type(engine.lmm.architecture), "visual_features", fails)
    engine.warm_up()
    assert "runs without CUDA graphs" in caplog.text
    check_answers(run(engine, [about(1, 1)]), Reference(base, {}), about(1, 1))
