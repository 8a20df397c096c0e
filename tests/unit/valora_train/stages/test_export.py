"""Golden examples as they are exported: which images, and whose answers."""

import json
from types import SimpleNamespace

from PIL import Image

from valora_data import shards
from valora_data.schema import Answer, Box, Sample, Split
from valora_train.stages.distill import TESTED
from valora_train.stages.export import _golden_examples

TRUTH = [(), (Box(1, 2, 9, 8, "cat", 1.0),), (), (Box(3, 1, 7, 9, "cat", 1.0),)]
SHOWN = [
    [{"label": "cat", "box": [n, n, 5 + n, 6 + n], "confidence": 0.5 + n / 8}] for n in range(4)
]


TASK = SimpleNamespace(video=False, golden=lambda found, threshold: [found, threshold])
MODEL = SimpleNamespace(  # it answers with the name of the sample
    tasks={"cat": TASK}, answer=lambda name, samples: [sample.id for sample in samples]
)


def test_answers_of_the_teacher_are_those_of_the_same_images(tmp_path):
    samples = [
        Sample(f"cat/test/{n}", Image.new("RGB", (10, 10), (50 * n, 0, 0)), Answer(boxes))
        for n, boxes in enumerate(TRUTH)
    ]
    shards.write(samples, ["cat"], tmp_path / "data" / Split.TEST)
    (tmp_path / "distilled").mkdir()
    (tmp_path / "golden").mkdir()
    item = SimpleNamespace(
        settings=SimpleNamespace(name="cat"), data=tmp_path / "data",
        distilled=tmp_path / "distilled",
    )  # fmt: skip
    manifest = {"domains": {"cat": {"threshold": 0.25}}}
    old = _golden_examples(tmp_path, manifest, item, MODEL)
    assert [example["expected"] for example in old] == [["cat/test/1", 0.25], ["cat/test/3", 0.25]]
    assert not any("teacher" in example for example in old)
    (item.distilled / TESTED).write_text(json.dumps(SHOWN))
    found = _golden_examples(tmp_path, manifest, item, MODEL)
    assert [example["teacher"] for example in found] == [SHOWN[1], SHOWN[3]]
    (item.distilled / TESTED).write_text(json.dumps([None, None, *SHOWN[2:]]))
    found = _golden_examples(tmp_path, manifest, item, MODEL)
    assert ["teacher" in example for example in found] == [False, True]
    with Image.open(tmp_path / found[1]["image"]) as image:
        assert image.getpixel((0, 0)) == (150, 0, 0)
