"""Licences of data, teachers and base model: from settings, from their own files, or unknown."""

import json

import pytest

from valora_train.reporting.licences import UNKNOWN, find_licences, licence_tags
from valora_train.settings import DomainSettings, Settings, SourceSettings, TeacherSettings

CARD = "---\nlicense: cc-by-4.0\n---\n# Cats\n"
COCO = {
    "licenses": [{"id": 1, "name": "CC BY 4.0"}, {"id": 2, "name": "CC BY-NC 2.0"}],
    "images": [{"id": 1, "license": 1}],
}


def found(source, base="tiny", **facts):
    domain = DomainSettings("cat", labels=["cat"], source=source, **facts)
    every = find_licences(Settings(domains={"cat": domain}, base_license=base), ["cat"])
    return every["domains"]["cat"]


@pytest.mark.parametrize(
    ("kind", "files", "path", "licence"),
    [
        ("yolo", {"data.yaml": "license: MIT\n"}, "data.yaml", "MIT"),
        ("yolo", {"data.yaml": "roboflow: {license: CC BY 4.0}\n"}, "", "CC BY 4.0"),
        ("yolo", {"data.yaml": "names: [cat]\n", "README.md": CARD}, "data.yaml", "cc-by-4.0"),
        ("yolo", {"data.yaml": "{"}, "data.yaml", UNKNOWN),
        ("coco", {"cats.json": json.dumps(COCO)}, "cats.json", "CC BY 4.0"),
        ("coco", {"cats.json": json.dumps(COCO | {"images": []})}, "", "CC BY 4.0, CC BY-NC 2.0"),
        ("imagefolder", {}, "", UNKNOWN),
        ("hub", {}, "../nobody/nothing", UNKNOWN),
    ],
)
def test_data_sets_say_their_licence(kind, files, path, licence, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    source = SourceSettings(kind=kind, path=str(tmp_path / path))
    assert found(source, teacher="labels") == {"data": licence, "teacher": None}
    assert found(source, teacher="labels", license="mine")["data"] == "mine"


@pytest.mark.parametrize(
    ("kind", "teacher", "licence"),
    [
        ("yolo", "train", "AGPL-3.0"),
        ("small", "train", "trained here"),
        ("huggingface", "{folder}", "cc-by-4.0"),
        ("huggingface", "nobody/nothing", UNKNOWN),
        ("function", "package.module:function", UNKNOWN),
    ],
)
def test_teachers_have_that_of_their_kind_or_card(kind, teacher, licence, tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    facts = {"teacher": teacher.format(folder=tmp_path), "taught_by": TeacherSettings(kind=kind)}
    drawn = SourceSettings()
    assert found(drawn, **facts) == {"data": "drawn here", "teacher": licence}
    assert found(drawn, teacher_license="bought", **facts)["teacher"] == "bought"


def test_base_models_and_tags():
    domain = DomainSettings("cat", labels=["cat"], teacher="labels")
    licences = find_licences(Settings(domains={"cat": domain}), ["cat"])
    assert licence_tags(licences) == {
        "license.base": "apache-2.0", "license.cat.data": "drawn here",
    }  # fmt: skip
