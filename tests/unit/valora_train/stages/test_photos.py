"""`task=photos`: its data sets as their cards declare them, on small sets of the same columns."""

import re

import datasets
import huggingface_hub
import pytest
import transformers

from tests.support.configs import configured
from tests.support.data_sets import natural_picture
from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Split
from valora_teachers.base import TeacherError
from valora_teachers.registry import load_teacher, make_teacher
from valora_train.checks import _check_teacher
from valora_train.reporting.licences import find_licences
from valora_train.settings import from_config
from valora_train.stages.data import build_data, data_stage
from valora_train.stages.distill import teach_stage

# Class names as the cards of the data sets declare them, and what the small models know.
DECLARED = {
    "traffic": "road-traffic,bicycles,buses,crosswalks,fire hydrants,motorcycles,traffic lights,"
    "vehicles",
    "animals": "animals,cat,chicken,cow,dog,fox,goat,horse,person,racoon,skunk",
    "leaves": "angular_leaf_spot,bean_rust,healthy",
}
COCO = "person,bicycle,car,motorcycle,bus,truck,traffic light,fire hydrant,cat,dog,horse,sheep,cow"
KNOWN = {"traffic": COCO, "animals": f"N/A,{COCO},N/A", "leaves": DECLARED["leaves"]}
FILE = re.compile(r"[\w-]+/[\w-]+(/[\w.]+)?@[0-9a-f]{40}")


def write_set(folder, name):
    """24, 6 and 8 pictures, each of one class after the other."""
    names = datasets.ClassLabel(names=DECLARED[name].split(","))
    objects = {"bbox": datasets.List(datasets.Value("float32"), 4), "category": names}
    answers = {"labels": names} if name == "leaves" else {"objects": datasets.List(objects)}
    features = datasets.Features({"image": datasets.Image(), **answers})
    first, parts = 0, datasets.DatasetDict()
    for split, count in (("train", 24), ("validation", 6), ("test", 8)):
        numbers = range(first, first + count)
        rows = {"image": [natural_picture(i) for i in numbers]}
        classes = [i % len(names.names) for i in numbers]
        if name == "leaves":
            rows["labels"] = classes
        else:
            rows["objects"] = [[{"bbox": [4, 6, 50, 40], "category": one}] for one in classes]
        parts[split] = datasets.Dataset.from_dict(rows, features=features)
        first += count
    parts.save_to_disk(folder)


@pytest.fixture(scope="module")
def photos():
    return from_config(configured("task=photos"))


@pytest.mark.parametrize("name", list(DECLARED))
def test_its_sets_are_read_from_a_folder_too(name, tmp_path):
    write_set(tmp_path / name, name)
    place = f"domains.{name}"
    wanted = ["task=photos", f"task.only=[{name}]", f"{place}.source.path={tmp_path / name}"]
    (domain,) = from_config(configured(*wanted)).chosen()
    build_data(domain, tmp_path / "data")
    sizes = {split: len(shards.open_shard(tmp_path / "data" / split)) for split in Split}
    assert sizes.pop("val") == 6
    assert sizes.pop("test") == 8
    assert min(sizes.values()) > 4
    assert sum(sizes.values()) == 24
    answers = shards.open_shard(tmp_path / "data" / Split.TEST).answers()
    shown = {box.label for answer in answers for box in answer.boxes}
    shown |= {answer.label for answer in answers if answer.label}
    assert shown
    assert shown <= {*domain.labels}


def test_every_model_knows_the_labels_of_its_domain_and_licences_are_said(photos):
    for domain in photos.chosen():
        kind, options = domain.taught_by.kind, domain.taught_by.options
        teacher = make_teacher(kind, domain.task, domain.labels, options)
        teacher.match_classes("it", dict(enumerate(KNOWN[domain.name].split(","))))
        assert set(teacher.label_of.values()) == set(domain.labels)
        assert set(domain.labels) <= set(DECLARED[domain.name].split(","))
    assert find_licences(photos, list(photos.domains)) == {
        "base": "apache-2.0",
        "domains": {
            "traffic": {"data": "cc", "teacher": "AGPL-3.0"},
            "animals": {"data": "cc", "teacher": "Apache-2.0"},
            "leaves": {"data": "MIT", "teacher": "Apache-2.0"},
        },
    }


def test_each_is_asked_for_at_its_revision(photos, monkeypatch, tmp_path):
    asked = []

    def note(name, *given, revision, **_):
        asked.append("/".join([name, *filter(None, given)]) + f"@{revision}")
        raise OSError("gone")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", note)
    monkeypatch.setattr(datasets, "load_dataset", note)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", note)
    for domain in photos.chosen():
        commit = domain.source.path.rpartition("@")[2]
        assert data_stage(domain).inputs["commit"] == commit  # also without a network
        with pytest.raises(DataError, match=rf"{domain.name}: data set .* loaded \(gone\)"):
            build_data(domain, tmp_path)
        kind = domain.taught_by.kind
        with pytest.raises((DataError, TeacherError), match=r"loaded .*\(gone\)"):
            _ = teach_stage(domain, domain.taught_by, tmp_path) or load_teacher(
                kind, domain.teacher, domain.labels, domain.taught_by.options, domain.task
            )
    places = [text for one in photos.chosen() for text in (one.source.path, one.teacher)]
    assert asked == places
    assert all(map(FILE.fullmatch, places))


def test_without_a_network_a_run_ends_before_its_first_stage(photos):
    """The tests set HF_HUB_OFFLINE."""
    traffic = photos.domains["traffic"]
    with pytest.raises(DataError, match=r"yolo11n\.pt@.* is no file here, and cannot be loaded"):
        _check_teacher(traffic, traffic.taught_by)
