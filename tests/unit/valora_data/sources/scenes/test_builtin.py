"""Built-in domains of every task: as they ever were, apart by split, balanced, and true."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.schema import Split, Task
from valora_data.sources.scenes.builtin import SCENES, builtin_domain, builtin_samples
from valora_data.sources.scenes.shelves import FRAMES

DRAWN = Path(__file__).parents[4] / "fixtures" / "drawn.npz"  # written by `drawn`
DOMAINS = [(task, name) for task in Task.all() for name in SCENES.get(task, ())]
CHOICES = [(t, n) for t, n in DOMAINS if t is not Task.DETECTION and builtin_domain(t, n).labels]


def samples(task, name, split=Split.TRAIN, count=24, seed=0):
    return list(builtin_samples(task, name, split, count, seed))


def drawn(task, name, seed=0):
    """Eight samples: small copies of their images, and a hash of what is asked and answered."""
    some = [s for part in (Split.TRAIN, Split.TEST) for s in samples(task, name, part, 4, seed)]
    images = [s.images[-1].resize((8, 8), Image.Resampling.BOX) for s in some]
    told = repr([(s.id, s.prompt, s.answer) for s in some])
    return np.stack([np.asarray(image) for image in images]), sha256(told.encode()).hexdigest()


@pytest.mark.parametrize(("task", "name"), DOMAINS)
def test_samples_are_those_of_earlier_versions(task, name):
    """But for a level of rounding, as other versions of libjpeg decode what a camera wrote."""
    with np.load(DRAWN) as before:
        pixels, told = before[f"{task}/{name}"], str(before[f"{task}/{name}/told"])
    found, said = drawn(task, name)
    assert np.abs(found.astype(int) - pixels).max() <= 1
    assert said == told
    assert (drawn(task, name, seed=1)[0] != found).any()
    # No split shows what another one does.
    check_no_leak({split: samples(task, name, split, 12) for split in Split})


@pytest.mark.parametrize(("task", "name"), DOMAINS)
def test_answers_are_what_the_task_asks_for(task, name):
    labels, some = builtin_domain(task, name).labels, samples(task, name)
    assert [s.answer for s in samples(task, name, count=5)] == [s.answer for s in some[:5]]
    for sample in some:
        answer = sample.answer
        assert all(image.size == (96, 96) and image.mode == "RGB" for image in sample.images)
        assert len(sample.images) == (FRAMES if task is Task.VIDEO else 1)
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


def test_unknown_domains_are_named():
    with pytest.raises(DataError, match="unknown built-in domain 'fox' of task video: choose from"):
        samples(Task.VIDEO, "fox")
    with pytest.raises(DataError, match="unknown built-in domain 'digits' of task vqa"):
        builtin_domain(Task.VQA, "digits")
