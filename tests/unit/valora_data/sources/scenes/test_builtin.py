"""Built-in domains of every task: repeatable, apart by split, balanced, and true."""

from collections import Counter

import numpy as np
import pytest
from PIL.Image import Image
from sklearn.datasets import load_digits

from tests.bench.base_models.questions import caption_phrases
from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.schema import Domain, Split, Task
from valora_data.sources.scenes.builtin import SCENES, builtin_domain, builtin_samples
from valora_data.sources.scenes.classification import FRAMES, SURFACES
from valora_data.sources.scenes.photographs import PHOTOGRAPHS

DOMAINS = [(task, name) for task in Task.all() for name in SCENES.get(task, ())]
CHOICES = [(t, n) for t, n in DOMAINS if t is not Task.DETECTION and builtin_domain(t, n).labels]


def samples(task, name, split=Split.TRAIN, count=24, seed=0):
    return list(builtin_samples(task, name, split, count, seed))


@pytest.mark.parametrize("task", [task for task in Task.all() if task is not Task.CONTEXT])
def test_every_task_has_at_least_four_domains(task):
    names = SCENES[task]
    assert len(names) >= 4
    for name in names:
        labels = builtin_domain(task, name).labels
        Domain(name, task, labels, builtin_domain(task, name).prompt, 0.8)  # checks itself
        assert bool(labels) >= (task.spec.labels == "required")


@pytest.mark.parametrize(("task", "name"), DOMAINS)
def test_samples_are_repeatable_and_their_own(task, name):
    def seen(count=24, seed=0):
        some = samples(task, name, count=count, seed=seed)
        return [(s.answer, *map(Image.tobytes, s.images)) for s in some]

    some = samples(task, name)
    if name != "digits":  # which come in a random order
        assert some[7].id == f"{name}/train/00007"
    assert seen() == seen()
    assert seen(5) == seen()[:5] != seen(5, seed=1)
    for sample in some:
        assert all(image.size == (96, 96) and image.mode == "RGB" for image in sample.images)
        assert len(sample.images) == (FRAMES if task is Task.VIDEO else 1)
    # No split shows what another one does.
    check_no_leak({split: samples(task, name, split, 12) for split in Split})


@pytest.mark.parametrize(("task", "name"), DOMAINS)
def test_answers_are_what_the_task_asks_for(task, name):
    labels = builtin_domain(task, name).labels
    for sample in samples(task, name):
        answer = sample.answer
        if (task, name) in CHOICES:
            assert answer.choice in labels
        if task is Task.VQA:
            assert len(answer.answers) == 10
            assert answer.answers.count(answer.choice) >= 7
            assert sample.prompt.endswith("?")
        if task is Task.CAPTION:
            assert len(set(answer.captions)) == len(answer.captions) == 3
            assert sample.prompt is None
        if task is Task.GROUNDING:
            (box,) = answer.boxes
            assert box.label == sample.prompt
            assert 0 <= box.x0 <= box.x1 - 3 <= 93
            assert 0 <= box.y0 <= box.y1 - 3 <= 93


@pytest.mark.parametrize(("task", "name"), CHOICES)
def test_labels_are_balanced(task, name):
    labels = builtin_domain(task, name).labels
    found = Counter(s.answer.choice for s in samples(task, name, count=12 * len(labels)))
    assert set(found) == set(labels)
    assert max(found.values()) < 12 + 4 * 12**0.5  # four standard deviations of a fair draw


def test_the_digits_are_those_of_scikit_learn():
    real = load_digits()
    counts = {Split.TRAIN: 719, Split.UNLABELLED: 449, Split.VAL: 270, Split.TEST: 359}
    for split, count in counts.items():
        found = samples(Task.CLASSIFICATION, "digits", split, count)
        assert len({s.id for s in found}) == count
        for sample in found[:40]:
            place = int(sample.id.split("/")[1])
            assert sample.answer.label == str(real.target[place])
            small = np.asarray(sample.image.convert("L").resize((8, 8)), dtype=float)
            assert np.corrcoef(small.ravel(), real.images[place].ravel())[0, 1] > 0.97
        with pytest.raises(DataError, match=rf"holds {count} images, fewer than {count + 1}"):
            samples(Task.CLASSIFICATION, "digits", split, count + 1)


def test_colours_and_places_are_true():
    """Where a phrase says left, the box is left of the middle, and so on."""
    for sample in samples(Task.GROUNDING, "place_reference", count=60):
        (box,) = sample.answer.boxes
        x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        side = sample.prompt.split()[0]
        assert {"left": x < 48, "right": x > 48, "top": y < 48, "bottom": y > 48}[side]
    reds = [s for s in samples(Task.GROUNDING, "color_reference", count=150)
            if s.prompt.startswith("red ")]  # fmt: skip
    assert len(reds) > 5
    for sample in reds:
        (box,) = sample.answer.boxes
        pixels = np.asarray(sample.image.crop(box.xyxy), dtype=float)
        outside = np.asarray(sample.image, dtype=float)
        redness = (pixels[..., 0] - pixels[..., 1:].max(-1)).mean()
        assert redness > (outside[..., 0] - outside[..., 1:].max(-1)).mean()


def test_captions_name_what_is_there():
    for sample in samples(Task.CAPTION, "digit_caption"):
        digits = sample.answer.captions[2].removesuffix(" in a row").split()
        assert sum(caption_phrases(sample.answer.captions[0]).values()) == len(digits)
    plural = [s.answer.captions[0] for s in samples(Task.CAPTION, "count_caption", count=60)]
    assert any(caption.startswith("two") for caption in plural)


def test_surfaces_are_those_photographs():
    files = {"coins": "coins", "tissue": "ihc", "stars": "hubble"}
    for surface, number in SURFACES.items():
        assert files.get(surface, surface) in PHOTOGRAPHS[number].file


def test_unknown_domains_are_named():
    with pytest.raises(DataError, match="unknown built-in domain 'fox' of task video: choose from"):
        samples(Task.VIDEO, "fox")
    with pytest.raises(DataError, match="unknown built-in domain 'digits' of task vqa"):
        builtin_domain(Task.VQA, "digits")
