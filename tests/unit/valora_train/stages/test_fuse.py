"""The stage `fuse`: its hash and what its domains must reach; golden examples of exports."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from valora_data import shards
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_train.errors import SettingsError, UnreachableError
from valora_train.settings import (
    AugmentSettings,
    DomainSettings,
    FusionSettings,
    HeadSettings,
    ModelSettings,
    Settings,
    TaskSettings,
    TrainSettings,
    as_dict,
)
from valora_train.stage import write_json
from valora_train.stages.distill import REPORT, TESTED
from valora_train.stages.export import _golden_examples
from valora_train.stages.fuse import DomainInputs, check_result, fuse_stage


def test_the_hash_has_what_changes_the_training_and_later_settings_where_they_are_used():
    plain = fuse_stage(Settings(), [])
    for group, key, value in (
        ("heads", "options", HeadSettings(options={"number": {"bias": 1.0}})),
        ("train", "augment", TrainSettings(augment=AugmentSettings(views=2, color=0.2))),
        ("model", "quantize", ModelSettings(quantize="nf4")),
    ):
        assert key not in plain.settings[group]
        asked = fuse_stage(replace(Settings(), **{group: value}), [])
        assert asked.settings[group][key] == as_dict(value)[key]
        assert asked.key != plain.key
    for changed, same in ({"unreachable": "keep"}, True), ({"margin": 0.03}, False):
        fusion = FusionSettings(**changed)
        assert (fuse_stage(Settings(fusion=fusion), []).key == plain.key) == same


def pseudo_labelled(folder, accuracy, test=None, **domain):
    """A domain whose teacher reaches an accuracy on validation, and perhaps another on test."""
    reached = {Split.VAL: accuracy, Split.TEST: accuracy if test is None else test}
    report = {"accuracy": {split: {"accuracy": value} for split, value in reached.items()}}
    write_json(folder / REPORT, {} if accuracy is None else report)
    settings = DomainSettings(name="cats", task=Task.DETECTION, labels=["cat"], **domain)
    return DomainInputs(settings.resolved(TaskSettings()), folder, folder)


def test_a_relative_requirement_is_a_share_of_the_teachers_accuracy(tmp_path):
    found = pseudo_labelled(tmp_path, 0.9, 0.7, required=None, of_teacher=0.8).requirement(0.02)
    assert found.required_on_test == pytest.approx(0.56)  # on test, like is compared with like
    for accuracy in (0.0, float("nan"), None):
        item = pseudo_labelled(tmp_path, accuracy, required=None, of_teacher=0.8)
        with pytest.raises(SettingsError, match=r"of domain cats .* 0\.8 of it .*cats\.of_t"):
            item.requirement()
    task = TaskSettings(type=Task.VIDEO, of_teacher=0.9)  # whose share domains with a teacher keep
    assert DomainSettings("x").resolved(task).of_teacher == 0.9
    assert DomainSettings("x", of_teacher=0.8).resolved(task).of_teacher == 0.8
    assert DomainSettings("x", teacher="labels").resolved(task).of_teacher is None


def test_a_stage_depends_on_all_that_its_targets_follow_from(tmp_path):
    def key(accuracy, **domain):
        return fuse_stage(Settings(), [pseudo_labelled(tmp_path, accuracy, 0.9, **domain)]).key

    plain = key(0.9, required=0.8)
    assert plain == key(0.95, required=0.8)  # nothing is asked of the teacher
    share = key(0.9, required=0.8, of_teacher=0.8)  # the same requirement
    assert len({plain, share, key(0.8, required=0.8, of_teacher=0.8)}) == 3


def test_a_finished_fusion_is_refused_if_a_domain_is_flagged(tmp_path):
    item = pseudo_labelled(tmp_path, None, required=0.8)
    result = {"unreachable": {"cats": 0.528}, "domains": {"cats": {}}}
    write_json(tmp_path / "fusion.json", result)
    keep = replace(Settings(), fusion=FusionSettings(unreachable="keep"))
    check_result(keep, [item], tmp_path)
    with pytest.raises(UnreachableError, match=r"cats reached 0\.528 < 0\.820 \(required 0\.800"):
        check_result(Settings(), [item], tmp_path)
    write_json(tmp_path / "fusion.json", result | {"unreachable": {}})
    check_result(Settings(), [item], tmp_path)


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
