"""The fused domain beside a small model: what counts as agreement, files, and what is refused."""

import json

import pytest

from tests.support.fake_engine import CAPTION, PERSON, SCENE
from valora_data.errors import DataError
from valora_serve.errors import SettingsError
from valora_serve.predict.beside import answers_of, compare, found_in, write
from valora_serve.predict.run import Prediction


def found(label, *box, confidence=0.5):
    return {"label": label, "confidence": confidence, "box": box}


def fused(name, *objects):
    return Prediction(name, "d", "detection", 100, 80, {"detections": list(objects)})


def small(*objects):
    return found_in({"detections": list(objects)})


def test_objects_by_class_and_size():
    asked = [
        fused("a", found("car", 0, 0, 20, 20), found("car", 50, 0, 70, 20)),
        fused("b", found("bus", 0, 0, 100, 100, confidence=0.9)), fused("c"),
        fused("only here", found("car", 0, 0, 9, 9)),
    ]  # fmt: skip
    made = compare(asked, {
        "a": small(found("car", 1, 0, 20, 20), found("bus", 50, 0, 70, 20)),
        "b": small(found("bus", 0, 0, 10, 10)), "c": small(),
    })  # fmt: skip
    assert made.images == 3
    assert made.classes == {"car": {"both": 1, "fused": 1}, "bus": {"fused": 1, "small": 2}}
    assert made.sizes == {"small": {"both": 1, "fused": 1, "small": 2}, "large": {"fused": 1}}
    assert made.agreement == 2 / (2 + 2 + 2)
    assert [one.file for one, *_ in made.pictures] == ["b", "a"]


def test_page_and_json(tmp_path):
    name = "x y/<b>.png"
    (tmp_path / "out").mkdir()
    empty = found("flat", 3, 3, 3, 9)
    made = compare([fused(name, found("<i>", 0, 0, 9, 9))], {name: small(empty)})
    page = write(made, PERSON, tmp_path / "photos", tmp_path / "out").read_text()
    assert 'href="../photos/x%20y/%3Cb%3E.png"' in page
    assert "&lt;i&gt; 0.50" in page and "<i>" not in page
    facts = json.loads((tmp_path / "out" / "beside.json").read_text())
    assert facts["class"] == {"<i>": {"both": 0, "fused": 1, "small": 0, "agreement": 0.0}}
    alone = [found("<i>", 0, 0, 9, 9) | {"box": [0, 0, 9, 9]}]
    assert facts["pictures"] == [{"file": name, "fused": alone, "small": []}] and "size" in facts
    (tmp_path / "out" / ".beside.html.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(compare([], {}), PERSON, tmp_path / "photos", tmp_path / "out")
    assert (tmp_path / "out" / "beside.html").read_text() == page  # nothing is half there
    (tmp_path / "out" / ".beside.html.partial").unlink()
    write(made, SCENE, tmp_path / "photos", tmp_path / "out")
    assert "size" not in json.loads((tmp_path / "out" / "beside.json").read_text())


ANSWER = '{"file": "a\u2028", "domain": "person", "answer": {"detections": []}}'


@pytest.mark.parametrize(
    ("lines", "domain", "said"),
    [
        (None, PERSON, "cannot read"), ([ANSWER, "{"], PERSON, "line 2 of .* is no prediction"),
        *(([ANSWER.replace("[]", found)], PERSON, "line 1 of .* is no prediction") for found in (
            '[{"box": [1]}]', "null", "3", '[{"label": "x", "confidence": 1, "box": "abcd"}]',
            '[{"label": "x", "confidence": 1, "box": [0, 0, Infinity, 1]}]',
            '[{"label": "x", "confidence": NaN, "box": [0, 0, 1, 1]}]')),
        *(([ANSWER.replace('{"detections": []}', found)], PERSON, "line 1 of .* is no prediction")
          for found in ("null", "[]", "{}", '"a"')),
        ([ANSWER.replace("[]", '[{"label": "dog", "confidence": 1, "box": [0, 0, 1, 1]}]')], PERSON,
         "finds 'dog', which is none of person's labels: run"),
        ([ANSWER.replace("person", "car")], PERSON, "has no answers of person"),
        ([ANSWER], CAPTION, "answers in words"), ([ANSWER], PERSON, None),
    ],
)  # fmt: skip
def test_a_file_of_answers(tmp_path, lines, domain, said):
    file = tmp_path / "small.jsonl"
    if lines is not None:
        file.write_text("\n".join(lines), encoding="utf-8")
    if said is None:
        assert answers_of(str(file), tmp_path, domain, tmp_path) == {"a\u2028": []}
        return
    with pytest.raises((SettingsError, DataError), match=said):
        answers_of(str(file), tmp_path, domain, tmp_path)
