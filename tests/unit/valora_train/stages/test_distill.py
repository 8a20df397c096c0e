"""What the stages before fusion depend on: what they read, and nothing else."""

import shutil
import sys
from dataclasses import replace

import pytest

from tests.support.data_sets import picture
from valora_data.schema import Task
from valora_teachers.registry import KINDS
from valora_train.settings import DomainSettings, SourceSettings, TeacherSettings
from valora_train.stage import digest
from valora_train.stages.data import build_data, data_stage
from valora_train.stages.distill import distill_stage, teach_stage

SPLITS = ("train", "unlabelled", "val", "test")
FUNCTION = "def answer(samples):\n    return ['red' for _ in samples]\n"


def write_images(root, changed=""):
    """An image folder with all splits; one split may hold other images."""
    number = 0
    for split in SPLITS:
        for label in ("red", "white"):
            for index in range(4):
                number += 1
                seed = number + 1_000 * (split == changed)
                picture(root / split / label / f"{index}.png", seed)


class Chain:
    """The stages before fusion of one domain, in a work folder that outlives the chain."""

    def __init__(self, root, domain, teacher):
        self.work = root / "work"
        stage = data_stage(domain, self.work)
        self.data, self.reused = stage.run(self.work, lambda folder: build_data(domain, folder))
        self.teach, trained = teach_stage(domain, teacher, self.data, self.work), None
        if self.teach is not None:
            artefact = str(KINDS[teacher.kind].artefact)
            trained, _ = self.teach.run(self.work, lambda f: (f / artefact).write_text("weights"))
        self.distill = distill_stage(domain, teacher, self.data, trained, self.work)

    @property
    def keys(self):
        keys = {split: digest(self.data / split) for split in SPLITS}
        keys["teach"] = self.teach.key if self.teach else ""
        return keys | {"distill": self.distill.key}


@pytest.fixture
def domain(tmp_path):
    write_images(tmp_path / "set")
    return DomainSettings(
        "cells", Task.CLASSIFICATION, ["red", "white"], "Which?",
        source=SourceSettings(kind="imagefolder", path=str(tmp_path / "set")),
    )  # fmt: skip


SMALL = TeacherSettings(kind="small", options={"epochs": 2})


def changes(before, after):
    return {name for name, key in before.keys.items() if after.keys[name] != key}


def test_a_stage_depends_on_the_splits_that_it_reads(tmp_path, domain):
    teacher = replace(SMALL, labelled=True)
    before = Chain(tmp_path, domain, teacher)
    for split in SPLITS:
        write_images(tmp_path / "set", changed=split)
        after = Chain(tmp_path, domain, teacher)
        assert not after.reused
        assert changes(before, after) == {split, "distill", *(["teach"] * (split == "train"))}


def test_settings_that_stages_depend_on(tmp_path, domain):
    before = Chain(tmp_path, domain, SMALL)
    for change in (
        {"required": 0.9}, {"mirror": False}, {"prompt": "?"}, {"name": "blood"}
    ):  # fmt: skip
        after = Chain(tmp_path, replace(domain, **change), SMALL)
        assert not changes(before, after)
        # And what was made under another name is found.
        assert after.teach.folder(after.work) == before.teach.folder(before.work)
    labels = Chain(tmp_path, replace(domain, teacher="labels"), SMALL)
    assert changes(before, labels) == {"teach", "distill"}
    other = TeacherSettings(kind="yolo", threshold=0.4, options={"epochs": 3})
    assert not changes(labels, Chain(tmp_path, replace(domain, teacher="labels"), other))
    for change in (
        {"threshold": 0.5}, {"min_confidence": 0.2}, {"labelled": True},
        {"options": {"epochs": 2, "names": {"a": "red"}}},
    ):  # fmt: skip
        assert changes(before, Chain(tmp_path, domain, replace(SMALL, **change))) == {"distill"}
    longer = replace(SMALL, options={"epochs": 3})
    assert changes(before, Chain(tmp_path, domain, longer)) == {"teach", "distill"}
    # The same data elsewhere and written again is the same.
    (tmp_path / "set").rename(tmp_path / "moved")
    domain = replace(domain, source=replace(domain.source, path=str(tmp_path / "moved")))
    after = Chain(tmp_path, domain, SMALL)
    assert after.reused
    shutil.rmtree(tmp_path / "work")
    again = Chain(tmp_path, domain, SMALL)
    assert not again.reused
    assert not changes(before, again)


@pytest.fixture
def given(tmp_path, domain, monkeypatch):  # the chain of a teacher that lies in `tmp_path`
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(kind, place, prompt="Which?", **options):
        sys.modules.pop("own_teacher", None)
        teacher = TeacherSettings(kind=kind, options=options)
        return Chain(tmp_path, replace(domain, teacher=place, prompt=prompt), teacher)

    return make


def test_options_of_given_models(given, tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    before = given("small", "best")
    assert changes(before, given("small", "best", names={"rot": "red"})) == {"distill"}
    (tmp_path / "best").rename(tmp_path / "other")
    assert not changes(before, given("small", "other"))
    (tmp_path / "other" / "config.json").write_text("{ }")
    assert "teach" in changes(before, given("small", "other"))
    (tmp_path / "vit").mkdir()
    before = given("huggingface", "vit", device="cpu", batch=4)
    assert not changes(before, given("huggingface", "vit", device="cuda", batch=8))
    assert changes(before, given("huggingface", "vit", dtype="bfloat16")) == {"distill"}
    assert changes(before, given("huggingface", "vit", "Say")) == {"distill"}


@pytest.mark.parametrize(
    ("kind", "place", "file", "options"),
    [
        ("yolo_world", "best.pt", "clip/vocab.json", {"text_encoder": "clip"}),
        ("huggingface", "vit", "vit/model.safetensors", {"device": "cpu", "batch": 4}),
        ("function", "own_teacher:answer", "levels/a.json", {"files": ["levels"]}),
        ("function", "own_teacher:answer", "own_teacher.py", {}),
    ],
)
def test_files_of_a_teacher(given, tmp_path, kind, place, file, options):
    (tmp_path / "best.pt").write_bytes(b"weights")
    (tmp_path / "own_teacher.py").write_text(FUNCTION)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    if not (tmp_path / file).exists():
        (tmp_path / file).write_bytes(b"1")
    before = given(kind, place, **options)
    assert not changes(before, given(kind, place, **options))
    with (tmp_path / file).open("a") as written:
        written.write("\n# 2")
    assert changes(before, given(kind, place, **options)) == {"distill"}
