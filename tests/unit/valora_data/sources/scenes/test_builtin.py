"""Built-in domains of every task: as they ever were, apart by split, and true."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.ops import box_iou, masks_to_boxes

from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.schema import Split, Task
from valora_data.sources.scenes import photographs
from valora_data.sources.scenes.boards import scene_rng
from valora_data.sources.scenes.builtin import SCENES, builtin_samples
from valora_data.sources.scenes.detection import MAX_IOU, draw_scene
from valora_data.sources.scenes.photographs import PHOTOGRAPHS, photograph_crop, region_of

DRAWN = Path(__file__).parents[4] / "fixtures" / "drawn.npz"  # written by `drawn`
DOMAINS = [(task, name) for task in Task.all() for name in SCENES.get(task, ())]


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
    other = samples(task, name, Split.TRAIN, 4, seed=1)
    assert [s.image for s in other] != [s.image for s in samples(task, name, Split.TRAIN, 4)]
    # No split shows what another one does.
    check_no_leak({split: samples(task, name, split, 6) for split in Split})


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
    reds = [s for s in samples(Task.GROUNDING, "color_reference", count=80)
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


@pytest.mark.parametrize("domain", SCENES[Task.DETECTION])
def test_boxes_are_tight_around_targets_that_stand_out_and_can_be_told_apart(domain):
    for index, sample in enumerate(samples(Task.DETECTION, domain, Split.TEST, 16)):
        image, masks = draw_scene(domain, scene_rng(domain, Split.TEST, index, 0), Split.TEST)
        boxes = sample.answer.boxes
        assert sample.image.tobytes() == image.tobytes()
        assert all((box.label, box.confidence) == (domain, 1.0) for box in boxes)
        assert len(boxes) == len(masks) <= 4
        if not boxes:
            continue
        found = torch.tensor([box.xyxy for box in boxes])
        expected = masks_to_boxes(torch.from_numpy(np.stack(masks)))
        expected[:, 2:] += 1  # torchvision's edges are the last pixels, ours lie behind them
        assert found.tolist() == expected.tolist()
        assert found.min() >= 0
        assert found.max() <= 96
        assert (found[:, 2:] - found[:, :2]).min() >= 8
        cells = (found[:, :2] + found[:, 2:]) // 24  # a detector says one box per cell
        assert len(cells.unique(dim=0)) == len(boxes)
        assert box_iou(expected, expected).fill_diagonal_(0).max() <= MAX_IOU
        pixels = np.asarray(image, dtype=float)
        around = pixels[~np.any(masks, axis=0)].mean(0)
        for mask in masks:
            inside = pixels[mask]
            assert max(np.abs(inside.mean(0) - around).max(), inside.std()) > 10


def test_crops_stay_inside_their_region(monkeypatch):
    """Each region painted in one grey level: a crop of a split shows its level alone."""
    levels = {split: 40 + 50 * place for place, split in enumerate(Split)}
    painted = {}
    for photograph in range(len(PHOTOGRAPHS)):
        image = photographs._pixels(photograph).copy()
        for split in Split:
            level = levels[split]
            image.paste((level, level, level), region_of(photograph, split))
        painted[photograph] = image
    monkeypatch.setattr(photographs, "_pixels", painted.__getitem__)
    rng = np.random.default_rng(0)
    for split in Split:
        for _ in range(60):
            # A crop that reached into another region would show two levels.
            crop = photograph_crop(rng, split, 32).astype(int)
            assert np.ptp(crop, axis=(0, 1)).max() <= 1


@pytest.mark.parametrize("package", ["skimage", "a_package_that_is_not_installed"])
def test_missing_photograph_names_the_remedy(package, monkeypatch):
    missing = {f"{package}/data/no_such_photograph.png": (0, 0, 400, 400)}
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", missing)
    photographs._pixels.cache_clear()
    with pytest.raises(DataError, match=r"no_such_photograph\.png .*'valora\[train\]'"):
        photograph_crop(np.random.default_rng(0), Split.TRAIN)
    photographs._pixels.cache_clear()
