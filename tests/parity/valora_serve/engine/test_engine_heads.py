"""Heads in the engine's batches, beside generation: against training's own, and by hand."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import ImageDraw
from safetensors.torch import load_file
from torch.nn import functional as F

from tests.support.engine_reference import Reference, ask, check_answers, make_engine, noise, run
from tests.support.serve_helpers import DomainSpec, hidden_width, make_bundle
from valora_data.contract.boxes import BoxHead
from valora_data.contract.heads import read_head
from valora_data.contract.results import BoxesResult, LabelResult
from valora_data.schema import Box
from valora_serve.types import Finish, Request, SamplingParams
from valora_train.settings import HeadSettings
from valora_train.tasks.detection import BoxHeadModule

LEAST = 0.05  # confidence from which boxes are compared
DOMAINS = {
    "plates": DomainSpec("adapter-1", labels=["plate"], prompt="Find plates."),
    "traffic": DomainSpec("adapter-2", labels=["car", "bus", "bike"], prompt="Find the traffic."),
    "signs": DomainSpec(None, labels=["stop", "yield"], prompt="Find the signs."),
}
OTHERS = {
    "scene": DomainSpec("adapter-2", "classification", ["forest", "street", "beach"]),
    "crowd": DomainSpec(
        "adapter-1", "counting", [*map(str, range(11))], "visual_mean", "How?", 1.7
    ),
    "sure": DomainSpec("adapter-2", "yes_no", ["no", "yes"], "attention", "Is it?", 0.6),
    "move": DomainSpec("adapter-1", "action", ["sit", "run", "fall", "jump"], prompt="What now?"),
    "place": DomainSpec("adapter-1", "classification", ["here", "there"], "grid", "Where?"),
    "caption": DomainSpec("adapter-2", None, [], prompt="Describe the image."),
    "sky": DomainSpec(None, "classification", ["clear", "grey", "dark"], "grid", "Which sky?"),
    "note": DomainSpec(None, None, [], prompt="Take a note."),
}


@pytest.fixture(scope="module")
def detection(tmp_path_factory):
    """Domains that a box head answers, on two adapters and on none."""
    folder = tmp_path_factory.mktemp("bundles") / "detection"
    return make_bundle(folder, "tiny", name="detection", domains=DOMAINS, seed=1)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles") / "others"
    return make_bundle(folder, "tiny", name="others", domains=OTHERS, seed=2)


def picture(seed):
    """Of another size each, with something to see."""
    image = noise(60 + 17 * seed, 90 - 5 * seed, seed)
    for n, colour in enumerate(("red", "blue", "white")[: 1 + seed % 3]):
        place = (8 + 12 * n, 5 + 9 * seed % 40)
        ImageDraw.Draw(image).rectangle([*place, place[0] + 15, place[1] + 11], fill=colour)
    return image


def boxes_of(got):
    head = got.last.head
    assert (got.error, got.finish) == (None, Finish.HEAD)
    assert isinstance(head, BoxesResult) and head.logits.dtype.name == "float32"
    return [
        [Box(*one.box, label=one.label, confidence=one.confidence) for one in image]
        for image in head.detections
    ]


def assert_same(found, wanted):
    assert [box.label for box in found] == [box.label for box in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.confidence == pytest.approx(b.confidence, abs=1e-5)
        assert a.xyxy == pytest.approx(b.xyxy, abs=1e-2)  # pixels


def question_of(spec, image):
    turn = [{"type": "text", "text": spec.prompt}, {"type": "image"}]
    return Request("", spec.adapter, messages=[{"role": "user", "content": turn}], images=[image],
                   sampling=SamplingParams(max_tokens=256))  # fmt: skip


@pytest.fixture(scope="module")
def trained(detection):
    """What training's head says of PEFT's hidden states, for every domain and picture."""
    reference, found = reference_of(detection, prefix=""), {}
    for domain, spec in DOMAINS.items():
        stored = read_head(detection / "heads" / f"{domain}.safetensors", hidden_width("tiny"))
        assert isinstance(stored, BoxHead)
        head = BoxHeadModule.of(stored)
        for n in range(4):
            hidden, visual = hidden_of(reference, question_of(spec, picture(n)))
            with torch.no_grad():
                raw = head(hidden[visual][None])[0]
            found[domain, n] = head.predict(raw, picture(n).size, HeadSettings(), LEAST)
    return found


def detections():
    return {
        (name, n): Request(f"{name}-{n}", name, images=[picture(n)], min_score=LEAST)
        for n in range(4)
        for name in DOMAINS
    }


def writers(names):
    sampling, words = SamplingParams(max_tokens=12), "Tell me about it, please."
    return [
        Request(f"writer {n}", name, messages=ask(words, images=n % 2), sampling=sampling,
                images=[picture(n)] * (n % 2))
        for n, name in enumerate(names)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "unmerge_only", "overlap": True},
        {"policy": "valora", "overlap": False, "chunk": 19},
        {"policy": "cost", "overlap": True, "chunk": 40},
        {"policy": "merge_only", "overlap": True, "block_size": 32},
    ],
    ids=lambda settings: str(settings["policy"]),
)
def test_boxes_are_those_of_training(detection, trained, settings):
    engine = make_engine("tiny", **settings)
    engine.load("bundle", detection)
    asked = detections()
    beside = writers([None, "detection/adapter-2", "detection/adapter-1"])
    found = run(engine, [beside[0], *asked.values(), *beside[1:]], together=5)
    assert any(len(boxes) > 1 for boxes in trained.values())
    for key, request in asked.items():
        got = found[request.id]
        assert_same(boxes_of(got)[0], trained[key])
        assert (got.tokens, got.last.usage.completion, got.last.usage.image) == ([], 0, 64)
    check_answers(found, reference_of(detection), *beside)


def test_threshold_and_several_images(detection, trained, tmp_path):
    """Without a `min_score` the domain's threshold counts; every image has its own boxes."""
    wanted = trained["traffic", 1]
    middle = wanted[len(wanted) // 2].confidence
    manifest = json.loads((detection / "bundle.json").read_text())
    manifest["domains"]["traffic"]["threshold"] = middle
    stricter = Path(shutil.copytree(detection, tmp_path / "stricter"))
    (stricter / "bundle.json").write_text(json.dumps(manifest))
    engine = make_engine("tiny", policy="valora")
    engine.load("bundle", stricter)
    one = Request("one", model="traffic", images=[picture(1)])
    two = Request("two", model="traffic", images=[picture(1), picture(2)], min_score=LEAST)
    found = run(engine, [one, two])
    sure = [box for box in wanted if box.confidence >= middle]
    assert 0 < len(sure) < len(wanted)
    near = [box for box in boxes_of(found["one"])[0] if abs(box.confidence - middle) > 1e-5]
    assert_same(near, sure[: len(near)])
    assert len(sure) - len(near) <= 1
    first, second = boxes_of(found["two"])
    assert_same(first, wanted)  # the first image does not see the second
    assert second


def test_heads_again_from_the_prefix_cache(detection, trained):
    engine = make_engine("tiny", policy="unmerge_only", block_size=4)
    engine.load("bundle", detection)
    for round_ in range(3):
        asked = detections()
        found = run(engine, list(asked.values()))
        for key, request in asked.items():
            assert_same(boxes_of(found[request.id])[0], trained[key])
            cached = found[request.id].last.usage.cached
            assert (cached > 0) == (round_ > 0)  # words may come from the cache, visual tokens not
    assert len(engine.images._kept) == 4  # the same pictures for both adapters
    assert engine.stats().image_hits == 32


def test_other_heads_by_hand(others):
    """Logits and confidences from PEFT's hidden states and the formulas of the bundle format."""
    engine = make_engine("tiny", policy="valora", overlap=True, chunk=50)
    engine.load("bundle", others)
    reference = reference_of(others, prefix="")
    pairs = [(n, name) for n in range(2) for name in OTHERS]
    asked = [Request(f"{name} {n}", model=name, images=[picture(n)]) for n, name in pairs]
    found = run(engine, asked)
    domains = json.loads((others / "bundle.json").read_text())["domains"]
    for request in asked:
        spec, got = OTHERS[request.model], found[request.id]
        plain = question_of(spec, request.images[0])
        if spec.kind is None:
            assert got.tokens == reference(plain).tokens
            continue
        hidden, visual = hidden_of(reference, plain)
        tensors = load_file(others / domains[request.model]["head"])
        if spec.pooling == "last":
            pooled = hidden[-1]
        elif spec.pooling == "visual_mean":
            pooled = hidden[visual].mean(0)
        elif spec.pooling == "grid":  # 8 × 8 visual tokens, two by two
            cells = hidden[visual].view(8, 8, -1).permute(2, 0, 1)
            pooled = F.avg_pool2d(cells, 2).permute(1, 2, 0).flatten()
        else:
            scores = hidden[visual] @ tensors["query"] / hidden.shape[1] ** 0.5
            pooled = scores.softmax(0) @ hidden[visual]
        logits = tensors["weight"] @ pooled + tensors["bias"]
        head = got.last.head
        assert isinstance(head, LabelResult) and head.kind == spec.kind
        torch.testing.assert_close(torch.from_numpy(head.logits[0]), logits, rtol=1e-4, atol=1e-4)
        confidences = (logits / (spec.temperature or 1.0)).softmax(0)
        assert list(head.confidences.values()) == pytest.approx(confidences.tolist(), abs=1e-4)
        assert head.label == spec.labels[int(logits.argmax())]


def reference_of(bundle, prefix=None):
    """PEFT's model with a bundle's adapters, by the names that requests use."""
    prefix = f"{bundle.name}/" if prefix is None else prefix
    return Reference("tiny", {f"{prefix}{one.name}": one for one in bundle.glob("adapters/*")})


@torch.no_grad()
def hidden_of(reference, request):
    """Last hidden states of a prompt, [tokens, width], and which tokens are visual."""
    with reference._of(request) as inputs:
        hidden = reference.model.get_base_model().model(**inputs).last_hidden_state[0]
    return hidden, inputs["input_ids"][0] == reference.model.config.image_token_id


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "unmerge_only", "overlap": True},
        pytest.param({"policy": "valora", "overlap": False, "chunk": 19}, marks=pytest.mark.slow),
        {"policy": "merge_only", "block_size": 32},
    ],
    ids=lambda settings: str(settings["policy"]),
)
def test_embeddings_are_last_hidden_states_of_peft(others, settings):
    """Of the prompt's last token, by adapter, beside heads and generation, and from the cache."""
    engine = make_engine("tiny", **settings)
    engine.load("bundle", others)
    reference = reference_of(others)
    names = ["others/adapter-1", "others/adapter-2", "scene", "crowd", None]
    texts = ["a red star", "two blue rings over a green key and " * 3]
    asked = [
        *((name, {"text": text}) for text in texts for name in names),
        (names[0], {"token_ids": (1, 7, 19, 4)}),
        (names[1], {"messages": ask("What is it?", images=1), "images": [picture(1)]}),
    ]
    plain = [Request(f"{n}", name, embed=True, **more) for n, (name, more) in enumerate(asked)]
    head = Request("head", model="crowd", images=[picture(2)])
    beside = writers([None, "others/adapter-2"])
    for _ in range(2):
        found = run(engine, [beside[0], *plain, head, beside[1]], together=4)
        for request in plain:
            last = found[request.id].last
            assert (last.error, last.finish, last.head.kind) == (None, Finish.HEAD, "embedding")
            spec = OTHERS.get(request.model)
            name = request.model if spec is None else f"others/{spec.adapter}"
            wanted = hidden_of(reference, replace(request, model=name))[0][-1]
            own = torch.from_numpy(last.head.logits[0])
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
            assert (last.usage.completion, found[request.id].tokens) == (0, [])
        check_answers(found, reference, *beside)
        assert isinstance(found["head"].last.head, LabelResult)
