"""Formats of predictions, read back by the tools that they are for."""

import json
from dataclasses import asdict

import pytest
from pycocotools.coco import COCO

from tests.support.data_sets import picture
from valora_data.schema import Box, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source
from valora_serve.errors import SettingsError
from valora_serve.predict.formats import WRITERS
from valora_serve.predict.run import Prediction, Results
from valora_serve.types import ServedModel

SIZE = (200, 100)
BOXES = {
    ("a.png", "cats"): [("cat", 0.9, [20, 10, 60, 50])],
    ("a.png", "dogs"): [("dog", 0.8, [100, 20, 180, 90]), ("cat", 0.7, [21, 10, 60, 51])],
    ("b/c.png", "cats"): [],
}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "out").mkdir()
    made = []
    for (file, domain), found in BOXES.items():
        picture(tmp_path / "in" / file, len(file), SIZE)
        rows = [
            {"label": label, "confidence": sure, "box": [float(edge) for edge in box]}
            for label, sure, box in found
        ]
        made.append(Prediction(file, domain, "detection", *SIZE, {"detections": rows}))
    scene = {"label": "=street", "confidence": 0.75, "confidences": {"=street": 0.75, "sea": 0.25}}
    made.append(Prediction("a.png", "scene", "classification", *SIZE, scene))
    made.append(Prediction("a.png", "caption", "caption", *SIZE, {"text": "a cat, a dog"}))
    made.append(Prediction("broken.png", "cats", "detection", error="cannot be decoded"))
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in made)
    (tmp_path / "out" / "predictions.jsonl").write_text(lines)
    facts = [
        ServedModel("cats", "domain", "pets", task="detection", labels=("cat",), boxes=True),
        ServedModel("dogs", "domain", "pets", task="detection", labels=("dog", "cat"), boxes=True),
        ServedModel("scene", "domain", "pets", task="classification", labels=("=street", "sea")),
        ServedModel("caption", "domain", "pets", task="caption"),
    ]
    domains = {fact.name: fact for fact in facts}
    return Results(tmp_path / "out", tmp_path / "in", "pets@2", domains)


def test_coco_is_read_by_pycocotools(results):
    coco = COCO(str(WRITERS["coco"](results)))
    names = {key: entry["name"] for key, entry in coco.cats.items()}
    assert names == {1: "cats/cat", 2: "dog", 3: "dogs/cat"}
    assert [image["file_name"] for image in coco.imgs.values()] == ["a.png", "b/c.png"]
    found = [coco.anns[key] for key in coco.getAnnIds()]
    assert [(ann["bbox"], ann["score"], names[ann["category_id"]]) for ann in found] == [
        ([20, 10, 40, 40], 0.9, "cats/cat"), ([100, 20, 80, 70], 0.8, "dog"),
        ([21, 10, 39, 41], 0.7, "dogs/cat"),
    ]  # fmt: skip


def test_yolo_is_a_data_set_to_train_from(results):
    folder = WRITERS["yolo"](results)
    labels = ("cats/cat", "dog", "dogs/cat")
    source = Source("yolo", Task.DETECTION, labels, path=str(folder / "data.yaml"))
    samples = {sample.id: sample for sample in open_source(source)[None]()}
    assert set(samples) == {"images/a.png", "images/b/c.png"}
    found = samples["images/a.png"].answer.boxes
    assert [(box.label, pytest.approx(box.xyxy)) for box in found] == [
        ("cats/cat", (20, 10, 60, 50)), ("dog", (100, 20, 180, 90)), ("dogs/cat", (21, 10, 60, 51)),
    ]  # fmt: skip
    rows = (folder / "confidences" / "a.txt").read_text().splitlines()
    assert [row.split()[-1] for row in rows] == ["0.900000", "0.800000", "0.700000"]
    WRITERS["yolo"](results)  # again: the link is there already


def test_label_studio_reads_its_own_shapes(results, tmp_path):
    tasks = json.loads(WRITERS["labelstudio"](results).read_text())
    first = tasks[0]
    assert first["data"] == {"image": "/data/local-files/?d=a.png"}
    (guess,) = first["predictions"]
    assert guess["model_version"] == "pets@2"
    kinds = [result["type"] for result in guess["result"]]
    assert kinds == ["rectanglelabels"] * 3 + ["choices", "textarea"]
    for task in tasks:  # accepted as they are, predictions become annotations
        task["annotations"] = [{"result": task["predictions"][0]["result"]}]
    accepted = tmp_path / "export.json"
    accepted.write_text(json.dumps(tasks))
    source = Source("labelstudio", Task.DETECTION, path=str(accepted), images=str(tmp_path / "in"))
    sample, empty = open_source(source)[None]()
    assert empty.answer.boxes == ()
    assert [box.label for box in sample.answer.boxes] == ["cat", "dog", "cat"]
    assert sample.answer.boxes[0] == Box(*map(pytest.approx, (20, 10, 60, 50)), "cat")


def test_formats_of_boxes_need_boxes(results):
    alone = Results(results.out, results.source, "x@1", {"scene": results.domains["scene"]})
    for name in ("coco", "yolo"):
        with pytest.raises(SettingsError, match="no domain has any"):
            WRITERS[name](alone)
