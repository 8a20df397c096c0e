"""Every example of docs/how-to/own-data.md reads generated files of its format."""

import re
import shlex
from pathlib import Path

import datasets
import pytest
import yaml

from tests.support import detection_sets as sets
from tests.support.configs import configured
from tests.support.data_sets import metadata, natural_picture, write_json, write_video
from tests.support.detection_sets import marked, write_yolo
from tests.support.forked import Forked, finish
from tests.support.stores import new_store
from valora_data import shards
from valora_data.contract.bundle import read_bundle
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_data.sources.registry import FORMATS, detect_kind
from valora_train.cli import config_folder
from valora_train.settings import DomainSettings, SourceSettings, from_config
from valora_train.stages.data import FAULTS, build_data, data_stage

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "own-data.md"
EXAMPLES = {
    match[1]: match[2]
    for match in re.finditer(r"```yaml\n# own/domain/(\w+)\.yaml\n(.*?)```", PAGE.read_text(), re.S)
}
COUNT = 40


def pictures(folder, count=COUNT, first=0):
    """Names of some pictures in a folder, 96 pixels wide and high."""
    some = marked("any", count=count, first=first)
    sets.write_pictures(folder, some)
    return list(some)


def table(folder, row):
    names = pictures(folder)
    metadata(folder, *({"file_name": name} | row(i) for i, name in enumerate(names)))


def hub(folder):
    numbers = range(COUNT)
    rows = {"image": [natural_picture(i) for i in numbers], "label": [i % 2 for i in numbers]}
    labels = datasets.ClassLabel(names=["owl", "jay"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)


def videos(folder):
    for number in range(COUNT):
        place = folder / ("wave", "point")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        write_video(place / f"{number}.mp4", [6 * number, 30 + 5 * number, 10])


def llava(folder):
    entries = [
        {"id": str(i), "image": name, "conversations": [
            {"from": "human", "value": "<image>\nwhich one?"}, {"from": "gpt", "value": f"no. {i}"},
        ]}
        for i, name in enumerate(pictures(folder / "images"))
    ]  # fmt: skip
    write_json(folder / "talk.json", entries)


def again(folder):
    for place, split in enumerate(Split):
        samples = [
            Sample(f"{split}{i}", natural_picture(100 * place + i),
                   Answer((Box(1, 2, 30, 40, ("cat", "dog")[i % 2]),)))
            for i in range(4)
        ]  # fmt: skip
        shards.write(samples, ("cat", "dog"), folder / split)


MAKERS = {
    "cells": lambda folder: write_yolo(folder, {"train": marked("red", "white")}),
    "pets": lambda folder: sets.write_coco(folder, marked("cat", "dog")),
    "chess": lambda folder: sets.write_roboflow(folder, {
        split: marked("pawn", "king", count=count, first=100 * count)
        for split, count in (("train", 24), ("valid", 6), ("test", 7))
    }),
    "masks": lambda folder: sets.write_voc(folder, marked("mask", "face")),
    "roads": lambda folder: sets.write_kitti(folder, marked("Car", "Pedestrian")),
    "tools": lambda folder: sets.write_cvat(folder, marked("saw", "axe")),
    "fruit": lambda folder: sets.write_labelstudio(folder, marked("apple", "pear")),
    "parts": lambda folder: (
        write_yolo(folder, {"train": marked("nut", "bolt")}), pictures(folder / "raw", 10, 500)
    ),
    "street": lambda folder: pictures(folder / "raw"),
    "flowers": lambda folder: (pictures(folder / "rose", 20), pictures(folder / "tulip", 20, 100)),
    "leaves": lambda folder: table(folder, lambda i: {"species": ("oak", "elm")[i % 2]}),
    "birds": hub, "gestures": videos, "talk": llava,
    "yesno": lambda folder: table(
        folder, lambda i: {"question": "is it?", "answer": ("yes", "no")[i % 2]}
    ),
    "scenes": lambda folder: table(folder, lambda i: {"caption": f"picture {i}"}),
    "where": lambda folder: table(
        folder, lambda i: {"phrase": "the left one", "bbox": [4, 6, 50, 40]}
    ),
    "coins": lambda folder: table(folder, lambda i: {"count": i % 3}), "again": again,
}  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The domains of all examples, as the command line reads them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "domain").mkdir()
    for name, text in EXAMPLES.items():
        (folder / "domain" / f"{name}.yaml").write_text(text)
    chosen = [f"+domain@domains.{name}={name}" for name in EXAMPLES]
    config = configured("task=own", *chosen, f"hydra.searchpath=[file://{folder}]")
    return {domain.name: domain for domain in from_config(config).chosen()}


@pytest.fixture
def domain_of(read, tmp_path, monkeypatch):
    """Gives the domain of an example, whose data are in the working directory then."""
    monkeypatch.chdir(tmp_path)

    def made(name):
        MAKERS[name](tmp_path / name)
        return read[name]

    return made


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example(name, tmp_path, domain_of):
    assert len(EXAMPLES[name].splitlines()) <= 6
    domain = domain_of(name)
    build_data(domain, tmp_path / "data")
    assert not (tmp_path / "data" / FAULTS).exists() or name == "masks"
    found = {split: shards.open_shard(tmp_path / "data" / split) for split in Split}
    answers = [a for split in (Split.TRAIN, Split.VAL, Split.TEST) for a in found[split].answers()]
    assert sum(map(len, found.values())) >= 16
    unknown = domain.source.kind == "images"
    assert all((answer == Answer()) == unknown for answer in answers)
    assert data_stage(domain, tmp_path / "work").key == data_stage(domain).key
    if name not in ("street", "parts", "again", "birds", "chess"):  # `check` takes them for others
        assert detect_kind(Path(domain.source.path)) == domain.source.kind


DOCUMENTS = ("records", "linked_records", "documents", "quality", "texts", "album")


def test_the_page_has_an_example_of_every_format_and_task():
    kinds = {yaml.safe_load(text)["defaults"][0] for text in EXAMPLES.values()}
    assert kinds == set(FORMATS) - {"scenes", *DOCUMENTS}  # docs/how-to/documents.md has those
    assert set(MAKERS) == set(EXAMPLES)
    folder = config_folder() / "domain"
    tasks = set()
    for text in EXAMPLES.values():
        content = yaml.safe_load(text)
        base = yaml.safe_load((folder / f"{content['defaults'][0]}.yaml").read_text())
        tasks.add(content.get("task", base["task"]))
    assert tasks == {*Task.all()} - {Task.CONTEXT}


@pytest.mark.parametrize("name", ["cells", "pets", "masks", "leaves"])
def test_any_change_of_the_data_is_seen(name, tmp_path, domain_of):
    domain = domain_of(name)
    keys = {data_stage(domain, tmp_path / "work").key}
    files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
    pictures = [path for path in files if path.suffix == ".png"]
    others = [path for path in files if path.suffix != ".png"]
    changed = sorted({pictures[0], others[0], others[-1]})
    for path in changed:
        path.write_bytes(path.read_bytes() + b"\n")
        keys.add(data_stage(domain, tmp_path / "work").key)
    assert len(keys) == 1 + len(changed)
    before = data_stage(domain, tmp_path / "work").key
    pictures[-1].unlink()
    assert data_stage(domain, tmp_path / "work").key != before


def test_data_without_any_object_is_refused(tmp_path):
    write_yolo(tmp_path / "set", {"train": marked("red", "white")})
    (tmp_path / "set/labels").rename(tmp_path / "set/elsewhere")
    source = SourceSettings(kind="yolo", path=f"{tmp_path}/set/data.yaml")
    domain = DomainSettings("cells", Task.DETECTION, ["red", "white"], "detect", source=source)
    with pytest.raises(DataError, match=r"no training image of domain cells has an object of red"):
        build_data(domain, tmp_path / "data")
    # And answers that teach nothing.
    table(tmp_path / "same", lambda _: {"count": 1})
    source = SourceSettings(kind="imagefolder", path=str(tmp_path / "same"))
    domain = DomainSettings("coins", Task.COUNTING, ["0", "1"], "?", source=source)
    with pytest.raises(DataError, match="are '1', so that there is nothing to tell apart"):
        build_data(domain, tmp_path / "counted")


@pytest.mark.parametrize(
    ("teacher", "train", "test", "said"),
    [
        ("labels", ("red",), ("red", "white"), ["no training sample shows white: label some, or"]),
        ("train", ("red", "white"), ("white",), ["no test sample shows red: label some, or"]),
        ("best.pt", ("red",), ("white",), ["no test sample shows red"]),
        ("labels", ("red", "white"), ("red", "white"), []),
    ],
)
def test_classes_that_a_split_lacks_are_named(teacher, train, test, said, tmp_path, caplog):
    splits = {"train": train, "val": ("red", "white"), "test": test}
    sets = enumerate(splits.items())
    parts = {name: marked(*shown, count=6, first=6 * n) for n, (name, shown) in sets}
    write_yolo(tmp_path / "set", parts)
    source = SourceSettings(kind="yolo", path=f"{tmp_path}/set/data.yaml")
    domain = DomainSettings(
        "cells", Task.DETECTION, ["red", "white"], "detect", teacher=teacher, source=source
    )
    build_data(domain, tmp_path / "data")
    assert len(caplog.messages) == len(said), caplog.messages
    for text, message in zip(said, caplog.messages, strict=True):
        assert text in message


@pytest.mark.slow
def test_domains_of_every_task_go_into_one_bundle(tmp_path, random_llava):
    (command,) = re.findall(r"```text\n(valora-train .*?)```", PAGE.read_text(), re.S)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "valora-train"
    names = [argument.rpartition("=")[2] for argument in arguments if "+domain@" in argument]
    (tmp_path / "own" / "domain").mkdir(parents=True)
    for name in names:
        (tmp_path / "own" / "domain" / f"{name}.yaml").write_text(EXAMPLES[name])
        MAKERS[name](tmp_path / name)
    quick = [
        f"model.id={random_llava}", "fusion.unreachable=keep", "train.steps=2",
        "train.steps_per_held=0", "train.probe_steps=2", "train.batch_size=4",
        "train.lora.rank=4", "train.threads=1", "heads.max_tokens=4", "train/augment=none",
        "train.validations=0",
        *(f"domains.{name}.required=0.01" for name in names),
    ]  # fmt: skip
    new_store(tmp_path)
    said = finish(Forked("valora_train.cli", [*arguments, *quick], tmp_path))
    domains = read_bundle(tmp_path / "bundles" / "mixed").domains
    assert set(domains) == set(names)
    assert {facts["task"] for facts in domains.values()} == {*Task.all()} - {Task.CONTEXT}
    assert "/#/experiments/" in said
