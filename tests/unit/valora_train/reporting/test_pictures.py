"""Pictures of answers: colours say what is right, frames and questions are shown."""

from PIL import Image

from valora_data.schema import Answer, Box, Domain, Sample, Task
from valora_train.reporting import pictures

GREEN, RED = (0, 230, 118), (255, 82, 82)


def shows(image, *wanted):
    """Whether each colour is there, letters being softened at their edges."""
    seen = [colour for _, colour in image.getcolors(1 << 24)]
    return all(
        any(max(abs(a - b) for a, b in zip(colour, want, strict=True)) < 25 for colour in seen)
        for want in wanted
    )


def test_right_and_wrong_answers_are_told_by_colour():
    domain = Domain("animals", Task.CLASSIFICATION, ("cat", "dog"), "which animal?", 0.5)
    sample = Sample("a", Image.new("RGB", (96, 96), "blue"), Answer(label="cat"))
    right = pictures.answer_sheet([sample], [Answer(label="cat")], domain)
    wrong = pictures.answer_sheet([sample], [Answer(label="dog")], domain)
    assert shows(right, GREEN)
    assert not shows(right, RED)
    assert shows(wrong, RED)
    assert not shows(wrong, GREEN)


def test_frames_questions_and_boxes_are_shown():
    paints = ["red", "green", "blue", "yellow", "white"]
    frames = [Image.new("RGB", (48, 48), paint) for paint in paints]
    video = Domain("clips", Task.VIDEO, ("up", "down"), "which way?", 0.5)
    clip = Sample("a", frames[0], Answer(label="up"), None, tuple(frames[1:]))
    sheet = pictures.answer_sheet([clip], [Answer(label="up")], video)
    assert shows(sheet, (255, 0, 0), (255, 255, 255))  # the first frame and the last
    place = Domain("places", Task.GROUNDING, (), "locate {}", 0.5)
    box = Box(10, 10, 40, 40, "left cat")
    asked = Sample("a", frames[2], Answer((box,)), "left cat")
    assert shows(pictures.answer_sheet([asked], [Answer((box,))], place), GREEN)
    assert shows(pictures.answer_sheet([asked], [Answer()], place), RED)  # nothing was found
