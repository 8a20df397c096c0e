"""The stage `fuse`: what its hash depends on."""

from dataclasses import replace
from pathlib import Path

from valora_train.settings import AugmentSettings, HeadSettings, Settings, TrainSettings
from valora_train.stages.fuse import fuse_stage


def test_options_of_task_types_change_the_hash_only_where_there_are_any():
    plain = fuse_stage(Settings(), [])
    assert "options" not in plain.settings["heads"]
    heads = HeadSettings(options={"number": {"bias": 1.0}})
    asked = fuse_stage(replace(Settings(), heads=heads), [])
    assert asked.settings["heads"]["options"] == {"number": {"bias": 1.0}}
    assert asked.folder(Path()) != plain.folder(Path())


def test_augmentation_changes_the_hash_only_where_there_are_views():
    plain = fuse_stage(Settings(), [])
    assert "augment" not in plain.settings["train"]
    train = TrainSettings(augment=AugmentSettings(views=2, color=0.2))
    asked = fuse_stage(replace(Settings(), train=train), [])
    assert asked.settings["train"]["augment"]["color"] == 0.2
    assert asked.folder(Path()) != plain.folder(Path())
