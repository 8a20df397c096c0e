"""The stage `fuse`: what its hash depends on, and what its domains must reach."""

from dataclasses import replace
from pathlib import Path

import pytest

from valora_data.schema import Split, Task
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
from valora_train.stages.distill import REPORT
from valora_train.stages.fuse import DomainInputs, check_result, fuse_stage


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("heads", "options", HeadSettings(options={"number": {"bias": 1.0}})),
        ("train", "augment", TrainSettings(augment=AugmentSettings(views=2, color=0.2))),
        ("model", "quantize", ModelSettings(quantize="nf4")),
    ],
)
def test_later_settings_change_the_hash_only_where_they_are_used(group, key, value):
    plain = fuse_stage(Settings(), [])
    assert key not in plain.settings[group]
    asked = fuse_stage(replace(Settings(), **{group: value}), [])
    assert asked.settings[group][key] == as_dict(value)[key]
    assert asked.folder(Path()) != plain.folder(Path())


def test_what_changes_no_training_is_in_no_hash():
    plain = fuse_stage(Settings(), []).key
    same = FusionSettings(unreachable="keep")
    assert fuse_stage(replace(Settings(), fusion=same), []).key == plain
    changed = FusionSettings(margin=0.03)
    assert fuse_stage(replace(Settings(), fusion=changed), []).key != plain


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
        with pytest.raises(
            SettingsError, match=r"teacher of domain cats .* 0\.8 of it .*cats\.of_t"
        ):
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
