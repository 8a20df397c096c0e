"""What the base model is asked about generic scenes and clips, and whether answers are true."""

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest

from tests.bench.base_models.clips import DOMAIN_WORDS, domain_words_in, draw_clip
from tests.bench.base_models.questions import (
    TASKS,
    ask_motion,
    ask_which_image,
    caption_phrases,
    vocabulary,
)
from tests.bench.base_models.scenes import center, draw_scene, longer_side, plural
from tests.bench.base_models.shapes import SHAPES
from valora_data.sources.generic.scenes import PATTERNS, SIZE


@cache
def scenes():
    return [draw_scene(seed) for seed in range(120)]


def asked(task, times=4):
    """Questions of one task with their scenes."""
    rng = np.random.default_rng(0)
    pairs = [(scene, TASKS[task](scene, rng)) for scene in scenes() for _ in range(times)]
    return [(scene, question) for scene, question in pairs if question is not None]


def named(scene, name):
    """Things that a name without colour, or with one, means."""
    return [t for t in scene.things if name in (t.shape, t.name)]


def singular(words):
    for shape in SHAPES:
        words = re.sub(rf"\b{plural(shape)}\b", shape, words)
    return words


def test_no_word_of_the_domains_is_ever_asked_or_answered():
    assert {"license", "plate", "vehicle", "vegetation", "bicycle", "person"} <= DOMAIN_WORDS
    assert domain_words_in("Detect a License plate") == {"license", "plate"}
    text = vocabulary()
    for task in TASKS:
        text += [f"{question.prompt} {question.answer}" for _, question in asked(task)]
    assert not domain_words_in(" ".join(text))


def test_detection_wants_exactly_the_named_things():
    for scene, question in asked("detect"):
        name = question.prompt.removeprefix("detect ")
        words = name.split(" ", 1)
        if name == "thing":
            meant = list(scene.things)
        elif name.endswith(" thing"):
            meant = [t for t in scene.things if t.color == words[0]]
        elif words[0] in PATTERNS:
            meant = [t for t in scene.things if (t.pattern, t.shape) == tuple(words)]
        else:
            meant = named(scene, name)
        assert question.boxes == tuple(t.box for t in meant)


def test_counts():
    for scene, question in asked("count"):
        what = re.fullmatch(r"how many (.+)\?", question.prompt).group(1)
        n = len(scene.things) if what == "things" else len(named(scene, singular(what)))
        assert question.answer == str(n)


@pytest.mark.parametrize(
    ("task", "prompt"),
    {"color": r"what color is the (.+)\?", "pattern": r"which pattern has the (.+)\?",
     "size": r"is the (.+) big or small\?", "where": r"where is the (.+)\?"}.items(),
)  # fmt: skip
def test_attributes_and_places(task, prompt):
    for scene, question in asked(task):
        (thing,) = named(scene, re.fullmatch(prompt, question.prompt).group(1))
        x, y = center(thing)
        if task == "where":  # thirds of the image
            said = [place in question.answer for place in ("left", "right", "top", "bottom")]
            assert said == [x < SIZE / 3, x > SIZE * 2 / 3, y < SIZE / 3, y > SIZE * 2 / 3]
        else:
            size = "big" if longer_side(thing) > 24 else "small"
            truth = {"color": thing.color, "pattern": thing.pattern, "size": size}
            assert question.answer == truth[task]


def test_yes_and_no_are_true_and_balanced():
    answers = Counter()
    for scene, question in asked("yes_no", 10):
        name = re.fullmatch(r"is there an? (.+)\?", question.prompt).group(1)
        assert question.answer == ("yes" if named(scene, name) else "no")
        answers[question.answer] += 1
    assert 0.4 < answers["yes"] / sum(answers.values()) < 0.6
    for scene, question in asked("relation"):
        pattern = r"is the (.+) (left of|right of|above|below) the (.+)\?"
        a, side, b = re.fullmatch(pattern, question.prompt).groups()
        (first,), (second,) = named(scene, a), named(scene, b)
        dx, dy = (p - q for p, q in zip(center(first), center(second), strict=True))
        truth = {"left of": dx < 0, "right of": dx > 0, "above": dy < 0, "below": dy > 0}[side]
        assert question.answer == ("yes" if truth else "no")


def test_captions_name_every_thing():
    for scene, question in asked("caption", 1):
        names = [phrase.split(" ", 1)[1] for phrase in caption_phrases(question.answer).elements()]
        assert sorted(names) == sorted(thing.name for thing in scene.things)
    phrases = caption_phrases("a red star, a blue ring and a key")
    assert phrases == Counter(["a key", "a red star", "a blue ring"])


def test_series_ask_for_the_only_image_and_the_true_motion():
    rng = np.random.default_rng(0)
    for start in range(0, 60, 4):
        shown = scenes()[start : start + 3]
        question = ask_which_image(shown, rng)
        if question is None:
            continue
        shape = question.prompt.removeprefix("which image has the ")[:-1]
        has = [any(t.shape == shape for t in scene.things) for scene in shown]
        assert has.count(True) == 1
        assert question.answer == ("first", "second", "third")[has.index(True)]
    for seed in range(20):
        frames, shape, way = draw_clip(seed, 2 + seed % 3)
        path = [center(next(t for t in f.things if t.shape == shape)) for f in frames]
        dx, dy = path[-1][0] - path[0][0], path[-1][1] - path[0][1]
        words = [(dx, "right"), (-dx, "left"), (dy, "down"), (-dy, "up")]
        assert ask_motion(shape, way).answer == max(words)[1]
        still = [[t for t in f.things if t.shape != shape] for f in frames]
        assert all(things == still[0] for things in still)
