"""Formats of predictions, read back by the tools that they are for."""

import json
from dataclasses import asdict
from pathlib import Path

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
from valora_teachers.yolo import load_ultralytics

SIZE = (200, 100)
BOXES = {
    ("a.png", "cats"): [("cat", 0.9, [20, 10, 60, 50])],
    ("a.png", "dogs"): [("dog", 0.8, [100, 20, 180, 90]), ("cat", 0.7, [21, 10, 60, 51])],
    ("b/&+#1.png", "cats"): [],
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
    assert [image["file_name"] for image in coco.imgs.values()] == ["a.png", "b/&+#1.png"]
    found = [coco.anns[key] for key in coco.getAnnIds()]
    assert [(ann["bbox"], ann["score"], names[ann["category_id"]]) for ann in found] == [
        ([20, 10, 40, 40], 0.9, "cats/cat"), ([100, 20, 80, 70], 0.8, "dog"),
        ([21, 10, 39, 41], 0.7, "dogs/cat"),
    ]  # fmt: skip


def test_yolo_is_read_by_ultralytics(results):
    load_ultralytics()
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    row = asdict(Prediction("b/images/d.png", "cats", "detection", *SIZE, {"detections": []}))
    picture(results.source / row["file"], 3, SIZE)
    with (results.out / "predictions.jsonl").open("a") as file:
        print(json.dumps(row), json.dumps(row | {"file": "a.jpg"}), sep="\n", file=file)
    (results.out / "yolo").mkdir()
    (results.out / "yolo" / "images").symlink_to(results.source)  # of an earlier version
    for _ in range(2):
        folder = WRITERS["yolo"](results)
        data = check_det_dataset(str(folder / "data.yaml"))
        first, *others = YOLODataset(img_path=data["train"], data=data, augment=False).labels
        found = [data["names"][int(number)] for (number,) in first["cls"]]
        assert found == ["cats/cat", "dog", "dogs/cat"]
        assert first["bboxes"][0] == pytest.approx((0.2, 0.3, 0.2, 0.4))
        assert [Path(one["im_file"]).name for one in others] == ["&+#1.png", "d.png"]
    rows = (folder / "confidences" / "a.txt").read_text().splitlines()
    assert [row.split()[-1] for row in rows] == ["0.900000", "0.800000", "0.700000"]
    assert not list(results.source.rglob("*.txt"))
    picture(results.source / "a.jpg", 3, SIZE)
    with pytest.raises(SettingsError, match="one label file for"):
        WRITERS["yolo"](results)


def test_label_studio_reads_its_own_shapes(results, tmp_path):
    tasks = json.loads(WRITERS["labelstudio"](results).read_text())
    first = tasks[0]
    assert first["data"] == {"image": "/data/local-files/?d=a.png"}
    assert tasks[1]["data"] == {"image": "/data/local-files/?d=b/%26%2B%231.png"}
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
