"""The fused domain beside a small model: what counts as agreement, files, and what is refused."""

import json
import random

import numpy as np
import pytest

from tests.support.fake_engine import CAPTION, PERSON, SCENE
from valora_data.errors import DataError
from valora_data.schema import Box
from valora_serve.errors import SettingsError
from valora_serve.predict.beside import answers_of, compare, found_in, write
from valora_serve.predict.records import Prediction
from valora_train.metrics.evaluate import match


def found(label, *box, confidence=0.5):
    return {"label": label, "confidence": confidence, "box": box}


def fused(name, *objects):
    return Prediction(name, "d", "detection", 100, 80, {"detections": list(objects)})


def small(*objects):
    return found_in({"detections": list(objects)})


def test_objects_by_class_and_size():
    made = compare(
        [
            fused("a", found("car", 0, 0, 20, 20), found("car", 50, 0, 70, 20)),
            fused("b", found("bus", 0, 0, 100, 100, confidence=0.9)),
            fused("c"),
            fused("only here", found("car", 0, 0, 9, 9)),
        ],
        {
            "a": small(found("car", 1, 0, 20, 20), found("bus", 50, 0, 70, 20)),
            "b": small(found("bus", 0, 0, 10, 10)),
            "c": small(),
        },
    )
    assert made.images == 3
    assert made.classes == {"car": {"both": 1, "fused": 1}, "bus": {"fused": 1, "small": 2}}
    assert made.sizes == {"small": {"both": 1, "fused": 1, "small": 2}, "large": {"fused": 1}}
    assert made.agreement == 2 / (2 + 2 + 2)
    assert [one.file for one, *_ in made.pictures] == ["b", "a"]


def test_agreement_is_the_f1_of_one_against_the_other():
    draw = random.Random(3)

    def boxes():
        # far apart, so that each object has one partner at most, as pycocotools would choose it
        corners = [(40 * i + draw.random() * 12, draw.random() * 12) for i in range(6)]
        return [(x, y, x + 20, y + 20) for x, y in corners if draw.random() < 0.8]

    pairs = [(boxes(), boxes()) for _ in range(20)]
    made = compare(
        [fused(str(i), *(found("car", *box) for box in a)) for i, (a, _) in enumerate(pairs)],
        {str(i): small(*(found("car", *box) for box in b)) for i, (_, b) in enumerate(pairs)},
    )
    sides = [
        [[Box(*box, "car", 0.5) for box in found] for found in side]
        for side in zip(*pairs, strict=True)
    ]
    hits = int(np.sum(match(*sides, ["car"]).hit))
    assert made.classes["car"]["both"] == hits > 20
    count = sum(len(a) + len(b) for a, b in pairs)
    assert made.agreement == pytest.approx(2 * hits / count)


def test_labels_agree_or_differ():
    def chosen(label):
        return {"label": label, "confidence": 0.5}

    made = compare(
        [Prediction(n, "d", "classification", 9, 9, chosen(n[0])) for n in ("a1", "a2", "b1")],
        {name: found_in(chosen(label)) for name, label in (("a1", "a"), ("a2", "b"), ("b1", "b"))},
    )
    assert made.classes == {"a": {"both": 1, "fused": 1}, "b": {"both": 1, "small": 1}}
    assert made.agreement == 2 / 3
    assert [one.file for one, *_ in made.pictures] == ["a2"]


def test_page_and_json(tmp_path):
    name = "x y/<b>.png"
    (tmp_path / "out").mkdir()
    empty = found("flat", 3, 3, 3, 9)
    made = compare([fused(name, found("<i>", 0, 0, 9, 9))], {name: small(empty)})
    page = write(made, PERSON, tmp_path / "photos", tmp_path / "out").read_text()
    assert 'href="../photos/x%20y/%3Cb%3E.png"' in page
    assert "&lt;i&gt; 0.50" in page and "<i>" not in page
    facts = json.loads((tmp_path / "out" / "beside.json").read_text())
    assert facts["class"] == {"<i>": {"fused": 1, "agreement": 0.0}} and "size" in facts
    alone = [found("<i>", 0, 0, 9, 9) | {"box": [0, 0, 9, 9]}]
    assert facts["pictures"] == [{"file": name, "fused": alone, "small": []}]
    write(made, SCENE, tmp_path / "photos", tmp_path / "out")
    assert "size" not in json.loads((tmp_path / "out" / "beside.json").read_text())


ANSWER = '{"file": "a\u2028", "domain": "person", "answer": {"detections": []}}'


@pytest.mark.parametrize(
    ("lines", "domain", "said"),
    [
        (None, PERSON, "cannot read"),
        ([ANSWER, "{"], PERSON, "line 2 of .* is no prediction"),
        ([ANSWER.replace("[]", '[{"box": [1]}]')], PERSON, "line 1 of .* is no prediction"),
        ([ANSWER.replace("person", "car")], PERSON, "has no answers of person"),
        ([ANSWER], CAPTION, "answers in words"),
        ([ANSWER], PERSON, None),
    ],
)
def test_a_file_of_answers(tmp_path, lines, domain, said):
    file = tmp_path / "small.jsonl"
    if lines is not None:
        file.write_text("\n".join(lines), encoding="utf-8")
    if said is None:
        assert answers_of(str(file), tmp_path, domain, tmp_path) == {"a\u2028": []}
        return
    with pytest.raises((SettingsError, DataError), match=said):
        answers_of(str(file), tmp_path, domain, tmp_path)


def test_a_model_that_does_not_answer(tmp_path):
    with pytest.raises(SettingsError, match="did not answer, see above: run valora label yourself"):
        answers_of(str(tmp_path / "lacks.pt"), tmp_path, PERSON, tmp_path)
