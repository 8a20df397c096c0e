"""Golden examples: replayed results within the tolerance, and others."""

import asyncio
import json

import pytest
from PIL import Image

from tests.support.fake_engine import FakeEngine
from valora_data.contract.bundle import GOLDEN
from valora_serve.errors import AdapterError
from valora_serve.server.loading import golden


def golden_bundle(folder, expected, domain="person", threshold=0.5):
    (folder / "golden").mkdir(parents=True)
    Image.new("RGB", (40, 20)).save(folder / "golden" / "a.png")
    examples = [{"domain": domain, "image": "golden/a.png", "expected": expected}]
    (folder / GOLDEN).write_text(json.dumps(examples))
    (folder / "bundle.json").write_text(
        json.dumps({"base": {"dtype": "float32"}, "domains": {domain: {"threshold": threshold}}})
    )
    return folder


BOX = {"label": "person", "confidence": 0.9, "box": [0.0, 0.0, 20.0, 10.0]}
SECOND = {"label": "person", "confidence": 0.4, "box": [10.0, 5.0, 40.0, 20.0]}


def replay(folder, dtype="float32"):
    engine = FakeEngine()
    engine.dtype = dtype
    return asyncio.run(golden.replay(engine, folder))


LABEL = {"label": "street", "confidence": 0.751}


@pytest.mark.parametrize(
    ("domain", "expected", "threshold", "same"),
    [
        *(("person", boxes, threshold, same) for boxes, threshold, same in (
            ([BOX], 0.5, True), ([BOX, SECOND], 0.2, True), ([SECOND, BOX], 0.2, True),
            ([BOX | {"confidence": 0.905, "box": [0.4, 0.0, 19.6, 10.0]}], 0.5, True),
            ([BOX], 0.395, True),  # the second box is about the threshold: it may come or go
            ([BOX, SECOND], 0.405, True),
            ([], 0.5, False), ([BOX, BOX], 0.5, False), ([BOX], 0.2, False),
            ([BOX, SECOND | {"confidence": 0.6}], 0.5, False),
            ([BOX | {"confidence": 0.88}], 0.5, False), ([BOX | {"label": "car"}], 0.5, False),
            ([BOX | {"box": [0.6, 0.0, 20.0, 10.0]}], 0.5, False),
        )),
        ("scene", LABEL, None, True), ("scene", "street", None, True),
        ("scene", {"label": "beach"}, None, False),
        ("scene", LABEL | {"confidence": 0.7}, None, False),
        ("caption", "a red star and a blue ring over the green key", None, True),
        ("caption", "a", None, False),
    ],
)  # fmt: skip
def test_answers_within_the_tolerance(tmp_path, domain, expected, threshold, same):
    folder = golden_bundle(tmp_path / "b", expected, domain, threshold)
    if same:
        assert replay(folder) == 1
        return
    with pytest.raises(AdapterError, match="differently"):
        replay(folder)


def test_what_another_type_rounds_is_allowed(tmp_path):
    near = BOX | {"confidence": 0.88, "box": [1.2, 0.0, 20.0, 10.0]}
    folder = golden_bundle(tmp_path / "b", [near])
    assert replay(folder, "bfloat16") == 1
    with pytest.raises(AdapterError, match="differently"):
        replay(folder)


def test_a_bundle_without_golden_examples(tmp_path):
    assert asyncio.run(golden.replay(FakeEngine(), tmp_path)) == 0


STORED = {"domain": "person", "image": "golden/a.png", "expected": [BOX]}


@pytest.mark.parametrize(
    "examples",
    [
        None, [{"domain": "person"}], [STORED | {"domain": "x"}], [STORED | {"image": "none.png"}],
        *([STORED | {"teacher": teacher}] for teacher in (
            "street", 3, {}, {"label": 3}, {"label": "a", "confidence": "sure"}, [{"label": "a"}],
            [{"label": "a", "box": [1, 2, 3], "confidence": 0.5}],
            [{"label": "a", "box": [1, 2, 3, float("nan")], "confidence": 0.5}],
            [{"label": "a", "box": [1, 2, 3, 4], "confidence": True}],
            [{"label": "a", "box": [1, 2, 3, 4], "confidence": 0.5}] * 1001,
        )),
    ],
)  # fmt: skip
def test_damaged_golden_examples(tmp_path, examples):
    folder = golden_bundle(tmp_path / "b", [BOX])
    (folder / GOLDEN).write_text("{" if examples is None else json.dumps(examples))
    with pytest.raises(AdapterError, match=r"\Athe golden examples of b are damaged \(.*\Z"):
        replay(folder)
