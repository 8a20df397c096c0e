"""Pictures of answers: colours say what is right, frames and questions are shown."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.unit.valora_train.reporting.test_texts import ADAPTERS, DOMAINS
from valora_data.schema import Answer, Box, Domain, Sample, Task
from valora_train.reporting import pictures

GREEN, RED = (0, 230, 118), (255, 82, 82)


def shows(image, *wanted):
    """Whether each colour is there, letters being softened at their edges."""
    seen = np.asarray(image.convert("RGB"), np.int16)
    return all((abs(seen - colour).max(-1) < 25).any() for colour in wanted)


def test_frames_questions_and_boxes_are_shown():
    paints = ["red", "green", "blue", "yellow", "white"]
    frames = [Image.new("RGB", (48, 48), paint) for paint in paints]
    video = Domain("clips", Task.VIDEO, ("up", "down"), "which way?", 0.5)
    clip = Sample("a", frames[0], Answer(label="up"), None, tuple(frames[1:]))
    right, wrong = (
        pictures.answer_sheet([clip], [Answer(label=label)], video) for label in ("up", "down")
    )
    assert shows(right, (255, 0, 0), (255, 255, 255))  # the first frame and the last
    assert shows(right, GREEN) and not shows(right, RED)
    assert shows(wrong, RED) and not shows(wrong, GREEN)
    place = Domain("places", Task.GROUNDING, (), "locate {}", 0.5)
    box = Box(10, 10, 40, 40, "left cat")
    asked = Sample("a", frames[2], Answer((box,)), "left cat")
    assert shows(pictures.answer_sheet([asked], [Answer((box,))], place), GREEN)
    assert shows(pictures.answer_sheet([asked], [Answer()], place), RED)  # nothing was found


def test_detections_are_right_or_wrong_and_the_legend_names_what_is_drawn():
    truth = (Box(10, 10, 50, 50, "cat"), Box(60, 60, 90, 90, "cat"))
    sample = Sample("a", Image.new("RGB", (96, 96), "blue"), Answer(truth))
    near, twice = Box(11, 10, 50, 50, "cat", 0.9), Box(12, 10, 50, 50, "cat", 0.8)
    far, unsure = Box(2, 60, 30, 90, "cat", 0.7), Box(2, 2, 8, 8, "cat", 0.3)
    dog = Box(10, 10, 50, 50, "dog", 0.9)
    for found, colours in (
        ([near, unsure], {GREEN}), ([far], {RED}), ([near, twice], {GREEN, RED}), ([dog], {RED}),
    ):  # fmt: skip
        sheet = pictures.contact_sheet([sample], [found], 0.5)
        assert {colour for colour in (GREEN, RED) if shows(sheet, colour)} == colours
    nothing = pictures.contact_sheet([Sample("b", sample.image, Answer())], [[]], 0.5)
    assert nothing.height < sheet.height  # no legend without colours


def test_names_of_classes_are_plain_text_in_any_script():
    names = ["5$ to 10$", "$a_{$", "青い", "a\nb"]
    counts = np.eye(4, dtype=int).tolist()
    pictures.confusion_matrix("d", {"names": names, "counts": counts}).savefig(io.BytesIO())


def test_a_fusion_is_one_picture_on_one_scale():
    old = DOMAINS["own_words"]["accuracy"].copy()
    del old["val"]  # an earlier version had neither this nor a target
    domains = DOMAINS | {"own_words": DOMAINS["own_words"] | {"accuracy": old}}
    figure = pictures.accuracy_bars(domains, ADAPTERS)
    ones, tens = figure.axes
    assert (ones.get_xlim(), tens.get_xlim()) == ((0, 1), (0, 10))
    assert [tick.get_text() for tick in ones.get_yticklabels()] == [
        "bicycle\nadapter-1\nrank 16\n1.2 MB", "people_count\nnone",
    ]  # fmt: skip
    widths = [bar.get_width() for bar in ones.patches]
    assert widths == pytest.approx([0.61, 0.93, 0.935, 0.79, 0.88, 0.79])
    assert " 0.935, 101 % of the teacher" in [text.get_text() for text in ones.texts]
    marks = [[mark.get_label() for mark in axes.collections] for axes in (ones, tens)]
    counts = [[one.count(name) for name in ("required", "target", "validation")] for one in marks]
    assert counts == [[2, 2, 2], [1, 0, 0]]
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == {
        "without LoRA", "teacher", "test", "test, requirement missed", "required", "target",
        "validation",
    }  # fmt: skip
