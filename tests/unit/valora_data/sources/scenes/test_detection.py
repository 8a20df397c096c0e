"""The six built-in detection domains, and the pen that draws them."""

import subprocess
import sys
from hashlib import sha256
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou, masks_to_boxes

from valora_data.images import encoded_file
from valora_data.schema import Split, Task
from valora_data.sources.scenes.boards import scene_rng
from valora_data.sources.scenes.builtin import SCENES, builtin_samples
from valora_data.sources.scenes.detection import MAX_IOU, draw_scene
from valora_data.sources.scenes.drawing import GLYPHS, Pen, arc, lit
from valora_data.sources.scenes.objects import NEAR_MISSES, TARGETS

COUNT = 40
DOMAINS = ("license_plate", "traffic_sign", "vehicle", "vegetation", "bicycle", "person")


def samples(domain, split, count):
    return list(builtin_samples(Task.DETECTION, domain, split, count))


def test_domains_are_those_of_figure_10():
    assert tuple(SCENES.get(Task.DETECTION, ())) == DOMAINS == tuple(NEAR_MISSES)


@pytest.mark.parametrize("domain", DOMAINS)
def test_boxes_are_tight_around_targets_that_stand_out_and_can_be_told_apart(domain):
    for index, sample in enumerate(samples(domain, Split.TEST, COUNT)):
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


def test_counts_follow_the_difficulty():
    counts = [len(sample.answer.boxes) for sample in samples("person", Split.VAL, 200)]
    assert counts.count(0) >= 10
    assert max(counts) >= 3
    assert 0.8 < np.mean(counts) < 2.2


def test_an_image_keeps_the_file_that_the_camera_wrote():
    image = samples("bicycle", Split.VAL, 3)[2].image
    file = encoded_file(image)
    assert file is not None
    assert file.content.startswith(b"\xff\xd8\xff")
    with Image.open(BytesIO(file.content)) as opened:
        assert opened.convert("RGB").tobytes() == image.tobytes()


def test_sample_is_the_same_in_another_process():
    """Neither hash randomisation nor earlier draws leak into an image."""
    code = (
        "from hashlib import sha256; from valora_data.schema import Split, Task\n"
        "from valora_data.sources.scenes.builtin import builtin_samples\n"
        "(sample,) = builtin_samples(Task.DETECTION, 'vehicle', Split.VAL, 1)\n"
        "print(sha256(sample.image.tobytes()).hexdigest())"
    )
    there = subprocess.check_output([sys.executable, "-c", code], text=True)
    samples("person", Split.VAL, 1)
    assert there.strip() == sha256(samples("vehicle", Split.VAL, 1)[0].image.tobytes()).hexdigest()


@pytest.mark.parametrize("painters", [TARGETS, NEAR_MISSES], ids=["targets", "near_misses"])
def test_painters_vary_and_draw_nothing_at_the_rim(painters):
    """A shape that touches the rim of its sheet would have been cut off."""
    for name, paint in painters.items():
        rng = np.random.default_rng(0)
        layers = [paint(rng).layer() for _ in range(60)]
        assert len({layer.tobytes() for layer in layers}) == 60
        for coverage in (layer[..., 3] for layer in layers):
            assert coverage.max() > 0.9, name
            rim = (coverage[0], coverage[-1], coverage[:, 0], coverage[:, -1])
            assert max(side.max() for side in rim) < 0.5, name


def test_a_pen_reduces_as_pillow_does():
    """Colours at edges, where only some of the finer pixels are covered."""
    pen = Pen(20, 10, margin=0)
    pen.fill((10, 200, 30), 0.05, 0.1, 0.9, 0.3, 0.4, 0.95)
    pen.line((230, 7, 90), 1.3, 0.0, 0.0, 1.0, 0.8)
    with_alpha = Image.frombytes("RGBA", pen._image.size, pen._image.tobytes())
    expected = np.asarray(with_alpha.reduce(4), dtype=np.float32)
    assert set(np.unique(expected[..., 3])) - {0, 255}
    np.testing.assert_array_equal(pen.layer(), expected / np.float32([1, 1, 1, 255]))


def test_pen_draws_where_it_is_told():
    pen = Pen(20, 10, margin=0.5)
    pen.box((200, 100, 50), 0.25, 0.5, 0.75, 1.0)
    coverage = pen.layer()[..., 3]
    # 10 × 5 pixels, and a supersampled line of rim at most.
    assert coverage.sum() == pytest.approx(50, rel=0.15)
    ys, xs = np.nonzero(coverage > 0.5)
    assert (xs.min(), xs.max() + 1, ys.min(), ys.max() + 1) == (15, 25, 10, 15)
    assert pen.layer()[12, 20, :3].tolist() == [200, 100, 50]


@pytest.mark.parametrize(
    ("pose", "centre"),
    [({}, (4.5, 4.5)), ({"mirrored": True}, (35, 4.5)), ({"turn": 90}, (35, 4.5)),
     ({"turn": 180}, (35, 35))],
)  # fmt: skip
def test_pose_turns_and_mirrors(pose, centre):
    pen = Pen(40, 40, **pose, margin=0)
    pen.box((255, 255, 255), 0.0, 0.0, 0.25, 0.25)  # the top left corner
    ys, xs = np.nonzero(pen.layer()[..., 3] > 0.5)
    assert (xs.mean(), ys.mean()) == pytest.approx(centre, abs=1)


def test_light_brightens_the_side_it_comes_from():
    pixels = lit(np.full((8, 8, 4), 100, dtype=np.float32), (0.0, -1.0), 0.3)
    assert pixels[[0, -1], 0, 0] == pytest.approx([130, 70])
    assert (pixels[..., 3] == 100).all()


def test_arc_is_part_of_an_ellipse():
    x, y = np.array(arc(0.5, 0.5, 0.4, 0.2, start=np.pi)).reshape(-1, 2).T
    assert ((x - 0.5) / 0.4) ** 2 + ((y - 0.5) / 0.2) ** 2 == pytest.approx(1)
    assert y.max() <= 0.5 + 1e-9  # the upper half: y points down
    assert (x[0], y[0], x[-1], y[-1]) == pytest.approx((0.1, 0.5, 0.9, 0.5))


def test_glyphs_are_distinct_and_inside_the_unit_square():
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    assert all(0 <= v <= 1 for glyph in GLYPHS.values() for stroke in glyph for v in stroke)
